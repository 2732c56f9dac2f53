"""Causal depthwise convolution over the ragged batch, with its last inputs as recurrent state."""
from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.batch import Batch
from ridgeline.ops.recurrent import initial_state, on_device, save_state, written


def causal_conv(x: Tensor, weight: Tensor, batch: Batch, state: Tensor | None = None) -> Tensor:
    """y_t = sum_j weight[:, K-1-j] x_{t-j} for the K inputs that end at t on t's own path; sums in fp32 (fp64).

    x: (T, C); weight: (C, K); state: (slots, C, K - 1), oldest input first, None = every row starts from zeros.
    """
    channels, width = weight.shape
    taps = _taps(batch, width, x.device)                                                 # (T, K)
    if state is None:
        history = x.new_zeros(batch.rows * (width - 1), channels)
    else:
        history = initial_state(state, batch).transpose(1, 2).flatten(0, 1).to(x.dtype)  # (R * (K-1), C)
    inputs = torch.cat([history, x])
    wide = torch.promote_types(x.dtype, torch.float32)
    kernel = weight.to(wide).t()                                                         # (K, C)
    out = x.to(wide) * kernel[-1]
    for j in range(1, width):
        out = torch.addcmul(out, inputs.index_select(0, taps[:, j]).to(wide), kernel[width - 1 - j])
    if state is not None and width > 1:
        _save(state, inputs, taps, batch)
    return out.to(x.dtype)


def _save(state: Tensor, inputs: Tensor, taps: Tensor, batch: Batch) -> None:
    key = ("conv_saved", taps.device)
    if key not in batch.memo:
        pairs = written(batch)
        batch.memo[key] = on_device([t for t, _ in pairs], taps.device), on_device([s for _, s in pairs], taps.device)
    tokens, slots = batch.memo[key]
    if len(slots):
        kept = inputs[taps[tokens, :-1].flip(1)]                                         # (W, K-1, C), oldest first
        save_state(state, slots, kept.transpose(1, 2))


def _taps(batch: Batch, width: int, device: torch.device) -> Tensor:
    """(T, K): row of [histories; x] that holds the input j steps before each token."""
    key = ("conv_taps", width, device)
    if key not in batch.memo:
        keep = width - 1
        offsets = torch.tensor(batch.offsets, device="cpu")
        row = torch.arange(batch.rows, device="cpu").repeat_interleave(offsets.diff())   # (T,)
        token = torch.arange(batch.offsets[-1], device="cpu")
        at = (token - offsets[row])[:, None] - torch.arange(width, device="cpu")         # (T, K) index in the run
        for r, tree in enumerate(batch.parents):
            if tree is not None:
                at[batch.offsets[r]:batch.offsets[r + 1]] = torch.tensor(_paths(tree, width), device="cpu")
        inside = batch.rows * keep + offsets[row][:, None] + at
        batch.memo[key] = torch.where(at >= 0, inside, row[:, None] * keep + keep + at).to(device, non_blocking=True)
    taps: Tensor = batch.memo[key]
    return taps


def _paths(parents: tuple[int, ...], width: int) -> list[list[int]]:
    """For each token of a tree itself and its width - 1 predecessors; -1, -2, ... are those before the run."""
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        before = paths[parent] if parent >= 0 else [-1 - j for j in range(width)]
        paths.append([i, *before[:width - 1]])
    return paths
