"""From processed logits to the distribution that is sampled from: temperature, then truncation.

The order is that of transformers: temperature, top-k, top-p, min-p, typical; each step works on what the one before has
left, renormalised. (vLLM applies min-p before top-k and top-p: the same set unless min-p removes mass that top-p would
count.) Tokens that tie with the last one kept are kept as well, so that the result does not depend on a sort's order.

Each row is computed from itself alone: the result is bitwise the same in any batch.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.sampling.context import RowContext

_FIRST_CANDIDATES = 256  # a nucleus is rarely larger; 32 rows of 262,144: 7 ms, a full sort takes 390 ms


def distribution(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """Processed logits (R, V) -> float32 probabilities (R, V), row i by the parameters of `rows[i]`.

    A greedy row is exactly one-hot at its largest logit, the lowest index on ties. Logits of +inf share the whole mass.
    A row that has no distribution (all tokens masked, or a NaN) is all zero.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(rows), "one context per row of logits"
    greedy = [i for i, row in enumerate(rows) if row.params.greedy]
    if not greedy:
        return sampled(logits.float(), rows)
    probs = torch.zeros_like(logits, dtype=torch.float32)
    top = torch.tensor(greedy, device=logits.device)
    tokens = argmax(logits[top] if len(greedy) < len(rows) else logits)  # (greedy,)
    probs[top, tokens.clamp(min=0)] = (tokens >= 0).float()
    if len(greedy) < len(rows):
        others = [i for i, row in enumerate(rows) if not row.params.greedy]
        index = torch.tensor(others, device=logits.device)
        probs[index] = sampled(logits[index].float(), [rows[i] for i in others])
    return probs


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row, the lowest on ties: (R, V) -> (R,). -1 if all are -inf or one is NaN."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # numpy's takes 20 us for 262,144 logits, torch's 230.
        best = torch.from_numpy(logits.numpy().argmax(-1))
        return torch.where(logits.gather(1, best[:, None])[:, 0] > -torch.inf, best, -1)
    best = logits.argmax(-1)
    return torch.where(logits.amax(-1) > -torch.inf, best, -1)


def sampled(logits: Tensor, rows: Sequence[RowContext], *, cut: bool = False) -> Tensor:
    """`distribution` of rows none of which is greedy. cut: these are the logits that each row's top-k leaves, and no others."""
    params = [row.params for row in rows]
    vocab = logits.shape[1]
    peak = logits.amax(-1, keepdim=True)  # (R, 1)
    finite = bool(peak.isfinite().all())
    temperature = [p.temperature for p in params]
    top_k = [p.top_k if 0 < p.top_k < vocab and not cut else 0 for p in params]
    top_p = [p.top_p for p in params]
    min_p = [p.min_p for p in params]
    typical_p = [p.typical_p for p in params]
    truncated = any(top_k) or min(top_p) < 1 or any(min_p) or min(typical_p) < 1
    if finite and not truncated and all(t == 1 for t in temperature):
        return torch.softmax(logits, -1)

    # Shifted first: a tiny temperature then underflows to -inf, where the plain quotient would overflow to +inf.
    x = logits - peak  # (R, V), the largest is 0
    x /= _column(temperature, x)
    if not finite:
        x = torch.where(peak.isfinite(), x, torch.where(logits == torch.inf, 0.0, -torch.inf))
    if any(top_k):
        which = [i for i, k in enumerate(top_k) if k]
        # By logits, whose differences a division may round away: the same tokens as `candidates` keeps.
        values = _select(logits, which).topk(max(top_k), dim=-1).values  # (r, K), descending
        kth = torch.tensor([top_k[i] - 1 for i in which], device=x.device).unsqueeze(1)  # (r, 1)
        _keep_from(x, logits, which, values.gather(1, kth))
    if min(top_p) < 1:
        which = [i for i, p in enumerate(top_p) if p < 1]
        part = _select(x, which)  # (r, V)
        _keep_from(x, x, which, _mass_threshold(part, torch.softmax(part, -1), [top_p[i] for i in which]))
    if any(min_p):
        # p < min_p * max p, in logits: the largest is 0
        x.masked_fill_(x < _column([math.log(p) if p else -math.inf for p in min_p], x), -torch.inf)
    if min(typical_p) < 1:
        which = [i for i, p in enumerate(typical_p) if p < 1]
        typicality = _typicality(_select(x, which))  # (r, V)
        score = torch.zeros_like(x)
        score[torch.tensor(which, device=x.device)] = typicality
        probs = torch.softmax(_select(x, which), -1)
        _keep_from(x, score, which, _mass_threshold(typicality, probs, [typical_p[i] for i in which]))
    probs = torch.softmax(x, -1)
    if not finite:
        probs.masked_fill_(~(peak > -torch.inf), 0.0)
    return probs


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)  # (R, 1)


def _select(x: Tensor, which: Sequence[int]) -> Tensor:
    """Rows `which` (ascending) of x (R, V), without a copy if these are all."""
    return x if len(which) == x.shape[0] else x[torch.tensor(which, device=x.device)]


def _keep_from(x: Tensor, score: Tensor, which: Sequence[int], threshold: Tensor) -> None:
    """Masks, in x (R, V) and in the rows `which`, the tokens whose score is below the row's threshold (r, 1)."""
    if len(which) < x.shape[0]:
        limit = torch.full_like(x[:, :1], -torch.inf)  # (R, 1)
        limit[torch.tensor(which, device=x.device)] = threshold
    else:
        limit = threshold
    x.masked_fill_(score < limit, -torch.inf)


def _typicality(x: Tensor) -> Tensor:
    """-|surprise - entropy| of each token: (R, V) -> (R, V). (Meister et al.: "Locally typical sampling", 2022)"""
    log_probs = torch.log_softmax(x, -1)
    # A running sum, since torch splits a plain sum over threads when there is a single row.
    entropy: Tensor = torch.special.entr(log_probs.exp()).cumsum(-1, dtype=torch.float64)[:, -1:]  # (R, 1)
    return -(log_probs + entropy.float()).abs()


def _mass_threshold(score: Tensor, probs: Tensor, mass: Sequence[float]) -> Tensor:
    """The score of the token at which the probability of the best-scored tokens reaches `mass`: (R, V) -> (R, 1).

    Looks at the 256 best tokens of each row first, at more only for rows whose mass is not reached by then.
    """
    vocab = score.shape[1]
    threshold = torch.empty_like(score[:, :1])
    goal = torch.tensor(mass, dtype=torch.float64, device=score.device).unsqueeze(1)  # (R, 1)
    pending = torch.arange(score.shape[0], device=score.device)
    size = min(_FIRST_CANDIDATES, vocab)
    while True:
        best, token = score.topk(size, dim=-1)  # (r, size)
        reached = probs.gather(1, token).cumsum(-1, dtype=torch.float64) >= goal[pending]  # (r, size)
        last = (size - reached.sum(-1, keepdim=True)).clamp(max=size - 1)  # (r, 1)
        threshold[pending] = best.gather(1, last)
        open_ = (~reached[:, -1]).nonzero()[:, 0]
        if size == vocab or not len(open_):
            return threshold
        pending, score, probs = pending[open_], score[open_], probs[open_]
        size = min(16 * size, vocab)
