"""Groups of values as integer codes with a scale: the rules that choose it."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 24           # scales that a search tries
CHUNK = 8192         # rows at once: 1 MB of 32 columns stays in the cache


@dataclass(frozen=True)
class Grid:
    """Of rows of groups: value = scale * (code - 2^(bits - 1)), codes 0 to 2^bits - 1. scale: (rows, 1) fp32 that fp16 holds,
    of either sign, so that the extra code below the middle serves the larger side."""

    bits: int
    scale: Tensor

    @property
    def middle(self) -> int:
        return 1 << self.bits - 1

    def encode(self, x: Tensor) -> Tensor:
        """(rows, n) -> the nearest codes, as fp32."""
        inverse = torch.where(self.scale == 0, 0, 1 / self.scale)
        return (x * inverse + self.middle).round_().clamp_(0, 2 * self.middle - 1)

    def decode(self, codes: Tensor) -> Tensor:
        return (codes - self.middle) * self.scale


def nearest_grid(x: Tensor, bits: int) -> Grid:
    """The grid that just holds each row of x: (rows, n). Round-to-nearest."""
    middle = 1 << bits - 1
    # Four bits are few enough to share the odd code between the ends.
    return Grid(bits, _half(x.abs().amax(1, keepdim=True) / (middle - 1 if bits == 8 else middle - 0.5)))


def best_grid(x: Tensor, bits: int, weight: Tensor | None = None) -> Grid:
    """The grid of a search with the least squared error over each row of x: (rows, n), each column with its weight (n,).

    The largest magnitude is laid at several places on either side of zero, and the scale fitted to what the values round to.
    """
    if len(x) > CHUNK:
        return Grid(bits, torch.cat([best_grid(x[at:at + CHUNK], bits, weight).scale for at in range(0, len(x), CHUNK)]))
    best = nearest_grid(x, bits)
    least = _error(best, x, weight)
    for grid in _fitted(x, bits, weight):
        error = _error(grid, x, weight)
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(bits, torch.where(better, grid.scale, best.scale))
    return best


def _fitted(x: Tensor, bits: int, weight: Tensor | None) -> Iterator[Grid]:
    top = x.gather(1, x.abs().argmax(1, keepdim=True))                       # (rows, 1), with its sign
    for step in range(STEPS):
        place = (1 << bits - 1) * (0.8 + 0.3 * (step // 2) / (STEPS // 2 - 1)) * (-1 if step % 2 else 1)
        grid = Grid(bits, top / place)
        q = grid.encode(x) - grid.middle
        weighted = q if weight is None else q * weight
        square = (weighted * q).sum(1, keepdim=True)
        yield Grid(bits, _half(torch.where(square > 0, (weighted * x).sum(1, keepdim=True) / square, grid.scale)))


def _half(scale: Tensor) -> Tensor:
    return scale.half().float()


def _error(grid: Grid, x: Tensor, weight: Tensor | None) -> Tensor:
    """(rows, 1)."""
    off = (grid.decode(grid.encode(x)) - x).square_()
    return (off if weight is None else off * weight).sum(1, keepdim=True)
