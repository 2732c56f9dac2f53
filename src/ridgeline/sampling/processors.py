"""Masks, bias and penalties: from the model's logits to the logits that are sampled from.

The order is vLLM's: allowed ids, bad words, min_tokens, bias, then repetition, frequency and presence penalty. All rows
of a batch are handled together through index tensors; a feature that no row uses costs nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ridgeline.sampling.context import RowContext

_Ids = npt.NDArray[np.int64]


def process(logits: Tensor, rows: Sequence[RowContext], *, inplace: bool = False) -> Tensor:
    """Logits (R, V) of the model -> float32 logits (R, V) after masks, bias and penalties, row i by `rows[i]`.

    A masked token has -inf. `logits` is returned itself if nothing changes; otherwise a copy is changed, or `logits`
    itself with `inplace` (and float32). Bad words are looked for in the output only; a word half written by the prompt
    can be completed, as in vLLM. min_tokens masks the stop token ids and, unless `ignore_eos`, the eos ids.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(rows), "one context per row of logits"
    x = _Editor(logits.float(), inplace=inplace)
    _allow(x, rows)
    x.mask(_bad_words(rows))
    x.mask(_too_early_stops(rows))
    _bias(x, rows)
    _repetition(x, rows)
    _frequency_and_presence(x, rows)
    return x.tensor


class _Editor:
    """A tensor (R, V) that is copied at its first change, and not at all if none comes."""

    def __init__(self, tensor: Tensor, *, inplace: bool) -> None:
        self.tensor = tensor
        self.owned = inplace

    def own(self) -> Tensor:
        if not self.owned:
            self.tensor, self.owned = self.tensor.clone(), True
        return self.tensor

    def indices(self, ids: Sequence[int] | _Ids) -> Tensor:
        return torch.as_tensor(np.asarray(ids, dtype=np.int64), device=self.tensor.device)

    def floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.tensor.device)

    def mask(self, pairs: Iterable[tuple[int, int]]) -> None:
        """-inf at the given (row, token)."""
        flat = list(pairs)
        if flat:
            row, token = self.indices(np.asarray(flat, dtype=np.int64).T)  # (2, N) -> twice (N,)
            self.own()[row, token] = -torch.inf


def _allow(x: _Editor, rows: Sequence[RowContext]) -> None:
    restricted = [
        (i, ids) for i, row in enumerate(rows) if (ids := row.params.allowed_token_ids) is not None
    ]
    if restricted:
        which = x.indices([i for i, _ in restricted])
        row = x.indices([i for i, ids in restricted for _ in ids])  # (N,)
        token = x.indices([t for _, ids in restricted for t in ids])  # (N,)
        tensor = x.own()
        kept = tensor[row, token]  # (N,)
        tensor.index_fill_(0, which, -torch.inf)
        tensor[row, token] = kept


def _bad_words(rows: Sequence[RowContext]) -> Iterable[tuple[int, int]]:
    for i, row in enumerate(rows):
        for word in row.params.bad_words_token_ids:
            prefix = len(word) - 1
            written = len(row.output)
            if prefix <= written and list(row.output[written - prefix :]) == list(word[:prefix]):
                yield i, word[-1]


def _too_early_stops(rows: Sequence[RowContext]) -> Iterable[tuple[int, int]]:
    for i, row in enumerate(rows):
        if len(row.output) < row.params.min_tokens:
            yield from ((i, token) for token in row.params.stop_token_ids)
            if not row.params.ignore_eos:
                yield from ((i, token) for token in row.eos_token_ids)


def _bias(x: _Editor, rows: Sequence[RowContext]) -> None:
    entries = [
        (i, token, bias)
        for i, row in enumerate(rows)
        if row.params.logit_bias
        for token, bias in row.params.logit_bias.items()
    ]
    if entries:
        row = x.indices([i for i, _, _ in entries])  # (N,), each (row, token) once
        token = x.indices([t for _, t, _ in entries])
        x.own()[row, token] += x.floats([b for _, _, b in entries])


def _repetition(x: _Editor, rows: Sequence[RowContext]) -> None:
    used = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if used:
        index, token = _history(rows, used, x.tensor.shape[1], lambda row: (row.prompt, row.output))
        row, column = x.indices(index), x.indices(token)  # (N,), a pair may come often: the same value is written
        penalty = x.floats([row.params.repetition_penalty for row in rows])[row]  # (N,)
        value = x.tensor[row, column]  # (N,)
        x.own()[row, column] = torch.where(value > 0, value / penalty, value * penalty)


def _frequency_and_presence(x: _Editor, rows: Sequence[RowContext]) -> None:
    used = [
        i
        for i, row in enumerate(rows)
        if row.params.frequency_penalty != 0.0 or row.params.presence_penalty != 0.0
    ]
    if used:
        vocab = x.tensor.shape[1]
        index, token = _history(rows, used, vocab, lambda row: (row.output,))
        pair, count = np.unique(index * vocab + token, return_counts=True)  # both (N,)
        row, column = x.indices(pair // vocab), x.indices(pair % vocab)
        frequency = x.floats([row.params.frequency_penalty for row in rows])[row]  # (N,)
        presence = x.floats([row.params.presence_penalty for row in rows])[row]  # (N,)
        tensor = x.own()
        value = tensor[row, column] - frequency * x.indices(count)  # (N,)
        tensor[row, column] = value - presence


def _history(
    rows: Sequence[RowContext],
    used: Sequence[int],
    vocab: int,
    parts: Callable[[RowContext], tuple[Sequence[int], ...]],
) -> tuple[_Ids, _Ids]:
    """(row, token) of each history token of the rows in `used`, as two arrays (N,)."""
    # The rows of one sequence share its prompt, so it is converted once. The rows keep each part alive, so an id()
    # cannot name two of them.
    converted: dict[int, _Ids] = {}
    index, tokens = [], []
    for i in used:
        for part in parts(rows[i]):
            ids = converted.get(id(part))
            if ids is None:
                ids = np.asarray(part, dtype=np.int64)
                ids = converted[id(part)] = ids[(ids >= 0) & (ids < vocab)]
            index.append(np.full(len(ids), i, dtype=np.int64))
            tokens.append(ids)
    return np.concatenate(index), np.concatenate(tokens)
