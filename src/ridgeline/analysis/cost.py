"""FLOPs and bytes of every component of a forward pass, in two countings.

chapter: the closed forms of a textbook: 16-bit weights, activations and cache, each tensor of a kernel moved once, attention
over the whole rectangle of queries and keys. executed: what the kernels that run the model move: weights as stored, keys and
values in the cache's type, intermediates as our fused kernels (or torch) write and read them, masked pairs that they compute.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ridgeline.analysis.spec import Attention, Matrix, Mlp, Part, Spec
from ridgeline.analysis.traffic import Chapter, Fused, Native, Torch, Traffic
from ridgeline.analysis.work import COUNTINGS, Rows, Step, Work, keys_read, visible_pairs
from ridgeline.errors import ConfigError

FLOAT_KINDS = ("f32", "f16", "bf16")
CHAPTER_WEIGHT = 2                 # bytes
NORM_OPERATIONS = 4                # of an element: square, add, scale, weight
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
    works = [counter.embed()]
    for index, layer in enumerate(spec.layers):
        for part in (layer.mix, layer.feed):
            works += COST[type(part.inner)](counter, index, part)
    return works + counter.ends()


@dataclass(frozen=True)
class Counter:
    """What the costs of all layers of one pass share."""

    spec: Spec
    rows: Sequence[Rows]
    chapter: bool

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.rows)

    @property
    def wanted(self) -> int:
        return sum(r.wanted for r in self.rows)

    def traffic(self, native: bool) -> Traffic:
        if self.chapter:
            return Chapter()
        if self.spec.kernels == "fused":
            return Fused(self.spec.stream)
        return Native() if native and self.spec.kernels == "native" else Torch(self.spec.stream)

    def form(self, matrix: Matrix, native: bool) -> str:
        """The arithmetic of a product: quantised weights in int8 or exactly, bfloat16 ones in bfloat16 or exactly."""
        if self.chapter:
            return "bfloat16"
        if self.spec.kernels != "native" or not native:
            return {4: "float32", 2: "bfloat16"}.get(self.spec.stream, "float32")
        if matrix.kind not in FLOAT_KINDS:
            return "int8" if self.spec.precision == "int8" else "float32"
        return "bfloat16" if matrix.kind == "bf16" and self.spec.precision != "float32" else "float32"

    def weights(self, *matrices: Matrix) -> dict[str, Any]:
        """Fields of a Work: bytes and type of these matrices."""
        if self.chapter:
            return {"weight_bytes": CHAPTER_WEIGHT * sum(m.parameters for m in matrices), "weight_type": "bf16"}
        sizes: dict[str, int] = {}
        for m in matrices:
            sizes[m.kind] = sizes.get(m.kind, 0) + m.nbytes
        return {"weight_bytes": sum(sizes.values()), "weight_type": max(sizes, key=lambda kind: sizes[kind])}

    def linear(self, layer: int | None, component: str, rows: int, moved: int, native: bool, *matrices: Matrix,
               activated: int = 0) -> Work:
        return Work(layer, component, "linear", rows, 2 * rows * sum(m.parameters for m in matrices),
                    activation_bytes=rows * moved, compute=self.form(matrices[0], native), **self.weights(*matrices),
                    shape=(sum(m.rows for m in matrices), matrices[0].cols, activated))

    def elementwise(self, layer: int | None, component: str, rows: int, flops: int, moved: int, width: int, norm: bool) -> Work:
        return Work(layer, component, "elementwise", rows, rows * flops, activation_bytes=rows * moved, shape=(width, norm))

    def norm(self, layer: int, component: str, part: Part, form: str) -> Work:
        d = self.spec.hidden
        return self.elementwise(layer, component, self.tokens, NORM_OPERATIONS * d * part.before,
                                self.traffic(part.native).norm(d, form, part.before), d, part.before)

    def residual(self, layer: int, component: str, part: Part) -> Work:
        d = self.spec.hidden
        return self.elementwise(layer, component, self.tokens, d * (1 + NORM_OPERATIONS * part.after),
                                self.traffic(part.native).residual(d, part.after), d, part.after)

    def embed(self) -> Work:
        matrix, d = self.spec.embed, self.spec.hidden
        row = CHAPTER_WEIGHT * d if self.chapter else -(-matrix.nbytes // matrix.rows)
        return Work(None, "embed", "lookup", self.tokens, 0, weight_bytes=self.tokens * row,
                    activation_bytes=self.tokens * self.traffic(True).elements(d),
                    weight_type="bf16" if self.chapter else matrix.kind)

    def ends(self) -> list[Work]:
        """The final norm, the head and the choice of tokens, for the rows that are wanted alone.

        The head's logits are written by the chapter's count only: the best tokens are found strip by strip.
        """
        if not self.wanted:
            return []
        spec, traffic = self.spec, self.traffic(True)
        logits = traffic.elements(spec.vocab) if self.chapter else 0
        return [
            self.elementwise(None, "final_norm", self.wanted, NORM_OPERATIONS * spec.hidden, traffic.elements(2 * spec.hidden),
                             spec.hidden, True),
            self.linear(None, "head", self.wanted, traffic.elements(spec.hidden) + logits, True, spec.head),
            self.elementwise(None, "sample", self.wanted, spec.vocab, logits, spec.vocab, False)]


def attention_works(counter: Counter, layer: int, part: Part) -> list[Work]:
    a = part.inner
    assert isinstance(a, Attention)
    traffic, tokens, d = counter.traffic(part.native), counter.tokens, counter.spec.hidden
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    form, out_form = counter.form(a.q, part.native), counter.form(a.o, part.native)
    turned = 2 * a.rotated * (a.heads + a.kv_heads) // 2
    operations = ROTATION_OPERATIONS * turned + NORM_OPERATIONS * (queries + keys) * bool(a.norm)
    width = 2 * a.kv_width if counter.chapter else a.kv_bytes(counter.spec.kv_dtype)
    return [
        counter.norm(layer, "attention.norm", part, form),
        counter.linear(layer, "attention.qkv", tokens, traffic.qkv(d, a.q.rows + 2 * keys, form), part.native, a.q, a.k, a.v),
        Work(layer, "attention.heads", "elementwise", tokens, tokens * operations,
             activation_bytes=tokens * traffic.heads(queries + keys, keys, bool(a.rotated) + bool(a.norm)),
             kv_bytes=0 if counter.chapter else tokens * width, shape=(queries + 2 * keys, bool(a.norm)),
             kv_type=counter.spec.kv_dtype),
        _core(counter, layer, part, a, width, traffic.core(queries, queries)),
        counter.linear(layer, "attention.out", tokens, traffic.out(queries, d, out_form), part.native, a.o),
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
    narrow = counter.chapter or (spec.kv_dtype in ("bfloat16", "int8") and spec.precision != "float32")
    compute = "bfloat16" if narrow else "float32"
    return Work(layer, "attention.core", "attention", counter.tokens, round(each * pairs), useful_flops=each * useful,
                activation_bytes=counter.tokens * moved, kv_bytes=width * sum(read), compute=compute,
                shape=(a.heads, a.kv_heads, a.head_dim), kv_type=spec.kv_dtype)


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


COST: dict[type, Callable[[Counter, int, Part], list[Work]]] = {Attention: attention_works, Mlp: mlp_works}
