"""The gated delta rule over the ragged batch. arXiv 2412.06464.

    S_t = e^{g_t} S_{t-1} + k_t d_t^T,   d_t = beta_t (v_t - e^{g_t} S_{t-1}^T k_t),   o_t = S_t^T q_t

Rows of few tokens, trees among them, take the recurrence: all tokens of one depth, over all rows, are one step, so a
batch of decoding sequences is a single step. Long rows take the chunked form: inside a chunk everything is a matrix
product, and the state moves once a chunk. Chunks end at absolute multiples of CHUNK in the sequence and wherever a
state is to be kept.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.batch import Batch
from ridgeline.ops.recurrent import initial_state, on_device, save_state, written

CHUNK = 64
CROSSOVER = 4      # rows of more tokens a chunk are faster in chunks: 32 heads of 128 x 128 fp32, one CPU core


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension, in fp32 (fp64), and left there."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch, state: Tensor | None = None,
                *, crossover: int = CROSSOVER) -> Tensor:
    """q, k: (T, Hk, dk), k normalised, q normalised and scaled; v: (T, H, dv); g, beta: (T, H) -> (T, H, dv).

    g <= 0 is the logarithm of the decay. Value head h reads key head h // (H / Hk). state: (slots, H, dk, dv), read at
    batch.state_read and written at batch.state_write; None = every row starts from zeros and nothing is kept.
    Computed in fp32 (fp64 for fp64 inputs). crossover: see CROSSOVER; 0 = chunked for every row that is no tree.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    groups = v.shape[1] // k.shape[1]
    q, k = (t.to(wide).repeat_interleave(groups, dim=1) for t in (q, k))                 # (T, H, dk)
    inputs = q, k, v.to(wide), g.to(wide), beta.to(wide)
    if state is None:
        start = v.new_zeros(batch.rows, v.shape[1], k.shape[2], v.shape[2], dtype=wide)
    else:
        start = initial_state(state, batch).to(wide)                                     # (R, H, dk, dv)
    plan = _plan(batch, v.device, crossover, state is not None)
    parts = _recurrent(inputs, start, plan.levels, state)
    if plan.chunks is not None:
        parts.append(_chunked(inputs, start, plan.chunks, state))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (out if plan.order is None else out[plan.order]).to(v.dtype)


@dataclass(frozen=True)
class _Kept:
    """States to be kept after one step: their index among the step's states (None = all, in order) and their slots."""

    index: Tensor | None
    slots: Tensor

    def save(self, pool: Tensor, states: Tensor) -> None:
        save_state(pool, self.slots, states if self.index is None else states.index_select(0, self.index))


@dataclass(frozen=True)
class _Level:
    """All tokens of one depth. parents: index in the level before, in depth 0 the row; None = the same, in order."""

    tokens: Tensor                        # (n,)
    parents: Tensor | None                # (n,)
    kept: _Kept | None


@dataclass(frozen=True)
class _Chunks:
    """The chunks of all long rows: first every row's first, then every second, ...; rows with most chunks first."""

    tokens: Tensor                        # (P, C), padded with the chunk's own last token
    valid: Tensor                         # (P, C) bool
    filled: Tensor                        # (tokens in all,) index of the valid entries in the flattened table
    rows: Tensor                          # (rows,)
    steps: list[tuple[int, int, _Kept | None]]   # half-open range of chunks that advance together


@dataclass(frozen=True)
class _Plan:
    levels: list[_Level]
    chunks: _Chunks | None
    order: Tensor | None                  # (T,) where each token's output lies; None = in order


def _recurrent(inputs: Sequence[Tensor], start: Tensor, levels: list[_Level], pool: Tensor | None) -> list[Tensor]:
    """The recurrence itself, one level after the other -> outputs (n, H, dv) of each level."""
    out, states = [], start
    for level in levels:
        q, k, v, g, beta = (t[level.tokens] for t in inputs)
        before = states if level.parents is None else states.index_select(0, level.parents)   # (n, H, dk, dv)
        decay = g.exp()[..., None]
        # A step is bound by the state's bytes: one read serves k and q, o_t = e^g S^T q + (k . q) d_t.
        seen_k, seen_q = (torch.stack([k, q], -2) @ before).unbind(-2)                   # (n, H, dv) each
        delta = beta[..., None] * (v - decay * seen_k)
        out.append(decay * seen_q + (k * q).sum(-1, keepdim=True) * delta)
        states = torch.addcmul(before * decay[..., None], k[..., None], delta[..., None, :])
        if level.kept is not None and pool is not None:
            level.kept.save(pool, states)
    return out


