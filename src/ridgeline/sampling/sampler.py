"""Choosing tokens: argmax, or the inverse of the cumulative distribution at the row's own random number."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.noise import Purpose
from ridgeline.sampling.candidates import Candidates, candidates, draw, narrow
from ridgeline.sampling.context import RowContext
from ridgeline.sampling.distribution import argmax, distribution
from ridgeline.sampling.inverse import inverse_cdf

# Processed logits (R, V), their rows' contexts and numbers u -> tokens (R,).
Draw = Callable[[Tensor, Sequence[RowContext], Sequence[float]], Tensor]
# Candidates in place of logits.
DrawFew = Callable[[Candidates, Sequence[RowContext], Sequence[float]], Tensor]


def sample(
    logits: Tensor, rows: Sequence[RowContext], purpose: Purpose = Purpose.SAMPLE, *, keep_probs: bool = False,
    wide: Draw | None = None, few: DrawFew | None = None
) -> tuple[Tensor, Tensor | None]:
    """Chooses a token for each row of processed logits (R, V).

    Returns the tokens (R,) int64 and, with `keep_probs`, the distributions (R, V) float32 that they were chosen from.
    Row i takes the number that `rows[i]` has for `purpose`, so it does not matter what else is in the batch.
    wide: what draws rows that need all of their logits, in place of `distribution` and `inverse_cdf`, few: rows of which the
    candidates decide; the tokens are the same up to rounding where two of them meet.
    A token of -1 marks a row with nothing to choose from: every token is masked, or a logit is NaN.
    """
    if keep_probs:
        probs = distribution(logits, rows)
        return inverse_cdf(probs, [row.uniform(purpose) for row in rows]), probs
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault("greedy" if row.params.greedy else "narrow" if narrow(row.params) else "wide", []).append(i)
    for kind, which in groups.items():
        own, part = logits, list(rows)
        if len(which) < len(rows):
            own, part = logits[torch.tensor(which, device=logits.device)], [rows[i] for i in which]
        if kind == "greedy":
            tokens[which] = argmax(own)
            continue
        u = [row.uniform(purpose) for row in part]
        tokens[which] = _narrow(own, part, u, few or draw) if kind == "narrow" else (wide or _wide)(own, part, u)
    return tokens, None


def _wide(logits: Tensor, rows: Sequence[RowContext], u: Sequence[float]) -> Tensor:
    return inverse_cdf(distribution(logits, rows), u)


def _narrow(logits: Tensor, rows: Sequence[RowContext], u: Sequence[float], few: DrawFew) -> Tensor:
    """From the few candidates; rows without such are drawn from their whole distribution."""
    found = candidates(logits, rows)
    tokens = few(found, rows, u)
    for i in (~found.known).nonzero()[:, 0].tolist():
        tokens[i] = _wide(logits[i:i + 1], rows[i:i + 1], [u[i]])[0]
    return tokens
