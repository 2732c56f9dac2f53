"""The ragged batch that one forward pass sees: tensors and small integers, nothing else.

Rows lie one behind the other in flat tensors; row r owns tokens offsets[r] .. offsets[r+1]. Visibility is data: token t
sees the cache positions lo[t] <= j < hi[t], intersected with a layer's window; a row may add an ancestor mask over its
own tokens. Causal, windowed, document, block, bidirectional and tree attention are all this one form.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# One row of a pass for a backend that makes its own tensors: cache position of its first token, its tokens, its page table,
# and None or, of a tree, the tokens' RoPE positions; None or, of what is not causal, the ends of what each token sees; None
# or, of a tree, the parents.
PassRow = tuple[int, Sequence[int], Sequence[int], Sequence[int] | None, Sequence[int] | None, Sequence[int] | None]


@dataclass
class Batch:
    """One forward pass.

    T tokens in R rows. "Cache position" is the index of a token in its sequence's cache; it differs from the RoPE
    position only inside a tree, where siblings share a RoPE position.
    """

    positions: Tensor                        # (T,) int64, RoPE positions
    offsets: tuple[int, ...]                 # R + 1 row boundaries
    starts: tuple[int, ...]                  # R, cache position of each row's first token
    lo: Tensor                               # (T,) int64
    hi: Tensor                               # (T,) int64
    tokens: Tensor | None = None             # (T,) int64
    feed: Tensor | None = None               # (T, width): rows fed with or instead of tokens
    parents: tuple[tuple[int, ...] | None, ...] = ()   # per row: each token's parent in the row, -1 = before the row
    page_size: int = 0
    page_table: Tensor | None = None         # (R, pages) int64, padded with 0
    slots: Tensor | None = None              # (T,) int64: page * page_size + offset that each token's K and V go to
    state_read: tuple[int, ...] = ()         # R, recurrent slot to start from, -1 = the zero state
    state_write: tuple[int, ...] = ()        # T, recurrent slot that takes the state after this token, -1 = none
    wanted: Tensor | None = None             # (W,) int64: tokens whose hidden rows the caller reads; None = all
    taps: tuple[int, ...] = ()               # layers whose input hidden states the caller wants as well
    adapters: tuple[int, ...] = ()           # R, adapter of each row (0 = none)
    memo: dict[Hashable, Any] = field(default_factory=dict)   # what several layers derive alike (masks, rotations)

    @property
    def rows(self) -> int:
        return len(self.starts)

    def lengths(self) -> list[int]:
        return [b - a for a, b in zip(self.offsets, self.offsets[1:])]

    def context(self, row: int) -> int:
        """Cache positions that exist for this row, its own tokens included."""
        return self.starts[row] + self.offsets[row + 1] - self.offsets[row]

    def longest(self) -> int:
        """The largest context of the rows, which no RoPE position reaches."""
        if "longest" not in self.memo:
            self.memo["longest"] = max(self.context(row) for row in range(self.rows))
        found: int = self.memo["longest"]
        return found

    def mask(self, row: int, window: int | None) -> Tensor:
        """(n, context) bool, True = visible; made once for all layers with this window."""
        key = ("mask", row, window)
        if key not in self.memo:
            self.memo[key] = self._mask(row, window)
        mask: Tensor = self.memo[key]
        return mask

    def _mask(self, row: int, window: int | None) -> Tensor:
        a, b = self.offsets[row], self.offsets[row + 1]
        start, context = self.starts[row], self.context(row)
        index = torch.arange(context, device=self.lo.device)
        mask = (index >= self.lo[a:b, None]) & (index < self.hi[a:b, None])              # (n, context)
        tree = self.parents[row] if self.parents else None
        if tree is not None:
            mask[:, start:] &= ancestors(tree).to(mask.device)
        if window is not None:
            at = torch.cat([index[:start], self.positions[a:b]])                         # RoPE position of each key
            mask &= at > self.positions[a:b, None] - window
        return mask


def ancestors(parents: Sequence[int]) -> Tensor:
    """(n, n) bool: token i sees token j of its own run, which is itself or one of its ancestors."""
    n = len(parents)
    table = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            table[i] |= table[parent]
    return table


def whole(lengths: Sequence[int], tokens: Tensor | None = None, *, feed: Tensor | None = None, see: str = "causal",
          block: int = 1, device: str | torch.device = "cpu") -> Batch:
    """A batch of whole sequences without a cache, as training and reference runs use it.

    lengths: tokens per sequence; tokens (T,) or feed (T, width): their rows, one sequence behind the other.
    see: "causal" | "block" (everything up to the end of one's own block of `block` tokens) | "all".
    """
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    ends = torch.cat([torch.full((n,), n) for n in lengths]).to(device)
    return Batch(positions=positions, offsets=_cumulative(lengths), starts=(0,) * len(lengths),
                 lo=torch.zeros_like(positions), hi=upper(positions, ends, see, block),
                 tokens=tokens, feed=feed, state_read=(-1,) * len(lengths), state_write=(-1,) * sum(lengths))


def upper(at: Tensor, end: Tensor | int, see: str, block: int) -> Tensor:
    """End of the visible interval for tokens at cache positions `at` of a context that ends at `end`."""
    if see == "causal":
        return at + 1
    if see == "block":
        return torch.minimum((at // block + 1) * block, torch.as_tensor(end, device=at.device))
    assert see == "all", see
    return torch.zeros_like(at) + end


def _cumulative(lengths: Sequence[int]) -> tuple[int, ...]:
    out = [0]
    for n in lengths:
        out.append(out[-1] + n)
    return tuple(out)
