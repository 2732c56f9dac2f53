"""What a forward pass has to do: rows in, work out. Counted for each component of each layer, by ridgeline.analysis.cost."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

COUNTINGS = ("executed", "chapter")

# The components of a pass. Predictions and measurements share the key (layer, component); layer None: the model's ends.
ENDS = ("embed", "final_norm", "head", "sample")
ATTENTION = ("attention.norm", "attention.qkv", "attention.heads", "attention.core", "attention.out", "attention.residual")
RECURRENT = ("mixer.norm", "mixer.in", "mixer.conv", "mixer.core", "mixer.out", "mixer.residual")
MLP = ("mlp.norm", "mlp.up", "mlp.down", "mlp.residual")
MOE = ("moe.norm", "moe.router", "moe.up", "moe.down", "moe.residual")
COLLECTIVES = ("embed.allreduce", "attention.allreduce", "mixer.allreduce", "mlp.allreduce", "moe.allreduce", "head.allgather")
COMPONENTS = (*ENDS, *ATTENTION, *RECURRENT, *MLP, *MOE, *COLLECTIVES)
KINDS = ("linear", "attention", "elementwise", "lookup", "recurrent", "collective")


class Rows(NamedTuple):
    """One sequence's share of a pass: `tokens` rows behind `start` cached ones; `wanted` of them go through the head.

    see: what a row sees, "causal", "block" (up to the end of its own block of `block` positions: block diffusion) or "all";
    parents: of a tree, each token's parent within these rows, -1 = the last cached token, () = a chain; states: recurrent
    states that are kept, one where the sequence may go on after any of several tokens (speculation) for each of these.
    """

    start: int
    tokens: int
    wanted: int
    see: str = "causal"
    block: int = 1
    parents: tuple[int, ...] = ()
    states: int = 1

    @property
    def context(self) -> int:
        """Cache positions that exist for these rows, their own included."""
        return self.start + self.tokens

    def end(self, at: int) -> int:
        """End of the interval that a query at position `at` sees."""
        if self.see == "causal":
            return at + 1
        return self.context if self.see == "all" else min((at // self.block + 1) * self.block, self.context)


Step = Sequence[Rows]


class Traffic:
    """What is computed and moved, by kind."""

    flops: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    state_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes + self.state_bytes

    @property
    def intensity(self) -> float:
        """Operations a byte; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Work(Traffic):
    """What one component of one layer does in one pass.

    kind: one of KINDS; rows: of the activations that go through it; flops: two a multiply-add of products (softmax, biases
    and activation functions are not in), one an operation of elementwise work; bytes: each of them read or written once
    a kernel, whatever cache they lie in. weight_bytes as stored; kv_bytes of keys and values that are read (each that a
    sequence sees, once) and written; state_bytes of recurrent state. compute: arithmetic of the operations, as in
    `Hardware.peaks`; weight_type: the type that most of the weights are stored in, "" for none. useful_flops: without what a
    kernel computes and masks; None: all of it is useful. shape: of a linear layer (outputs, inputs, outputs behind an
    activation), of attention (heads, KV heads, head size), of elementwise work (elements of a row, 1 where a norm is in it).
    kv_type: dtype of the cache that is read or written.
    """

    layer: int | None
    component: str
    kind: str
    rows: int
    flops: int
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    compute: str = "float32"
    weight_type: str = ""
    useful_flops: int | None = None
    shape: tuple[int, ...] = ()
    kv_type: str = ""

    @property
    def key(self) -> tuple[int | None, str]:
        return self.layer, self.component

    @property
    def useful(self) -> int:
        return self.flops if self.useful_flops is None else self.useful_flops


@dataclass(frozen=True)
class Totals(Traffic):
    """Sums over works."""

    flops: int
    useful: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    state_bytes: int



def totals(works: Iterable[Work]) -> Totals:
    found = list(works)
    return Totals(*(sum(getattr(w, name) for w in found) for name in (
        "flops", "useful", "weight_bytes", "activation_bytes", "kv_bytes", "state_bytes")))


def prefill(tokens: int, *, batch: int = 1, start: int = 0, last: bool = True) -> list[Rows]:
    """A pass over `tokens` prompt tokens of each of `batch` sequences; last: the chunk ends the prompt, a row draws a token."""
    return [Rows(start, tokens, int(last))] * batch


def decode(context: int, *, batch: int = 1, drafts: int = 0) -> list[Rows]:
    """A decoding step of `batch` sequences with `context` cached tokens each; drafts: tokens verified beside the next one."""
    return [Rows(context, 1 + drafts, 1 + drafts, states=1 + drafts)] * batch


@lru_cache(maxsize=4096)
def visible_pairs(rows: Rows, window: int | None = None) -> int:
    """(query, key) pairs that these rows see. window: keys a query sees at most, itself included.

    A token of a tree sees as many keys as one at its depth in a chain: the cached ones and its ancestors.
    """
    if rows.parents:
        return sum(_seen(rows.start + depth + 1, rows.start + depth, window) for depth in depths(rows.parents))
    if rows.see == "causal":
        most = rows.context if window is None else window
        growing = max(0, min(rows.tokens, most - rows.start))            # queries that see everything before them
        return growing * rows.start + growing * (growing + 1) // 2 + (rows.tokens - growing) * most
    return sum(_seen(rows.end(at), at, window) for at in range(rows.start, rows.context))


def keys_read(rows: Rows, window: int | None = None) -> int:
    """Cached keys, the rows' own included, that some row of the sequence sees: what has to be read at least once."""
    return rows.context if window is None else min(rows.context, window + rows.tokens - 1)


def depths(parents: Sequence[int]) -> list[int]:
    """Of each token of a tree: ancestors within the tree."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def _seen(end: int, at: int, window: int | None) -> int:
    return end if window is None else end - max(0, at + 1 - window)
