"""Quantising the columns of a matrix in order, each one's error made good by those that follow: GPTQ, arXiv 2210.17323."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.quant.grid import Grid, best_grid, nearest_grid

# Of the mean diagonal. Gemma 3 270M on 1,739 tokens: mean KL 0.101 with 0.1, 0.112 with the usual 0.01, which trusts so few
# tokens too much.
DAMPING = 0.1


@dataclass(frozen=True)
class Encoded:
    """codes: (rows, cols) uint8; scales: (rows, groups) fp32 that fp16 holds."""

    bits: int
    group: int
    codes: Tensor
    scales: Tensor

    def rows(self, low: int, high: int) -> Encoded:
        return Encoded(self.bits, self.group, self.codes[low:high], self.scales[low:high])

    def values(self) -> Tensor:
        """(rows, cols) fp32."""
        return Grid(self.bits, self.scales.repeat_interleave(self.group, 1)).decode(self.codes.float())


def encode(weight: Tensor, bits: int, group: int, *, search: bool = True) -> Encoded:
    """Each group by itself; weight: (rows, cols) fp32, cols a multiple of group."""
    x = weight.reshape(-1, group)                                              # (rows * groups, group)
    grid = best_grid(x, bits) if search else nearest_grid(x, bits)
    return Encoded(bits, group, grid.encode(x).to(torch.uint8).view(weight.shape), grid.scale.view(len(weight), -1))


def compensate(weight: Tensor, gram: Tensor, bits: int, group: int, *, damping: float = DAMPING) -> Encoded:
    """weight: (rows, cols) fp32; gram: (cols, cols), the sum of x x^T over the inputs x of the layer, all finite.

    Lowers |X (W - Q)^T|: what rounding a column leaves goes to later columns, by the Cholesky factor of the inverse of the
    Gram matrix with `damping` times its mean diagonal added. A group's scale is searched when its first column is reached.
    """
    rows, cols = weight.shape
    hessian = gram.double().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    diagonal += damping * diagonal.mean()
    # H = V V^T with V upper triangular gives H^-1 = U^T U with U = V^-1: half the work of inverting first.
    root = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    factor = torch.linalg.solve_triangular(root, torch.eye(cols, dtype=torch.float64), upper=True).float()
    left = torch.where(dead, 0, weight).T.contiguous()                         # (cols, rows): a column's values side by side
    codes, scales = torch.empty(cols, rows, dtype=torch.uint8), torch.empty(cols // group, rows)
    for first in range(0, cols, group):
        last = first + group
        importance = 1 / factor.diagonal()[first:last].square()
        grid = Grid(bits, best_grid(left[first:last].T.contiguous(), bits, importance).scale[:, 0])
        scales[first // group] = grid.scale
        errors = torch.empty(group, rows)
        for k in range(first, last):
            q = grid.encode(left[k])
            codes[k] = q.to(torch.uint8)
            error = (left[k] - grid.decode(q)) / factor[k, k]
            left[k + 1:last] -= factor[k, k + 1:last, None] * error            # (group - ..., rows)
            errors[k - first] = error
        left[last:] -= factor[first:last, last:].T @ errors                    # (cols - last, rows)
    return Encoded(bits, group, codes.T.contiguous(), scales.T.contiguous())
