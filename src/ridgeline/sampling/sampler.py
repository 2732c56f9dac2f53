"""Choosing tokens: argmax, or the inverse of the cumulative distribution at the row's own random number."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.noise import Purpose
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
    """The first index at which the cumulative weight exceeds u * total: (R, V), u in [0, 1) -> (R,) int64.

    Weights are >= 0 and need no normalisation. Sums are float64, so that the rounding of a row of 262,144 entries stays
    far below its smallest float32 probability that matters. An index of weight 0 is never returned; -1 if all are.
    """
    vocab = weights.shape[1]
    # In two levels: the sums of whole blocks, then a running sum inside one. Half the time of one long running sum.
    whole = vocab // _BLOCK * _BLOCK
    sums = [weights[:, :whole].unfold(1, _BLOCK, _BLOCK).sum(-1, dtype=torch.float64)] if whole else []  # (R, blocks)
    if whole < vocab:
        sums.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))  # (R, 1)
    blocks = torch.cat(sums, 1)  # (R, blocks)
    total = blocks.cumsum(-1)[:, -1:]  # (R, 1)
    target = torch.tensor(u, dtype=torch.float64, device=weights.device).unsqueeze(1) * total  # (R, 1)
    block, before = _first_above(blocks, target)  # (R, 1) each
    index = block * _BLOCK + torch.arange(min(_BLOCK, vocab), device=weights.device)  # (R, block)
    inside = weights.gather(1, index.clamp(max=vocab - 1)).double() * (index < vocab)  # (R, block)
    offset, _ = _first_above(inside, target - before)  # (R, 1)
    return torch.where(total > 0, block * _BLOCK + offset, -1).squeeze(1)


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of weight > 0 whose running sum exceeds `target` (R, 1), and the sum before it: (R, 1) each.

    If rounding leaves no such index, the last one of weight > 0. The weights are looked at as well as their sums
    because a parallel scan may let the sum grow, by rounding, where the weight is 0.
    """
    upto = weights.cumsum(-1)  # (R, N)
    positive = weights > 0
    above = positive & (upto > target)
    last = weights.shape[1] - 1 - positive.flip(-1).int().argmax(-1, keepdim=True)
    index = torch.where(above.any(-1, keepdim=True), above.int().argmax(-1, keepdim=True), last)
    return index, torch.where(index > 0, upto.gather(1, (index - 1).clamp(min=0)), 0.0)
