"""Tokens that need a few of the logits only, chosen without writing the others."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.models.base import CausalLM
from ridgeline.sampling import CAPACITY, Apart, Candidates, RowContext

# Further candidates of a model with a soft-cap, which may round different logits to one.
MARGIN = 8


def top_tokens(model: CausalLM, hidden: Tensor, rows: Sequence[RowContext], u: Sequence[float]) -> list[int | None]:
    """A token for each row of hidden (W, hidden), whose parameters are greedy or `narrow`; u: the numbers they draw with.

    The same tokens as `sample` chooses from all processed logits. None: only all logits can tell, since some are no
    numbers, too many tie, or none is allowed.
    """
    closed = [row.params.allowed_token_ids is not None for row in rows]
    if any(closed) and not all(closed):                      # the open ones read the head, the others a few rows of it
        out: list[int | None] = [None] * len(rows)
        for group in (True, False):
            which = [i for i, own in enumerate(closed) if own == group]
            for i, token in zip(which, top_tokens(model, hidden[which], [rows[i] for i in which], [u[i] for i in which])):
                out[i] = token
        return out
    assert model.top_head is not None
    apart = Apart(rows, model.config.vocab_size)
    wanted = [1 if row.params.greedy else row.params.top_k for row in rows]
    k = [0 if own else n + (MARGIN if model.capped else 0) for n, own in zip(wanted, closed)]
    ids, scores, touched, counts = model.top_head.top(hidden, k, apart.offsets, apart.ids, CAPACITY)
    known = counts >= 0
    if model.capped:
        scores, touched = torch.where(ids >= 0, model.cap(scores), -torch.inf), _cap(model, touched)
        lowest = torch.where(ids >= 0, scores, torch.inf).amin(-1)                          # (W,)
        kth = scores.topk(max(wanted), dim=-1).values[torch.arange(len(rows)), torch.tensor(wanted) - 1]
        known &= (counts < torch.tensor(k)) | (lowest < kth) | torch.tensor(closed)
    found = Candidates(ids, scores, known)
    cut = bool(len(apart.ids)) or not model.capped
    if len(apart.ids):
        found = apart.merge(found, apart.process(touched), wanted)
    sampled = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(sampled) == len(rows):
        tokens = model.top_head.draw_few(found, rows, u, cut=cut)
    else:
        tokens = found.ids.gather(1, torch.from_numpy(found.scores.numpy().argmax(-1))[:, None])[:, 0]    # the first of equals
        if sampled:
            part = Candidates(found.ids[sampled], found.scores[sampled], found.known[sampled])
            tokens[sampled] = model.top_head.draw_few(part, [rows[i] for i in sampled], [u[i] for i in sampled], cut=cut)
    known = found.known & (found.scores > -torch.inf).any(-1)
    return [token if good else None for token, good in zip(tokens.tolist(), known.tolist())]


def _cap(model: CausalLM, logits: Tensor) -> Tensor:
    """(N,) -> (N,), padded meanwhile: torch computes what does not fill a vector with other functions, to other bits."""
    padded = np.zeros(-(-len(logits) // 64) * 64, dtype=np.float32)
    padded[:len(logits)] = logits.numpy()
    return model.cap(torch.from_numpy(padded))[:len(logits)]
