"""The inverse of a cumulative distribution, in two levels."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.noise import again

BLOCK = 512


def inverse_cdf(weights: Tensor, u: Sequence[float]) -> Tensor:
    """An index drawn in proportion to its weight: (R, V), u in [0, 1) -> (R,) int64.

    The inverse of the cumulative distribution, in two levels: u decides the block of 512 indexes, and a second number made
    from u the index inside it. Logits differ by rounding between batch shapes, and each boundary of a distribution moves
    with them; one level over 262,144 tokens has so many boundaries that 2 tokens in 1,000 changed, two levels have 1,024.
    Weights are >= 0 and need no normalisation; sums are float64. An index of weight 0 is never returned; -1 if all are.
    """
    vocab = weights.shape[1]
    whole = vocab // BLOCK * BLOCK
    sums = [weights[:, :whole].unfold(1, BLOCK, BLOCK).sum(-1, dtype=torch.float64)] if whole else []  # (R, blocks)
    if whole < vocab:
        sums.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))  # (R, 1)
    blocks = torch.cat(sums, 1)  # (R, blocks)
    block = first_above(blocks, u)  # (R, 1)
    index = block * BLOCK + torch.arange(min(BLOCK, vocab), device=weights.device)  # (R, block)
    inside = weights.gather(1, index.clamp(max=vocab - 1)).double() * (index < vocab)  # (R, block)
    offset = first_above(inside, [again(x) for x in u])  # (R, 1)
    return torch.where(blocks.sum(-1, keepdim=True) > 0, block * BLOCK + offset, -1).squeeze(1)


def first_above(weights: Tensor, u: Sequence[float]) -> Tensor:
    """The first index of weight > 0 whose running sum exceeds u * total: (R, N), (R) -> (R, 1).

    If rounding leaves no such index, the last one of weight > 0. The weights are looked at as well as their sums
    because a parallel scan may let the sum grow, by rounding, where the weight is 0.
    """
    upto = weights.cumsum(-1)  # (R, N)
    target = torch.tensor(u, dtype=torch.float64, device=weights.device).unsqueeze(1) * upto[:, -1:]  # (R, 1)
    positive = weights > 0
    above = positive & (upto > target)
    last = weights.shape[1] - 1 - positive.flip(-1).int().argmax(-1, keepdim=True)
    return torch.where(above.any(-1, keepdim=True), above.int().argmax(-1, keepdim=True), last)
