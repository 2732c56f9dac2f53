"""The cost of linear attention with the gated delta rule (arXiv 2412.06464): constant in the length of what came before."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ridgeline.analysis.counter import CHAPTER_ITEMSIZE, Counter
from ridgeline.analysis.spec import STATE_ITEMSIZE, Part, Recurrent
from ridgeline.analysis.work import Rows, Work
from ridgeline.ops.delta import CHUNK, CROSSOVER

STEP_OPERATIONS = 6                # of an element of the state a token: S k, S q, and the outer product that is added
STATE_COPIES = 4                   # of torch's recurrence a token: the decayed state and the new one, written and read


def recurrent_works(counter: Counter, layer: int, part: Part) -> list[Work]:
    r = part.inner
    assert isinstance(r, Recurrent)
    traffic, tokens, d = counter.traffic(part.native), counter.tokens, counter.spec.hidden
    channels, values, heads = r.qkv.rows, r.value_heads * r.value_dim, r.value_heads
    projected = channels + r.z.rows + r.a.rows + r.b.rows
    itemsize = CHAPTER_ITEMSIZE if counter.chapter else STATE_ITEMSIZE
    moves = sum(1 + rows.states for rows in counter.rows)              # states read, and those that are kept
    chunked = not counter.chapter and counter.spec.kernels != "fused"
    flops = heads * core_flops(counter.rows, r.key_dim, r.value_dim) if chunked else tokens * STEP_OPERATIONS * r.core_state
    copies = STATE_ITEMSIZE * STATE_COPIES * r.core_state * sum(rows.tokens for rows in counter.rows if not long(rows))
    gate = traffic.elements(3 * values)                                # the normed output times the gate
    shape = counter.shape(part.native, heads, r.key_dim, r.value_dim)
    return [
        counter.norm(layer, "mixer.norm", part, counter.form(r.qkv, part.native)),
        counter.linear(layer, "mixer.in", tokens, traffic.qkv(d, projected, counter.form(r.qkv, part.native), 4), part.native,
                       r.qkv, r.z, r.b, r.a),
        Work(layer, "mixer.conv", "recurrent", tokens, tokens * 2 * r.width * channels, shape=shape,
             activation_bytes=tokens * traffic.elements((1 + r.width if chunked else 2) * channels),
             state_bytes=moves * itemsize * r.conv_state),
        Work(layer, "mixer.core", "recurrent", tokens, flops, shape=shape, state_bytes=moves * itemsize * r.core_state,
             activation_bytes=tokens * traffic.elements(channels + values) + (copies if chunked else 0),
             useful_flops=tokens * STEP_OPERATIONS * r.core_state),
        counter.linear(layer, "mixer.out", tokens, gate + traffic.out(values, d, counter.form(r.out, part.native)),
                       part.native, r.out),
        counter.residual(layer, "mixer.residual", part)]


def pieces(rows: Rows) -> list[int]:
    """Lengths of the parts that a row is cut into: at absolute multiples of CHUNK, and after each state that is kept."""
    ends = {rows.context, *range((rows.start // CHUNK + 1) * CHUNK, rows.context, CHUNK)}
    ends |= {rows.context - kept for kept in range(min(rows.states, rows.tokens))}
    edges = sorted({rows.start, *ends})
    return [b - a for a, b in pairwise(edges)]


def long(rows: Rows) -> bool:
    """Whether a row is computed in chunks rather than token by token."""
    return not rows.parents and rows.tokens > CROSSOVER * len(pieces(rows))


def core_flops(step: Sequence[Rows], key_dim: int, value_dim: int) -> int:
    """Of one head, as `ridgeline.ops.delta` computes it: chunks of all long rows are padded to the longest.

    A chunk of C tokens: keys and queries by keys 2 C^2 dk each, three products with the state 2 C dk dv each, scores by deltas
    2 C^2 dv, and a triangular system C^2 dv.
    """
    flops = sum(STEP_OPERATIONS * key_dim * value_dim * rows.tokens for rows in step if not long(rows))
    parts = [part for rows in step if long(rows) for part in pieces(rows)]
    size = max(parts, default=0)
    return flops + len(parts) * size * (4 * size * key_dim + 6 * key_dim * value_dim + 3 * size * value_dim)
