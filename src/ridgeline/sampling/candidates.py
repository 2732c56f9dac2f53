"""Rows of which only the k largest logits matter, k <= 64: sampled from these alone, with or without the others at hand.

Whether a row is drawn this way depends on its parameters alone, never on where its candidates come from: all logits (the
torch backend, a request with log-probabilities) or a head that finds its best rows without writing logits. From the same
candidates the same token is drawn, bit for bit, since both ways meet in `draw`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ridgeline.noise import again
from ridgeline.sampling.context import RowContext
from ridgeline.sampling.distribution import sampled
from ridgeline.sampling.inverse import BLOCK, first_above
from ridgeline.sampling.processors import Edit, edits
from ridgeline.sampling_params import SamplingParams

MOST = 64  # top_k at most
CAPACITY = 128  # candidates of a row, those that tie with the last one included

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Candidates:
    """ids, scores: (R, CAPACITY), int64 and float32; a row's tokens by ascending id, behind them -1 and -inf. known: (R,)
    bool, False for a row that has too many that tie, nothing to choose from, or values that are no numbers."""

    ids: Tensor
    scores: Tensor
    known: Tensor


def narrow(params: SamplingParams) -> bool:
    """Whether the k largest processed logits decide, k <= MOST: each later step of `distribution` works on what top-k left."""
    return not params.greedy and 0 < params.top_k <= MOST


def candidates(logits: Tensor, rows: Sequence[RowContext]) -> Candidates:
    """The largest of processed logits (R, V), row i as many as `rows[i]` asks for and what ties with the last of them."""
    count, vocab = logits.shape
    wanted = [min(row.params.top_k, vocab) for row in rows]
    best = logits.topk(max(wanted), dim=-1).values  # (R, K), descending; NaN first
    kth = best.gather(1, torch.tensor([[k - 1] for k in wanted], device=logits.device))  # (R, 1)
    row, token = ((logits >= kth) & (logits > -torch.inf)).nonzero(as_tuple=True)  # (N,) each, rows and then ids ascending
    sizes = torch.bincount(row, minlength=count)  # (R,)
    known = best[:, 0].isfinite() & (sizes <= CAPACITY)  # (R,)
    place = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]  # (N,), of a row's own
    fits = place < CAPACITY
    row, token, place = row[fits], token[fits], place[fits]
    ids = torch.full((count, CAPACITY), -1, device=logits.device)
    scores = torch.full((count, CAPACITY), -torch.inf, device=logits.device)
    ids[row, place], scores[row, place] = token, logits[row, token].float()
    return Candidates(ids, scores, known)


def draw(found: Candidates, rows: Sequence[RowContext], u: Sequence[float], *, cut: bool = True) -> Tensor:
    """A token for each row by its u in [0, 1): (R,) int64. The rule of `inverse_cdf` without the weights that are 0 anyway.

    cut: the candidates are those that each row's top-k leaves; False: and some that it does not.
    """
    weights = sampled(found.scores, rows, cut=cut).double()  # (R, CAPACITY)
    block = found.ids // BLOCK
    inside = block == block.gather(1, first_above(weights, u))  # (R, CAPACITY)
    place = first_above(weights * inside, [again(x) for x in u])  # (R, 1)
    return found.ids.gather(1, place).squeeze(1)


class Apart:
    """The logits that processors touch, which are scored and processed apart from all others.

    offsets: (R + 1,) and ids: (N,): the touched tokens of each row, ascending. Of a row with allowed ids these are all that
    can be chosen, and it needs no others.
    """

    def __init__(self, rows: Sequence[RowContext], vocab: int):
        self.vocab = vocab
        self.edits: list[Edit] = edits(rows, vocab)
        allowed = {i: ids for i, row in enumerate(rows) if (ids := row.params.allowed_token_ids) is not None}
        keys = [edit.row * vocab + edit.token for edit in self.edits]
        if allowed and keys:
            restricted = np.zeros(len(rows), dtype=bool)
            restricted[list(allowed)] = True
            keys = [part[~restricted[part // vocab]] for part in keys]
        keys += [i * vocab + np.asarray(ids, dtype=np.int64) for i, ids in allowed.items()]
        self.keys: _Ids = np.unique(np.concatenate(keys)) if keys else np.empty(0, dtype=np.int64)
        self.ids: _Ids = self.keys % vocab
        self.offsets: _Ids = np.searchsorted(self.keys, np.arange(len(rows) + 1) * vocab)
        self.closed = [i in allowed for i in range(len(rows))]

    def process(self, scores: Tensor) -> Tensor:
        """The model's logits of the touched tokens -> what `process` makes of them: (N,) -> (N,)."""
        out = scores.clone()
        for edit in self.edits:
            key = edit.row * self.vocab + edit.token
            at = np.searchsorted(self.keys, key).clip(max=len(self.keys) - 1)  # (n,)
            held = torch.from_numpy(self.keys[at] == key)  # not those outside the allowed ids
            index = torch.from_numpy(at)
            out[index[held]] = edit.change(out[index])[held]
        return out

    def merge(self, found: Candidates, scores: Tensor, wanted: Sequence[int]) -> Candidates:
        """Candidates among the untouched tokens and processed scores of the touched ones (N,) -> the `wanted` best of both."""
        count, sizes = len(wanted), np.diff(self.offsets)
        width = CAPACITY + int(sizes.max(initial=0))
        ids, values = np.full((count, width), -1), np.full((count, width), -np.inf, dtype=np.float32)
        ids[:, :CAPACITY], values[:, :CAPACITY] = found.ids.numpy(), found.scores.numpy()
        row = np.repeat(np.arange(count), sizes)  # (N,)
        place = CAPACITY + np.arange(len(row)) - self.offsets[row]  # (N,)
        ids[row, place], values[row, place] = self.ids, scores.numpy()
        last = np.asarray(wanted) - 1  # (R,)
        ranked = np.partition(-values, np.unique(last), axis=-1)  # (R, width), those places as if sorted
        kth = -ranked[np.arange(count), last][:, None]  # (R, 1)
        row, column = ((values >= kth) & (values > -np.inf)).nonzero()  # (n,) each
        order = (row * self.vocab + ids[row, column]).argsort()
        row, column = row[order], column[order]
        sizes = np.bincount(row, minlength=count)  # (R,)
        place = np.arange(len(row)) - (sizes.cumsum() - sizes)[row]  # (n,)
        row, column, place = (index[place < CAPACITY] for index in (row, column, place))
        best, best_values = np.full((count, CAPACITY), -1), np.full((count, CAPACITY), -np.inf, dtype=np.float32)
        best[row, place], best_values[row, place] = ids[row, column], values[row, column]
        known = found.known & torch.from_numpy((sizes > 0) & (sizes <= CAPACITY))
        return Candidates(torch.from_numpy(best), torch.from_numpy(best_values), known)
