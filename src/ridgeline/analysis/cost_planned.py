"""The cost of layers that can be planned before the engine has them: latent attention and mixtures of experts."""
from __future__ import annotations

from dataclasses import replace

from ridgeline.analysis.counter import CHAPTER_ITEMSIZE, NORM_OPERATIONS, Counter
from ridgeline.analysis.spec import Matrix, Mla, Moe, Part
from ridgeline.analysis.work import Rows, Work, keys_read, visible_pairs

ROTATION_OPERATIONS = 3


def latent_works(counter: Counter, layer: int, part: Part) -> list[Work]:
    a = part.inner
    assert isinstance(a, Mla)
    traffic, tokens, d, spec = counter.traffic(part.native), counter.tokens, counter.spec.hidden, counter.spec
    form = counter.form(a.q_b, part.native)
    width = CHAPTER_ITEMSIZE * a.kv_width if counter.chapter else a.kv_bytes(spec.kv_dtype)
    queries, out = a.heads * (a.nope + a.rope), a.heads * a.value_dim
    first = (a.q_b, a.kv_a) if a.q_a is None else (a.q_a, a.q_b, a.kv_a)
    latents = a.rank + (0 if a.q_a is None else a.q_a.rows)
    operations = NORM_OPERATIONS * latents + ROTATION_OPERATIONS * a.rope * (a.heads + 1)
    useful = sum(latent_flops(r, a) for r in counter.rows)
    return [
        counter.norm(layer, "attention.norm", part, form),
        counter.linear(layer, "attention.qkv", tokens, traffic.qkv(d, queries + latents, form), part.native, *first),
        Work(layer, "attention.heads", "elementwise", tokens, tokens * operations,
             activation_bytes=tokens * traffic.heads(queries, a.kv_width, 1),
             kv_bytes=0 if counter.chapter else tokens * width, kv_type=spec.kv_dtype),
        Work(layer, "attention.core", "attention", tokens, useful, activation_bytes=tokens * traffic.core(queries, out),
             kv_bytes=width * sum(keys_read(r, a.window) for r in counter.rows), compute=counter.attention_compute(),
             kv_type=spec.kv_dtype, **counter.weights(a.kv_b)),
        counter.linear(layer, "attention.out", tokens, traffic.out(out, d, counter.form(a.o, part.native)), part.native, a.o),
        counter.residual(layer, "attention.residual", part)]


def latent_flops(rows: Rows, a: Mla) -> int:
    """The cheaper of two equal computations: keys and values of all tokens expanded from their latents, as prefill does it, or
    the expansion moved to queries and outputs, whose heads then meet the latents themselves, as decoding does it."""
    pairs, keys, per_head = visible_pairs(rows, a.window), keys_read(rows, a.window), a.rank * (a.nope + a.value_dim)
    expanded = keys * per_head + pairs * (a.nope + a.rope + a.value_dim)
    absorbed = rows.tokens * per_head + pairs * (2 * a.rank + a.rope)
    return 2 * a.heads * min(expanded, absorbed)


def moe_works(counter: Counter, layer: int, part: Part) -> list[Work]:
    m = part.inner
    assert isinstance(m, Moe)
    traffic, tokens, d, f = counter.traffic(part.native), counter.tokens, counter.spec.hidden, m.up.rows
    form = counter.form(m.up, part.native)
    touched = m.touched(tokens)

    def products(component: str, moved: int, shared: tuple[Matrix, ...], shared_moved: int, *expert: Matrix) -> Work:
        one = counter.linear(layer, component, tokens, m.active * moved + (shared_moved if shared else 0), part.native, *expert)
        always = 0 if not shared else counter.weights(*shared)["weight_bytes"]
        return replace(one, flops=m.active * one.flops + 2 * tokens * sum(x.parameters for x in shared),
                       weight_bytes=round(touched * one.weight_bytes) + always, shape=())

    wide = 0 if m.shared_up is None else m.shared_up.rows
    ups, downs = m.shared[:2], m.shared[2:]
    return [
        counter.norm(layer, "moe.norm", part, form),
        counter.linear(layer, "moe.router", tokens, traffic.qkv(d, m.experts, form, 1), part.native, m.router),
        products("moe.up", traffic.up(d, f, True, form, form), ups, traffic.up(d, wide, True, form, form), m.gate, m.up),
        products("moe.down", traffic.down(f, d, form), downs, traffic.down(wide, d, form), m.down),
        counter.residual(layer, "moe.residual", part)]
