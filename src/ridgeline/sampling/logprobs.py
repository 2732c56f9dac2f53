"""Log-probabilities that are reported with a token."""
from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.types import TokenLogprobs

__all__ = ["TokenLogprobs", "top_logprobs"]


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens (R,) and of the k best under the model's own logits (R, V).

    Takes the logits as the model gave them, before masks, penalties and temperature, as vLLM does by default.
    """
    logits = logits.float()
    k = min(k, logits.shape[1])
    log_probs = torch.log_softmax(logits, -1)  # (R, V)
    at = logits.gather(1, chosen.unsqueeze(1))  # (R, 1)
    rank = (logits > at).sum(-1) + 1  # (R,)
    top_ids = _top_ids(logits, k)  # (R, k)
    ids = torch.cat([chosen.unsqueeze(1), top_ids], 1)  # (R, 1 + k)
    values = log_probs.gather(1, ids).tolist()
    return [
        TokenLogprobs(token_ids[0], row[0], place, list(zip(token_ids[1:], row[1:])))
        for token_ids, row, place in zip(ids.tolist(), values, rank.tolist())
    ]


def _top_ids(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits, ties by ascending id: (R, V) -> (R, k)."""
    if k == 0:
        return logits.new_empty((logits.shape[0], 0), dtype=torch.int64)
    values, ids = logits.topk(k, dim=-1)  # (R, k)
    # topk takes any of the tokens that tie for the last places; logits of 16 bits tie often.
    threshold = values[:, -1:]  # (R, 1)
    for i in ((logits >= threshold).sum(-1) > k).nonzero()[:, 0].tolist():
        better = ids[i][values[i] > threshold[i]]
        tied = (logits[i] == threshold[i]).nonzero()[:, 0]  # ascending
        ids[i] = torch.cat([better, tied])[:k]
    ids = ids.sort(dim=-1).values
    order = logits.gather(1, ids).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order)
