"""Rotary position embedding and its scalings.

Frequencies are fixed once per engine from the largest context it will serve: keys already in the cache must not change
their meaning when a sequence grows past a switch (dynamic NTK, LongRoPE).
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.batch import Batch
from ridgeline.errors import UnsupportedModel
from ridgeline.ops import reference as ops


class Rotary:
    """Rotates queries and keys; one object is shared by all layers with the same settings.

    inv_freq: (r / 2,) fp32 for r rotated dimensions; scaling multiplies cos and sin (yarn, longrope).
    """

    # Positions whose rotations are kept once made; behind a long context they would take more memory than time.
    MOST_KEPT = 16384

    def __init__(self, inv_freq: Tensor, scaling: float = 1.0):
        self.inv_freq, self.scaling = inv_freq, scaling
        self._kept: tuple[Tensor, Tensor] | None = None            # cos and sin of positions 0, 1, 2, ...

    def __call__(self, q: Tensor, k: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """q: (T, H, d), k: (T, K, d) -> the same, rotated by batch.positions."""
        cos, sin = self.tables(batch, q.dtype)
        return ops.rotate_half(q, cos, sin), ops.rotate_half(k, cos, sin)

    def tables(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(T, r / 2) cos and sin, computed once per batch in fp32 (fp64 for fp64)."""
        key = ("rope", id(self), dtype)
        if key not in batch.memo:
            batch.memo[key] = self._tables(batch, dtype)
        tables: tuple[Tensor, Tensor] = batch.memo[key]
        return tables

    def _tables(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        end = batch.longest()
        if dtype != torch.float32 or end > self.MOST_KEPT or batch.positions.device.type != "cpu":
            return self.of(batch.positions, dtype)
        cos, sin = self.kept(end)
        return cos.index_select(0, batch.positions), sin.index_select(0, batch.positions)

    def kept(self, end: int) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin on the CPU of positions 0 to `end` (at most MOST_KEPT) or further, (P, r / 2) each."""
        assert end <= self.MOST_KEPT, end
        if self._kept is None or len(self._kept[0]) < end:
            with torch.inference_mode(False):                                     # gradients may flow past them later
                self._kept = self.of(torch.arange(min(self.MOST_KEPT, max(512, 2 * end))), torch.float32)
        return self._kept

    def of(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: (T,) -> cos and sin, (T, r / 2) each."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angle = positions[:, None].to(wide) * self.inv_freq.to(positions.device, wide)
        return (angle.cos() * self.scaling).to(dtype), (angle.sin() * self.scaling).to(dtype)


def build_rotary(parameters: Mapping[str, Any], head_dim: int, *, max_position: int, max_model_len: int) -> Rotary:
    """parameters: the `rope_parameters` of a Hugging Face config (rope_type, rope_theta, factor, ...).

    max_position: the config's max_position_embeddings; max_model_len: the longest context this engine serves.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in SCALINGS:
        raise UnsupportedModel(f"rope_type {kind!r} is not known; known: {', '.join(sorted(SCALINGS))}")
    dims = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    try:
        inv_freq, scaling = SCALINGS[kind](parameters, dims, max_position, max_model_len)
    except KeyError as error:
        raise UnsupportedModel(f"rope_type {kind!r} needs the field {error} in rope_parameters") from error
    return Rotary(inv_freq, scaling)


def _frequencies(theta: float, dims: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dims, 2, device="cpu").float() / dims)


def _default(p: Mapping[str, Any], dims: int, max_position: int, length: int) -> tuple[Tensor, float]:
    return _frequencies(p["rope_theta"], dims), 1.0


def _linear(p: Mapping[str, Any], dims: int, max_position: int, length: int) -> tuple[Tensor, float]:
    return _frequencies(p["rope_theta"], dims) / p["factor"], 1.0


def _dynamic(p: Mapping[str, Any], dims: int, max_position: int, length: int) -> tuple[Tensor, float]:
    """NTK-aware: the base grows with the length; up to max_position nothing changes."""
    length = max(length, max_position)
    stretch = p["factor"] * length / max_position - (p["factor"] - 1)
    return _frequencies(p["rope_theta"] * stretch ** (dims / (dims - 2)), dims), 1.0


def _yarn(p: Mapping[str, Any], dims: int, max_position: int, length: int) -> tuple[Tensor, float]:
    """arXiv 2309.00071: interpolate low frequencies, keep high ones, a ramp between."""
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or max_position / original

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = ((torch.arange(dims // 2, device="cpu").float() - low) / (max(high - low, 0) or 0.001)).clamp(0, 1)
    kept = _frequencies(p["rope_theta"], dims)
    attention = p.get("attention_factor")
    if attention is None:
        mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
        attention = (_mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all
                     else _mscale(factor, 1.0))
    return kept / factor * ramp + kept * (1 - ramp), attention


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(p: Mapping[str, Any], dims: int, max_position: int, length: int) -> tuple[Tensor, float]:
    inv_freq = _frequencies(p["rope_theta"], dims)
    original, low, high = p["original_max_position_embeddings"], p["low_freq_factor"], p["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)                      # rotations over the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)              # 0: slow, interpolate; 1: fast, keep
    return inv_freq / p["factor"] * (1 - smooth) + inv_freq * smooth, 1.0


def _longrope(p: Mapping[str, Any], dims: int, max_position: int, length: int) -> tuple[Tensor, float]:
    """arXiv 2402.13753: one factor per frequency, a short and a long set; the engine's context picks the set."""
    original = p["original_max_position_embeddings"]
    factors = torch.tensor(p["long_factor"] if length > original else p["short_factor"], device="cpu")
    factor = p.get("factor") or max_position / original
    attention = p.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _frequencies(p["rope_theta"], dims) / factors, attention


def _factors(p: Mapping[str, Any], dims: int, max_position: int, length: int) -> tuple[Tensor, float]:
    """Explicit divisors per frequency, as GGUF files carry them in rope_freqs.weight."""
    return _frequencies(p["rope_theta"], dims) / torch.tensor(p["factors"], device="cpu"), 1.0


SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "factors": _factors,
}
