"""Normalisation layers."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.ops import reference as ops


class RMSNorm(nn.Module):
    """x / rms(x) * w; with plus_one the stored weight is the deviation from one, as Gemma and Qwen3.5 keep it."""

    def __init__(self, size: int, eps: float, *, plus_one: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.plus_one)
