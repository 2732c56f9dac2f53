"""One pure torch function an operation: its definition, its default implementation and every kernel's oracle."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.batch import Batch

MAX_SCORES = 1 << 24      # attention scores held at once, 64 MB in fp32; more queries than that go slice by slice


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w, or * (1 + w); the mean in fp32. x: (..., d), weight: (d,). arXiv 1910.07467."""
    wide = x.float() if x.dtype != torch.float64 else x
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scale = weight.to(wide.dtype) + 1 if plus_one else weight.to(wide.dtype)
    return (wide * scale).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout on the first 2 * cos.shape[-1] dimensions; the rest passes through.

    x: (T, heads, d); cos, sin: (T, r / 2) with r <= d. arXiv 2104.09864 in the layout of GPT-NeoX.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)                # (T, 1, r / 2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


Scales = tuple[Tensor, Tensor]   # of an int8 cache's keys and values: (pages, heads, page_size) fp32


def write_kv(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, batch: Batch, scales: Scales | None = None) -> None:
    """Store k (T, heads, d) and v (T, heads, dv) at batch.slots of pages (pages, heads, page_size, d).

    scales: of int8 pages; a row of each head is rounded to its largest magnitude / 127 times -127 .. 127, ties to even.
    """
    assert batch.slots is not None
    page, offset = batch.slots // batch.page_size, batch.slots % batch.page_size
    if scales is None:
        k_pages[page, :, offset] = k.to(k_pages.dtype)
        v_pages[page, :, offset] = v.to(v_pages.dtype)
        return
    for pages, x, scale in zip((k_pages, v_pages), (k.float(), v.float()), scales):
        top = x.abs().amax(-1)                                                           # (T, heads)
        scale[page, :, offset] = top / 127
        inverse = torch.where(top > 1e-35, 127 / top, 0)
        pages[page, :, offset] = (x * inverse[..., None]).round().clamp(-127, 127).to(torch.int8)


def hadamard(x: Tensor) -> Tensor:
    """Blocks of the last dimension, as large as the largest power of two that divides it, times a Hadamard matrix over the
    root of its size. Queries and keys of an int8 cache go through it: their products stay, and a key's few large dimensions
    do not coarsen the others (arXiv 2404.00456)."""
    size, h = x.shape[-1] & -x.shape[-1], 1
    y = (x if x.dtype == torch.float64 else x.float()).contiguous()
    while h < size:
        a, b = y.view(*y.shape[:-1], -1, 2, h).unbind(-2)                                # (..., d / 2h, h)
        y = torch.stack([a + b, a - b], -2).flatten(-3)
        h *= 2
    return (y / math.sqrt(size)).to(x.dtype)


def dequantise_kv(x: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of K or V as they were read from the cache, (..., d) with scales (...), in the dtype of the computation."""
    return x if scales is None else (x * scales[..., None]).to(dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None,
           sinks: Tensor | None = None) -> Tensor:
    """Softmax attention: q (..., n, H, d), k (..., K, L, d), v (..., K, L, dv), mask (..., n, L) -> (..., n, H, dv).

    Leading dimensions are rows with the same n and L. mask: True = visible. Scores and softmax in fp32 (fp64 for fp64
    inputs). softcap: c tanh(s / c). sinks: (H,) logits that take part in the softmax and are dropped.
    """
    *rows, n, heads, _ = q.shape
    kv_heads = k.shape[-3]
    step = max(1, MAX_SCORES // (math.prod(rows) * heads * k.shape[-2]))
    if n > step:
        return torch.cat([attend(q[..., a:a + step, :, :], k, v, mask[..., a:a + step, :], scale, softcap, sinks)
                          for a in range(0, n, step)], -3)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q = q.reshape(*rows, n, kv_heads, heads // kv_heads, -1)
    q = q.movedim(-4, -2).flatten(-3, -2)                                                # (..., K, G * n, d)
    scores = (q @ k.to(q.dtype).mT).to(wide) * scale                               # (..., K, G * n, L)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.reshape(*rows, kv_heads, -1, n, k.shape[-2])                         # (..., K, G, n, L)
    scores = scores.masked_fill(~mask[..., None, None, :, :], float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    out = weights.to(q.dtype).flatten(-3, -2) @ v.to(q.dtype)                            # (..., K, G * n, dv)
    return out.reshape(*rows, kv_heads, -1, n, v.shape[-1]).movedim(-2, -4).reshape(*rows, n, heads, -1)


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, *, scale: float,
                    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
                    scales: Scales | None = None) -> Tensor:
    """Attention of every row over its own cached keys and values, those just written included.

    q: (T, H, d); k_pages: (pages, K, page_size, d); v_pages: (pages, K, page_size, dv) -> (T, H, dv). scales: of int8 pages.
    """
    return torch.cat([attend_row(q, k_pages, v_pages, batch, row, scale, window, softcap, sinks, scales)
                      for row in range(batch.rows)])


def attend_row(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, row: int, scale: float,
               window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
               scales: Scales | None = None) -> Tensor:
    """paged_attention of one row of the batch -> (n, H, dv)."""
    assert batch.page_table is not None
    a, b, context = batch.offsets[row], batch.offsets[row + 1], batch.context(row)
    pages = batch.page_table[row, :-(-context // batch.page_size)]
    k, v = (dequantise_kv(x[pages], s if s is None else s[pages], q.dtype).transpose(0, 1).flatten(1, 2)[:, :context]
            for x, s in zip((k_pages, v_pages), scales or (None, None)))                 # (K, L, d)
    return attend(q[a:b], k, v, batch.mask(row, window), scale, softcap, sinks)


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, scale: float, window: int | None = None,
                     softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """The same without a cache, for whole sequences: k (T, K, d) and v (T, K, dv) are the batch's own rows."""
    out = []
    for row in range(batch.rows):
        a, b = batch.offsets[row], batch.offsets[row + 1]
        assert batch.starts[row] == 0, "without a cache a row starts at position 0"
        out.append(attend(q[a:b], k[a:b].transpose(0, 1), v[a:b].transpose(0, 1), batch.mask(row, window), scale,
                          softcap, sinks))
    return torch.cat(out)


ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
