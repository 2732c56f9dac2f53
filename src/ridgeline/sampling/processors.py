"""Masks, bias and penalties: from the model's logits to the logits that are sampled from.

The order is vLLM's: allowed ids, bad words, min_tokens, bias, then repetition, frequency and presence penalty. Each but the
first is an `Edit`, a list of logits and what becomes of them, so that it can be made on the few logits that it touches as
well as on all. A feature that no row uses costs nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ridgeline.sampling.context import RowContext

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Edit:
    """Some logits (row[i], token[i]) and what becomes of their values: both (N,), change: (N,) -> (N,). Where a pair comes
    more than once, all of its entries change alike."""

    row: _Ids
    token: _Ids
    change: Callable[[Tensor], Tensor]


def process(logits: Tensor, rows: Sequence[RowContext], *, inplace: bool = False) -> Tensor:
    """Logits (R, V) of the model -> float32 logits (R, V) after masks, bias and penalties, row i by `rows[i]`.

    A masked token has -inf. `logits` is returned itself if nothing changes; otherwise a copy is changed, or `logits`
    itself with `inplace` (and float32). Bad words are looked for in the output only; a word half written by the prompt
    can be completed, as in vLLM. min_tokens masks the stop token ids and, unless `ignore_eos`, the eos ids.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(rows), "one context per row of logits"
    x = logits.float()
    changes = edits(rows, logits.shape[1])
    allowed = [(i, list(ids)) for i, row in enumerate(rows) if (ids := row.params.allowed_token_ids) is not None]
    if not inplace and (changes or allowed):
        x = x.clone()
    for i, ids in allowed:
        kept = x[i, ids]  # (N,)
        x[i] = -torch.inf
        x[i, ids] = kept
    for edit in changes:
        row, token = (torch.from_numpy(index).to(x.device) for index in (edit.row, edit.token))  # (N,)
        x[row, token] = edit.change(x[row, token])
    return x


def edits(rows: Sequence[RowContext], vocab: int) -> list[Edit]:
    """What `process` does besides allowed ids, in order."""
    found = (_mask(_bad_words(rows)), _mask(_too_early_stops(rows)), _bias(rows), _repetition(rows, vocab),
             _frequency_and_presence(rows, vocab))
    return [edit for edit in found if edit is not None]


def _mask(pairs: Iterable[tuple[int, int]]) -> Edit | None:
    """-inf at the given (row, token)."""
    flat = list(pairs)
    if not flat:
        return None
    row, token = np.asarray(flat, dtype=np.int64).T  # (2, N) -> twice (N,)
    return Edit(row.copy(), token.copy(), lambda value: torch.full_like(value, -torch.inf))


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


def _bias(rows: Sequence[RowContext]) -> Edit | None:
    entries = [
        (i, token, bias)
        for i, row in enumerate(rows)
        if row.params.logit_bias
        for token, bias in row.params.logit_bias.items()
    ]
    if not entries:
        return None
    row, token, bias = zip(*entries)  # (N,), each (row, token) once
    return Edit(_ids(row), _ids(token), lambda value: value + _like(bias, value))


def _repetition(rows: Sequence[RowContext], vocab: int) -> Edit | None:
    used = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if not used:
        return None
    row, token = _history(rows, used, vocab, lambda row: (row.prompt, row.output))  # (N,)
    factor = np.asarray([r.params.repetition_penalty for r in rows])[row]  # (N,)

    def change(value: Tensor) -> Tensor:
        penalty = _like(factor, value)
        return torch.where(value > 0, value / penalty, value * penalty)

    return Edit(row, token, change)


def _frequency_and_presence(rows: Sequence[RowContext], vocab: int) -> Edit | None:
    used = [
        i
        for i, row in enumerate(rows)
        if row.params.frequency_penalty != 0.0 or row.params.presence_penalty != 0.0
    ]
    if not used:
        return None
    index, token = _history(rows, used, vocab, lambda row: (row.output,))
    pair, count = np.unique(index * vocab + token, return_counts=True)  # both (N,)
    row = pair // vocab
    frequency, presence = (np.asarray([getattr(r.params, f"{name}_penalty") for r in rows])[row]  # (N,)
                           for name in ("frequency", "presence"))

    def change(value: Tensor) -> Tensor:
        return value - _like(frequency, value) * _like(count, value) - _like(presence, value)

    return Edit(row, pair % vocab, change)


def _ids(values: Sequence[int]) -> _Ids:
    return np.asarray(values, dtype=np.int64)


def _like(values: Sequence[float] | npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=like.dtype, device=like.device)


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
