"""Choosing tokens: argmax, or the inverse of the cumulative distribution at the row's own random number."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.noise import Purpose, again
from ridgeline.sampling.context import RowContext
from ridgeline.sampling.distribution import argmax, distribution

_BLOCK = 512


def sample(
    logits: Tensor, rows: Sequence[RowContext], purpose: Purpose = Purpose.SAMPLE, *, keep_probs: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Chooses a token for each row of processed logits (R, V).

    Returns the tokens (R,) int64 and, with `keep_probs`, the distributions (R, V) float32 that they were chosen from.
    Row i takes the number that `rows[i]` has for `purpose`, so it does not matter what else is in the batch.
    A token of -1 marks a row with nothing to choose from: every token is masked, or a logit is NaN.
    """
    if keep_probs:
        probs = distribution(logits, rows)
        return inverse_cdf(probs, [row.uniform(purpose) for row in rows]), probs
    sampled = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not sampled:
        return argmax(logits), None
    chosen = [rows[i] for i in sampled]
    if len(sampled) == len(rows):
        return inverse_cdf(distribution(logits, rows), [row.uniform(purpose) for row in chosen]), None
    tokens = argmax(logits)
    index = torch.tensor(sampled, device=logits.device)
    tokens[index] = inverse_cdf(distribution(logits[index], chosen), [row.uniform(purpose) for row in chosen])
    return tokens, None


def inverse_cdf(weights: Tensor, u: Sequence[float]) -> Tensor:
    """An index drawn in proportion to its weight: (R, V), u in [0, 1) -> (R,) int64.

    The inverse of the cumulative distribution, in two levels: u decides the block of 512 indexes, and a second number made
    from u the index inside it. Logits differ by rounding between batch shapes, and each boundary of a distribution moves
    with them; one level over 262,144 tokens has so many boundaries that 2 tokens in 1,000 changed, two levels have 1,024.
    Weights are >= 0 and need no normalisation; sums are float64. An index of weight 0 is never returned; -1 if all are.
    """
    vocab = weights.shape[1]
    whole = vocab // _BLOCK * _BLOCK
    sums = [weights[:, :whole].unfold(1, _BLOCK, _BLOCK).sum(-1, dtype=torch.float64)] if whole else []  # (R, blocks)
    if whole < vocab:
        sums.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))  # (R, 1)
    blocks = torch.cat(sums, 1)  # (R, blocks)
    block = _first_above(blocks, u)  # (R, 1)
    index = block * _BLOCK + torch.arange(min(_BLOCK, vocab), device=weights.device)  # (R, block)
    inside = weights.gather(1, index.clamp(max=vocab - 1)).double() * (index < vocab)  # (R, block)
    offset = _first_above(inside, [again(x) for x in u])  # (R, 1)
    return torch.where(blocks.sum(-1, keepdim=True) > 0, block * _BLOCK + offset, -1).squeeze(1)


def _first_above(weights: Tensor, u: Sequence[float]) -> Tensor:
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
