"""Paged attention, several rows at a time: equal to reference.paged_attention, which takes them one by one.

Decode rows, verification rows and denoising blocks come in consecutive rows of one length. Such a group is gathered
page by page into padded tensors and attended in one call. One core, fp32, 4 KV heads of 64, 32 decode rows: 512 keys
each 12.4 -> 7.7 ms, 40 keys each 2.8 -> 0.6 ms; bf16 10.4 -> 5.2 ms and 4.9 -> 0.6 ms. A window of 100 keys over 512:
12.2 -> 1.7 ms, because only the pages inside the window are read.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.batch import Batch
from ridgeline.ops import reference

MAX_TOKENS = 64              # longer rows are worth a call of their own
MAX_ELEMENTS = 1 << 20       # of K gathered for one group, 4 MB in fp32: twice that gained nothing
MAX_PADDING = 1.25           # gathered pages / needed pages, above which a group is closed ...
FREE_PADDING = 32            # ... unless it is only this many pages more: a call costs as much as a few pages


@dataclass(frozen=True)
class Group:
    """Rows first .. last of the batch; P pages each, of page_size keys."""

    first: int
    last: int
    pages: Tensor                # (R, P) page numbers; beyond a row's last page any
    mask: Tensor                 # (R, n, P * page_size) bool, True = visible
    final: Tensor                # (R,) index, within P, of the row's last page
    written: Tensor              # (R, page_size) bool: what of that last page belongs to the sequence
    beyond: tuple[Tensor, Tensor]    # rows, and indexes within P, of the pages beyond each row's last one


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, *, scale: float,
                    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
                    scales: reference.Scales | None = None) -> Tensor:
    """Attention of every row over its own cached keys and values, those just written included.

    q: (T, H, d); k_pages: (pages, K, page_size, d); v_pages: (pages, K, page_size, dv) -> (T, H, dv). scales: of int8 pages.
    """
    key = ("groups", k_pages.shape[1] * k_pages.shape[3], window)
    if key not in batch.memo:
        batch.memo[key] = plan(batch, window, k_pages.shape[1] * k_pages.shape[3])
    out = []
    for group in batch.memo[key]:
        if isinstance(group, int):
            out.append(reference.attend_row(q, k_pages, v_pages, batch, group, scale, window, softcap, sinks, scales))
            continue
        rows = q[batch.offsets[group.first]:batch.offsets[group.last]]
        rows = rows.view(group.last - group.first, -1, *q.shape[1:])                      # (R, n, H, d)
        k, v = (reference.dequantise_kv(_gather(x, group.pages), s if s is None else _gather(s, group.pages), q.dtype)
                for x, s in zip((k_pages, v_pages), scales or (None, None)))              # (R, K, P, page_size, d)
        _clear(v, group)
        out.append(reference.attend(rows, k.flatten(2, 3), v.flatten(2, 3), group.mask, scale, softcap,
                                    sinks).flatten(0, 1))                                 # (R * n, H, dv)
    return torch.cat(out)


def plan(batch: Batch, window: int | None, width: int) -> list[Group | int]:
    """Groups of rows, and the numbers of those with a tree, in order. width: elements of K of one token."""
    found: list[Group | int] = []
    first = 0
    while first < batch.rows:
        last, length = first + 1, batch.offsets[first + 1] - batch.offsets[first]
        total = widest = _span(batch, first, window)[1]
        while last < batch.rows and length <= MAX_TOKENS and _alike(batch, first, last):
            pages = _span(batch, last, window)[1]
            wider = max(widest, pages)
            padded = (last + 1 - first) * wider
            if padded > MAX_PADDING * (total + pages) + FREE_PADDING or padded * batch.page_size * width > MAX_ELEMENTS:
                break
            total, widest, last = total + pages, wider, last + 1
        found.append(first if _tree(batch, first) else _group(batch, first, last, window))
        first = last
    return found


def _alike(batch: Batch, a: int, b: int) -> bool:
    """Both rows are plain runs of the same length."""
    same = batch.offsets[a + 1] - batch.offsets[a] == batch.offsets[b + 1] - batch.offsets[b]
    return same and not _tree(batch, a) and not _tree(batch, b)


def _tree(batch: Batch, row: int) -> bool:
    return bool(batch.parents) and batch.parents[row] is not None


def _span(batch: Batch, row: int, window: int | None) -> tuple[int, int]:
    """(first page, number of pages) that the row's tokens see through the window."""
    first = 0 if window is None else max(0, batch.starts[row] + 1 - window) // batch.page_size
    return first, -(-batch.context(row) // batch.page_size) - first


def _group(batch: Batch, first: int, last: int, window: int | None) -> Group:
    assert batch.page_table is not None
    device, size, rows = batch.lo.device, batch.page_size, range(first, last)
    spans = [_span(batch, r, window) for r in rows]
    numbers = torch.tensor([[*span, batch.context(r)] for span, r in zip(spans, rows)], device=device)     # (R, 3)
    start, count, context = numbers.unbind(1)
    widest = max(n for _, n in spans)
    page = start[:, None] + torch.arange(widest, device=device)                                            # (R, P)
    pages = batch.page_table[first:last].gather(1, page.clamp(max=batch.page_table.shape[1] - 1))
    beyond = torch.tensor([(r, p) for r, (_, n) in enumerate(spans) for p in range(n, widest)],
                          dtype=torch.int64, device=device).view(-1, 2)
    at = start[:, None] * size + torch.arange(widest * size, device=device)                                # (R, L)
    tokens = slice(batch.offsets[first], batch.offsets[last])
    lo, hi, positions = (t[tokens].view(last - first, -1, 1) for t in (batch.lo, batch.hi, batch.positions))
    mask = (at[:, None] >= lo) & (at[:, None] < hi)                                                        # (R, n, L)
    if window is not None:
        mask &= at[:, None] > positions - window
    written = torch.arange(size, device=device) < (context - (start + count - 1) * size)[:, None]          # (R, size)
    return Group(first, last, pages, mask, count - 1, written, (beyond[:, 0], beyond[:, 1]))


def _gather(pages: Tensor, index: Tensor) -> Tensor:
    """(pages, K, page_size[, d]) at (R, P) -> (R, K, P, page_size[, d]), in one copy of whole rows."""
    heads = pages.shape[1]
    rows = (index[:, None] * heads + torch.arange(heads, device=index.device)[:, None]).flatten()          # R * K * P
    found = pages.view(pages.shape[0] * heads, -1).index_select(0, rows)
    return found.view(index.shape[0], heads, index.shape[1], *pages.shape[2:])


def _clear(v: Tensor, group: Group) -> None:
    """Zero what is not the sequence's own: weight 0 times another sequence's NaN is NaN."""
    row = torch.arange(len(v), device=v.device)
    v[row, :, group.final] = v[row, :, group.final].where(group.written[:, None, :, None], 0)
    v[group.beyond[0], :, group.beyond[1]] = 0
