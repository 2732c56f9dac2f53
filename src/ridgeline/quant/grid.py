"""Groups of values as integer codes with a scale and a zero: the rules that choose the grid."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 24           # grids that a search tries
CHUNK = 8192         # rows at once: 1 MB of 32 columns stays in the cache


@dataclass(frozen=True)
class Grid:
    """Of rows of groups: value = scale * (code - zero), codes 0 to 2^bits - 1. scale: (rows, 1) fp32 that fp16 holds, of either
    sign; zero: (rows, 1) whole numbers in fp32."""

    bits: int
    scale: Tensor
    zero: Tensor

    def encode(self, x: Tensor) -> Tensor:
        """(rows, n) -> the nearest codes, as fp32."""
        inverse = torch.where(self.scale == 0, 0, 1 / self.scale)
        return (x * inverse + self.zero).round_().clamp_(0, (1 << self.bits) - 1)

    def decode(self, codes: Tensor) -> Tensor:
        return (codes - self.zero) * self.scale


def nearest_grid(x: Tensor, bits: int, symmetric: bool = True) -> Grid:
    """The grid that just holds each row of x: (rows, n). Round-to-nearest."""
    top = (1 << bits) - 1
    if symmetric:
        middle = float(1 << bits - 1)
        scale = x.abs().amax(1, keepdim=True) / (middle - 1 if bits == 8 else middle - 0.5)
        return Grid(bits, _half(scale), torch.full_like(scale, middle))
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = _half((high - low) / top)
    return Grid(bits, scale, _zero(low, scale, top))


def best_grid(x: Tensor, bits: int, symmetric: bool = True, weight: Tensor | None = None) -> Grid:
    """The grid of a search with the least squared error over each row of x: (rows, n), each column with its weight (n,).

    Symmetric: the largest magnitude is laid at several places on either side of zero, and the scale fitted to what the values
    round to. Else the ends of the range are drawn in, by the same and by different shares.
    """
    if len(x) > CHUNK:
        parts = [best_grid(part, bits, symmetric, weight) for part in x.split(CHUNK)]
        return Grid(bits, torch.cat([p.scale for p in parts]), torch.cat([p.zero for p in parts]))
    best = nearest_grid(x, bits, symmetric)
    least = _error(best, x, weight)
    for grid in _symmetric_grids(x, bits, weight) if symmetric else _affine_grids(x, bits):
        error = _error(grid, x, weight)
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(bits, torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero))
    return best


def _symmetric_grids(x: Tensor, bits: int, weight: Tensor | None):  # type: ignore[no-untyped-def]
    middle = 1 << bits - 1
    zero = torch.full((len(x), 1), float(middle))
    top = x.gather(1, x.abs().argmax(1, keepdim=True))                       # (rows, 1), with its sign
    for step in range(STEPS):
        places = middle * (0.8 + 0.3 * (step // 2) / (STEPS // 2 - 1)) * (-1 if step % 2 else 1)
        grid = Grid(bits, top / places, zero)
        q = grid.encode(x) - zero
        weighted = q if weight is None else q * weight
        square = (weighted * q).sum(1, keepdim=True)
        fitted = torch.where(square > 0, (weighted * x).sum(1, keepdim=True) / square, grid.scale)
        yield Grid(bits, _half(fitted), zero)


def _affine_grids(x: Tensor, bits: int):  # type: ignore[no-untyped-def]
    top = (1 << bits) - 1
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    shares = (1.0, 0.95, 0.9, 0.85, 0.8)
    for a in shares:
        for b in shares:
            scale = _half((high * b - low * a).clamp(min=0) / top)
            yield Grid(bits, scale, _zero(low * a, scale, top))


def _zero(low: Tensor, scale: Tensor, top: int) -> Tensor:
    return torch.where(scale == 0, 0, -low / scale).round().clamp(0, top)


def _half(scale: Tensor) -> Tensor:
    return scale.half().float()


def _error(grid: Grid, x: Tensor, weight: Tensor | None) -> Tensor:
    """(rows, 1)."""
    off = (grid.decode(grid.encode(x)) - x).square_()
    return (off if weight is None else off * weight).sum(1, keepdim=True)
