"""Gated DeltaNet: linear attention whose fixed-size state is corrected by the delta rule. arXiv 2412.06464."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.layers.mlp import activation
from ridgeline.ops import reference as ops
from ridgeline.ops.conv import causal_conv
from ridgeline.ops.delta import gated_delta, l2_norm
from ridgeline.types import Recurrent


class DepthwiseConv(nn.Module):
    """Causal convolution of each channel with its own `width` weights; weight: (channels, 1, width)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(self, x: Tensor, batch: Batch, state: Tensor | None) -> Tensor:
        """x: (T, channels) -> the same shape. state: (slots, channels, width - 1) or None."""
        return causal_conv(x, self.weight[:, 0], batch, state)


class GatedRMSNorm(nn.Module):
    """x / rms(x) * w * silu(z): the norm first, then the gate, in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z: (..., size) -> (..., size) in z's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return (ops.rms_norm(x.to(wide), self.weight, self.eps) * F.silu(z.to(wide))).to(z.dtype)


class GatedDeltaNet(nn.Module):
    """Projections, convolution, delta rule, gated norm, output projection.

    The convolved channels are [q | k | v]. Head counts come from the parameters' shapes. State per sequence: the last
    width - 1 inputs of the convolution, and one (key_dim, value_dim) matrix a value head, both in fp32 (fp64 when the
    parameters are fp64): the inputs of a narrower model lose nothing, and they are few beside the matrices.
    """

    def __init__(self, layer: int, hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, *,
                 width: int, eps: float, act: str = "silu"):
        super().__init__()
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, value_heads * value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, value_heads, bias=False)
        self.conv1d = DepthwiseConv(channels, width)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(value_heads)) for _ in range(2))
        for decay in (self.A_log, self.dt_bias):               # a rounded decay is wrong at every step, the same way
            decay.keep_fp32 = True  # type: ignore[attr-defined]
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = nn.Linear(value_heads * value_dim, hidden, bias=False)
        self.layer, self.key_dim, self.act = layer, key_dim, activation(act)

    def state_spec(self) -> Recurrent:
        channels, _, width = self.conv1d.weight.shape
        dtype = "float64" if self.conv1d.weight.dtype == torch.float64 else "float32"
        heads, value_dim = self.dt_bias.shape[0], self.norm.weight.shape[0]
        return Recurrent((("conv", (channels, width - 1), dtype), ("state", (heads, self.key_dim, value_dim), dtype)))

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        slots = {} if state is None else state.recurrent(self.layer)
        heads, value_dim = self.dt_bias.shape[0], self.norm.weight.shape[0]
        mixed = self.act(self.conv1d(self.in_proj_qkv(x), batch, slots.get("conv")))     # (T, channels)
        keys = (mixed.shape[-1] - heads * value_dim) // 2
        q, k, v = mixed.split([keys, keys, heads * value_dim], dim=-1)
        q, k = (l2_norm(t.unflatten(-1, (-1, self.key_dim))) for t in (q, k))            # (T, Hk, dk)
        v = v.unflatten(-1, (heads, value_dim))                                          # (T, H, dv)
        wide = q.dtype
        a, b = self.in_proj_a(x).to(wide), self.in_proj_b(x).to(wide)                    # (T, H)
        g = -self.A_log.to(wide).exp() * F.softplus(a + self.dt_bias.to(wide))
        out = gated_delta(q * self.key_dim ** -0.5, k, v, g, b.sigmoid(), batch, slots.get("state"))
        z = self.in_proj_z(x).unflatten(-1, (heads, value_dim))
        projected: Tensor = self.out_proj(self.norm(out, z).flatten(1))
        return projected