def _chunked(inputs: Sequence[Tensor], start: Tensor, chunks: _Chunks, pool: Tensor | None) -> Tensor:
    """The same in chunks -> (tokens in all, H, dv).

    With G the running sum of g inside a chunk and D_ij = e^{G_i - G_j}, the d_t of a chunk solve the unit lower
    triangular system (I + A) d = beta (v - e^G k S), A_ij = beta_i (k_i . k_j) D_ij for j < i.
    Sums run between pairs, so no e^{-G} is formed and no two large sums are subtracted.
    """
    q, k, v, g, beta = (t[chunks.tokens].transpose(1, 2) for t in inputs)                # (P, H, C, ...)
    g = g.masked_fill(~chunks.valid[:, None], 0)                                         # padding changes nothing
    beta = beta.masked_fill(~chunks.valid[:, None], 0)[..., None]
    size = chunks.tokens.shape[1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    between = g[..., None].expand(*g.shape, size).masked_fill(~lower.tril(-1), 0).cumsum(-2)   # sum of g over (j, i]
    decay = between.masked_fill(~lower, float("-inf")).exp()                             # (P, H, C, C)
    since = g.cumsum(-1).exp()[..., None]                                                # (P, H, C, 1)
    system = (beta * (k @ k.mT) * decay).tril(-1)
    scores = (q @ k.mT) * decay
    q_since, k_since, k_left = q * since, k * since, k * decay[..., -1, :, None]
    states, out = start[chunks.rows], []
    for a, b, kept in chunks.steps:
        states = states[:b - a]                                                          # (rows left, H, dk, dv)
        right = beta[a:b] * (v[a:b] - k_since[a:b] @ states)
        delta = torch.linalg.solve_triangular(system[a:b], right, upper=False, unitriangular=True)
        out.append(q_since[a:b] @ states + scores[a:b] @ delta)                          # (rows left, H, C, dv)
        states = since[a:b, :, -1:] * states + k_left[a:b].mT @ delta
        if kept is not None and pool is not None:
            kept.save(pool, states)
    return torch.cat(out).transpose(1, 2).flatten(0, 1)[chunks.filled]


def _plan(batch: Batch, device: torch.device, crossover: int, keep: bool) -> _Plan:
    """Which token is computed where; made on the host once per batch and shared by its layers."""
    key = ("delta_plan", device, crossover, keep)
    if key in batch.memo:
        known: _Plan = batch.memo[key]
        return known
    slots = dict(written(batch)) if keep else {}
    short: list[int] = []
    long: dict[int, list[tuple[int, int]]] = {}
    for row, n in enumerate(batch.lengths()):
        tree = batch.parents[row] if batch.parents else None
        pieces = chunk_bounds(batch, row, slots)
        if n and (tree is not None or n <= crossover * len(pieces)):
            short.append(row)
        elif n:
            long[row] = pieces
    levels, order = _levels(batch, short, slots, device)
    chunks = None
    if long:
        chunks, more = _table(long, slots, device)
        order += more
    where = sorted(range(len(order)), key=order.__getitem__)
    plan = _Plan(levels, chunks, None if where == list(range(len(order))) else on_device(where, device))
    batch.memo[key] = plan
    return plan


def chunk_bounds(batch: Batch, row: int, slots: dict[int, int]) -> list[tuple[int, int]]:
    """The row's tokens cut at absolute multiples of CHUNK and after each token in slots."""
    a, b = batch.offsets[row], batch.offsets[row + 1]
    first = a + CHUNK - batch.starts[row] % CHUNK
    ends = sorted({*range(first, b, CHUNK), *(t + 1 for t in range(a, b) if t in slots), b} - {a})
    return list(zip([a, *ends], ends)) if b > a else []


def _levels(batch: Batch, rows: list[int], slots: dict[int, int],
            device: torch.device) -> tuple[list[_Level], list[int]]:
    """Tokens of the rows by depth, and the order in which their outputs come."""
    levels: list[list[tuple[int, int]]] = []          # (token, index of the parent in the level before)
    for row in rows:
        a, n = batch.offsets[row], batch.offsets[row + 1] - batch.offsets[row]
        tree = batch.parents[row] if batch.parents else None
        place: list[tuple[int, int]] = []             # depth and index of each token of the row
        for i in range(n):
            parent = i - 1 if tree is None else tree[i]
            depth, before = (place[parent][0] + 1, place[parent][1]) if parent >= 0 else (0, row)
            if depth == len(levels):
                levels.append([])
            place.append((depth, len(levels[depth])))
            levels[depth].append((a + i, before))
    out, size = [], batch.rows
    for level in levels:
        tokens, parents = [t for t, _ in level], [p for _, p in level]
        same = parents == list(range(size))
        out.append(_Level(on_device(tokens, device), None if same else on_device(parents, device),
                          _kept(tokens, slots, device)))
        size = len(level)
    return out, [token for level in levels for token, _ in level]


def _table(long: dict[int, list[tuple[int, int]]], slots: dict[int, int],
           device: torch.device) -> tuple[_Chunks, list[int]]:
    rows = sorted(long, key=lambda row: -len(long[row]))
    pieces: list[tuple[int, int]] = []
    steps: list[tuple[int, int, _Kept | None]] = []
    for step in range(len(long[rows[0]])):
        now = [long[row][step] for row in rows if step < len(long[row])]
        steps.append((len(pieces), len(pieces) + len(now), _kept([b - 1 for _, b in now], slots, device)))
        pieces += now
    a = torch.tensor([a for a, _ in pieces], device="cpu")[:, None]
    b = torch.tensor([b for _, b in pieces], device="cpu")[:, None]
    at = a + torch.arange(int((b - a).max()), device="cpu")                              # (P, C)
    valid = at < b
    filled = valid.flatten().nonzero().flatten()
    order: list[int] = at[valid].tolist()
    return _Chunks(torch.minimum(at, b - 1).to(device, non_blocking=True), valid.to(device, non_blocking=True),
                   filled.to(device, non_blocking=True), on_device(rows, device), steps), order


def _kept(tokens: list[int], slots: dict[int, int], device: torch.device) -> _Kept | None:
    index = [i for i, token in enumerate(tokens) if token in slots]
    if not index:
        return None
    return _Kept(None if len(index) == len(tokens) else on_device(index, device),
                 on_device([slots[tokens[i]] for i in index], device))
