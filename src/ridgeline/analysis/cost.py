"""FLOPs and bytes of every component of a forward pass, in two countings.

chapter: the closed forms of a textbook: 16-bit weights, activations and cache, each tensor of a kernel moved once, attention
over the whole rectangle of queries and keys. executed: what the kernels that run the model move: weights as stored, keys and
values in the cache's type, intermediates as our fused kernels (or torch) write and read them, masked pairs that they compute.
"""
from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import fields, replace
from functools import lru_cache

from ridgeline.analysis.cost_planned import latent_works, moe_works
from ridgeline.analysis.cost_recurrent import recurrent_works
from ridgeline.analysis.counter import NORM_OPERATIONS, Counter
from ridgeline.analysis.spec import Attention, Mla, Mlp, Moe, Part, Recurrent, Spec
from ridgeline.analysis.work import COUNTINGS, KINDS, Rows, Step, Totals, Work, keys_read, totals, visible_pairs
from ridgeline.errors import ConfigError

ROTATION_OPERATIONS = 3            # of a rotated element: two products, one sum
KEY_VECTOR = 16                    # keys whose scores are computed together: csrc/kernels/attention_tile.h


def count(spec: Spec, step: Step, counting: str = "executed") -> list[Work]:
    """The works of one pass, in the order in which they run; each (layer, component) comes once.

    raises ConfigError for a counting that is neither "executed" nor "chapter".
    """
    if counting not in COUNTINGS:
        raise ConfigError(f"counting is {counting!r}; valid: {', '.join(COUNTINGS)}")
    rows = [r for r in step if r.tokens]
    if not rows:
        return []
    counter = Counter(spec, rows, counting == "chapter")
    works, known = counter.embed(), dict[Part, list[Work]]()
    for index, layer in enumerate(spec.layers):
        for part in (layer.mix, layer.feed):
            # Most layers are alike: a model of 80 takes 6 ms instead of 60.
            works += [replace(work, layer=index) for work in _works(counter, part, known)]
    return works + counter.ends()


def tally(spec: Spec, step: Step, counting: str = "executed", kinds: Container[str] = KINDS) -> Totals:
    """The sums over the works of these kinds, without making each of them: for many passes."""
    rows = [r for r in step if r.tokens]
    if not rows:
        return totals(())
    counter, known = Counter(spec, rows, counting == "chapter"), dict[Part, list[Work]]()
    found = {part: totals(w for w in _works(counter, part, known) if w.kind in kinds) for part in _alike(spec)}
    ends = totals(w for w in (*counter.embed(), *counter.ends()) if w.kind in kinds)
    times = [(ends, 1), *((found[part], number) for part, number in _alike(spec).items())]
    return Totals(*(sum(number * getattr(sums, f.name) for sums, number in times) for f in fields(Totals)))


@lru_cache(maxsize=8)
def _alike(spec: Spec) -> dict[Part, int]:
    """Parts of layers, and how many there are of each."""
    found: dict[Part, int] = {}
    for layer in spec.layers:
        for part in (layer.mix, layer.feed):
            found[part] = found.get(part, 0) + 1
    return found


def _works(counter: Counter, part: Part, known: dict[Part, list[Work]]) -> list[Work]:
    if part not in known:
        known[part] = counter.shared(COST[type(part.inner)](counter, 0, part))
    return known[part]


def attention_works(counter: Counter, layer: int, part: Part) -> list[Work]:
    a = part.inner
    assert isinstance(a, Attention)
    traffic, tokens, d = counter.traffic(part.native), counter.tokens, counter.spec.hidden
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    form, out_form = counter.form(a.q, part.native), counter.form(a.o, part.native)
    turned = 2 * a.rotated * (a.heads + a.kv_heads) // 2
    operations = ROTATION_OPERATIONS * turned + NORM_OPERATIONS * (queries + keys) * bool(a.norm)
    gate = traffic.elements(3 * queries) if a.gated else 0        # the output times the gate's sigmoid
    width = 2 * a.kv_width if counter.chapter else a.kv_bytes(counter.spec.kv_dtype)
    return [
        counter.norm(layer, "attention.norm", part, form),
        counter.linear(layer, "attention.qkv", tokens, traffic.qkv(d, a.q.rows + 2 * keys, form), part.native, a.q, a.k, a.v),
        Work(layer, "attention.heads", "elementwise", tokens, tokens * operations,
             activation_bytes=tokens * traffic.heads(queries + keys, keys, bool(a.rotated) + bool(a.norm)),
             kv_bytes=0 if counter.chapter else tokens * width, kv_type=counter.spec.kv_dtype,
             shape=counter.shape(part.native, queries + 2 * keys, bool(a.norm))),
        _core(counter, layer, part, a, width, traffic.core(queries, queries)),
        counter.linear(layer, "attention.out", tokens, traffic.out(queries, d, out_form) + gate, part.native, a.o),
        counter.residual(layer, "attention.residual", part)]


def _core(counter: Counter, layer: int, part: Part, a: Attention, width: int, moved: int) -> Work:
    """Scores and sums: 4 operations a pair, head and dimension. Every key that a sequence sees is read once."""
    read = [keys_read(r, a.window) for r in counter.rows]
    useful = sum(visible_pairs(r, a.window) for r in counter.rows)
    rectangle = sum(r.tokens * keys for r, keys in zip(counter.rows, read))
    pairs: float = rectangle                         # the chapter's, and what torch computes
    if not counter.chapter and counter.spec.kernels == "native" and part.native:
        scores = sum(computed_scores(r, a.window) for r in counter.rows)
        pairs = (scores + useful) / 2                # a score and a sum are half of a pair's operations each
    elif not counter.chapter and counter.spec.kernels == "fused":
        pairs = useful
    each, spec = 4 * a.heads * a.head_dim, counter.spec
    compute = counter.attention_compute()
    return Work(layer, "attention.core", "attention", counter.tokens, round(each * pairs), useful_flops=each * useful,
                activation_bytes=counter.tokens * moved, kv_bytes=width * sum(read), compute=compute,
                shape=counter.shape(part.native, a.heads, a.kv_heads, a.head_dim), kv_type=spec.kv_dtype)


@lru_cache(maxsize=4096)
def computed_scores(rows: Rows, window: int | None) -> int:
    """Scores that our kernels compute: vectors of keys, from the one with a query's first visible key to that of its last."""
    total = 0
    for at in range(rows.start, rows.context):
        end = at + 1 if rows.parents else rows.end(at)
        begin = 0 if window is None else max(0, at + 1 - window)
        total += (-(-end // KEY_VECTOR) - begin // KEY_VECTOR) * KEY_VECTOR
    return total


def mlp_works(counter: Counter, layer: int, part: Part) -> list[Work]:
    m = part.inner
    assert isinstance(m, Mlp)
    traffic, tokens, d, f = counter.traffic(part.native), counter.tokens, counter.spec.hidden, m.up.rows
    form, down_form = counter.form(m.up, part.native), counter.form(m.down, part.native)
    first = (m.up,) if m.gate is None else (m.gate, m.up)
    return [
        counter.norm(layer, "mlp.norm", part, form),
        counter.linear(layer, "mlp.up", tokens, traffic.up(d, f, m.gate is not None, form, down_form), part.native, *first,
                       activated=f),
        counter.linear(layer, "mlp.down", tokens, traffic.down(f, d, down_form), part.native, m.down),
        counter.residual(layer, "mlp.residual", part)]


COST: dict[type, Callable[[Counter, int, Part], list[Work]]] = {
    Attention: attention_works, Mlp: mlp_works, Recurrent: recurrent_works, Mla: latent_works, Moe: moe_works}
