"""Reading and writing the slots of recurrent state; shared by every mixer with a state of fixed size."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.batch import Batch


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """(n,) int64 from host integers, without waiting for the device."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def initial_state(pool: Tensor, batch: Batch) -> Tensor:
    """The state each row starts from, zeros where batch.state_read is -1. pool: (slots, *shape) -> (R, *shape).

    A copy: slots that other rows of the batch write to may be reused at once.
    """
    read = batch.state_read
    assert len(read) == batch.rows, f"state_read has {len(read)} entries for {batch.rows} rows"
    if all(slot < 0 for slot in read):
        return pool.new_zeros(batch.rows, *pool.shape[1:])
    key = ("state_read", pool.device)
    if key not in batch.memo:
        fresh = torch.tensor([slot < 0 for slot in read], device="cpu").to(pool.device, non_blocking=True)
        batch.memo[key] = on_device([max(slot, 0) for slot in read], pool.device), fresh
    slots, fresh = batch.memo[key]
    states = pool.index_select(0, slots)                                                 # (R, *shape)
    return states.masked_fill_(fresh.view(-1, *[1] * (pool.dim() - 1)), 0) if min(read) < 0 else states


def written(batch: Batch) -> list[tuple[int, int]]:
    """(token, slot) of every token whose state is to be kept."""
    assert len(batch.state_write) == batch.offsets[-1], \
        f"state_write has {len(batch.state_write)} entries for {batch.offsets[-1]} tokens"
    return [(token, slot) for token, slot in enumerate(batch.state_write) if slot >= 0]


def save_state(pool: Tensor, slots: Tensor, states: Tensor) -> None:
    """pool[slots] = states. pool: (slots, *shape), slots: (n,), states: (n, *shape)."""
    pool.index_copy_(0, slots, states.detach().to(pool.dtype))
