"""Softmax attention with grouped key-value heads over the paged cache."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.layers.rope import Rotary
from ridgeline.ops import grouped
from ridgeline.ops import reference as ops
from ridgeline.types import PagedKV


class Attention(nn.Module):
    """q, k, v projections, optional q/k norms and rotation, attention, output projection.

    norm(size) builds the q and k norms: "head" norms each head's vector, "all" the whole projection (OLMo 2).
    sinks: a learned logit for each query head joins its softmax and is dropped, so that a head may attend to nothing
    (arXiv 2309.17453, section 3.2: a sink; gpt_oss). Head counts come from the projections' shapes, so that a
    tensor-parallel slice of the weights just works; sinks are sliced as q's rows are.
    """

    def __init__(self, layer: int, hidden: int, heads: int, kv_heads: int, head_dim: int, *, rotary: Rotary | None,
                 bias: bool = False, out_bias: bool = False, window: int | None = None, scale: float | None = None,
                 softcap: float | None = None, norm: Callable[[int], nn.Module] | None = None, norm_over: str = "head",
                 sinks: bool = False):
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=out_bias)
        self.norm_over = norm_over if norm else None
        if norm:
            self.q_norm = norm(head_dim if norm_over == "head" else heads * head_dim)
            self.k_norm = norm(head_dim if norm_over == "head" else kv_heads * head_dim)
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.layer, self.head_dim, self.rotary = layer, head_dim, rotary
        self.window, self.softcap = window, softcap
        self.scale = head_dim ** -0.5 if scale is None else scale

    def state_spec(self) -> PagedKV:
        heads = self.k_proj.weight.shape[0] // self.head_dim
        return PagedKV(heads, self.head_dim, self.head_dim, self.window)

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)                   # (T, heads * d)
        if self.norm_over == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))        # (T, heads, d)
        if self.norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, k, batch)
        out = attend_cached(q, k, v, batch, state, self.layer, scale=self.scale, window=self.window,
                            softcap=self.softcap, sinks=self.sinks)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected


def attend_cached(q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: CacheView | None, layer: int, *,
                  scale: float, window: int | None = None, softcap: float | None = None,
                  sinks: torch.Tensor | None = None) -> Tensor:
    """Write k and v to the cache, then attend over what the cache holds; without a cache, over k and v themselves.

    The chunk's own keys are read back in the cache's dtype too, so that a prefix hit equals a miss.
    """
    if state is None:
        return ops.ragged_attention(q, k, v, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
    k_pages, v_pages = state.kv(layer)
    scales = state.scales(layer)
    if scales is not None:
        q, k = ops.hadamard(q), ops.hadamard(k)
    ops.write_kv(k_pages, v_pages, k, v, batch, scales)
    return grouped.paged_attention(q, k_pages, v_pages, batch, scale=scale, window=window, softcap=softcap, sinks=sinks,
                                   scales=scales)
