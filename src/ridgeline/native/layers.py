"""Native layers: the forward of the layers they replace, on fp32 rows, most of it inside one C++ call."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.layers.attention import Attention
from ridgeline.layers.block import ResidualBlock
from ridgeline.layers.rope import Rotary
from ridgeline.native import _native
from ridgeline.native._native import AttentionBlock, Engine, Matrix, MlpBlock, Norm
from ridgeline.types import LayerState

CACHED = "native layers run on a cache; differentiable runs use the torch backend"


class NativePart(Protocol):
    def add(self, x: Tensor, batch: Batch, state: CacheView) -> Tensor:
        """x: (T, hidden) fp32; changed in place where it is contiguous, and returned."""


class NativeAttention:
    """x += after(attention(before(x))) in one call."""

    def __init__(self, engine: Engine, block: AttentionBlock, layer: Attention):
        self.engine, self.block, self.layer, self.rotary = engine, block, layer.layer, layer.rotary

    def add(self, x: Tensor, batch: Batch, state: CacheView) -> Tensor:
        x = x.contiguous()
        dtype = str(state.layout.kv_dtype).removeprefix("torch.")
        self.engine.attention(self.block, x.data_ptr(), native_batch(batch), dtype, *kv_addresses(state, self.layer),
                              *rope_addresses(self.rotary, batch), by_position(batch))
        return x


class NativeMLP:
    """x += after(mlp(before(x))) in one call."""

    def __init__(self, engine: Engine, block: MlpBlock):
        self.engine, self.block = engine, block

    def add(self, x: Tensor, batch: Batch, state: CacheView) -> Tensor:
        x = x.contiguous()
        self.engine.mlp(self.block, x.data_ptr(), len(x))
        return x


class NativeBlock(nn.Module):
    """A decoder layer of which some parts, usually both, run natively; the rest is the original's."""

    def __init__(self, block: ResidualBlock, parts: Sequence[NativePart | None]):
        """parts: of the mixer and of the MLP, None for what stays torch."""
        super().__init__()
        self.mix, self.feed = parts
        own_mix, own_feed = block.parts()
        self.own_mix, self.own_feed = None if self.mix else own_mix, None if self.feed else own_feed
        # Registered, so that what stays torch is loaded with the rest of the model, under its own names.
        left = [module for part in (self.own_mix, self.own_feed) if part for module in part]
        for name, module in block.named_children():
            if any(module is m for m in left):
                self.add_module(name, module)
        self.spec: LayerState = block.mixer().state_spec()

    def mixer(self) -> NativeBlock:
        return self

    def state_spec(self) -> LayerState:
        return self.spec

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> Tensor:
        """x: (T, hidden) fp32 -> the same tensor, changed in place where a part is native."""
        assert state is not None, CACHED
        if self.mix is not None:
            x = self.mix.add(x, batch, state)
        elif self.own_mix is not None:
            x = x + self.own_mix(x, batch, state)
        if self.feed is not None:
            return self.feed.add(x, batch, state)
        return x if self.own_feed is None else x + self.own_feed(x, batch)


class NativeNorm(nn.Module):
    def __init__(self, engine: Engine, norm: Norm, size: int):
        super().__init__()
        self.engine, self.norm, self.size = engine, norm, size

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, size) fp32 -> the same shape."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self.engine.norm(self.norm, x.data_ptr(), len(x), self.size, out.data_ptr())
        return out


class NativeEmbedding(nn.Module):
    """Rows of a packed matrix, dequantised as they are looked up."""

    def __init__(self, engine: Engine, matrix: Matrix):
        super().__init__()
        self.engine, self.matrix = engine, matrix

    def forward(self, tokens: Tensor) -> Tensor:
        """(T,) -> (T, hidden) fp32."""
        tokens = tokens.contiguous()
        out = torch.empty(len(tokens), self.matrix.cols)
        self.engine.lookup(self.matrix, tokens.data_ptr(), len(tokens), out.data_ptr())
        return out


def native_batch(batch: Batch) -> _native.Batch:
    """The batch as the kernels read it, made once for all layers of a pass."""
    found: _native.Batch | None = batch.memo.get("native")
    if found is None:
        assert batch.page_table is not None and batch.slots is not None
        parents = [None if p is None else list(p) for p in batch.parents]
        found = _native.Batch(
            list(batch.offsets), list(batch.starts), batch.positions.data_ptr(), batch.lo.data_ptr(), batch.hi.data_ptr(),
            batch.slots.data_ptr(), batch.page_table.data_ptr(), batch.page_table.shape[1], batch.page_size, parents)
        batch.memo["native"] = found
    return found


def kv_addresses(state: CacheView, layer: int) -> tuple[int, int, int, int]:
    """Of a layer's K, V and their scales; 0 where there are no scales."""
    k, v = state.kv(layer)
    scales = state.scales(layer)
    return k.data_ptr(), v.data_ptr(), *((0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr()))


def rope_addresses(rotary: Rotary | None, batch: Batch) -> tuple[int, int]:
    """Of cos and sin, made once for all layers that share a rotation; 0 for a layer without one. A row for each position
    where the rotation keeps them (`by_position`), else for each token."""
    if rotary is None:
        return 0, 0
    key = ("native rope", id(rotary))
    found: tuple[int, int] | None = batch.memo.get(key)
    if found is None:
        # (P, half) or (T, half)
        cos, sin = rotary.kept(batch.longest()) if by_position(batch) else rotary.tables(batch, torch.float32)
        found = batch.memo[key] = cos.data_ptr(), sin.data_ptr()
    return found


def by_position(batch: Batch) -> bool:
    return batch.longest() <= Rotary.MOST_KEPT
