from __future__ import annotations

import array
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_sampling import process_row
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from ridgeline.sampling import RowContext, process
from ridgeline.sampling_params import SamplingParams

VOCAB = 12
token = st.integers(0, VOCAB - 1)
history = st.lists(st.integers(-1, VOCAB), max_size=8)  # placeholders outside the vocabulary too
logit = st.one_of(st.floats(-20, 20, width=32), st.just(-math.inf), st.just(0.0))


def context(params: SamplingParams, prompt=(), output=(), eos=()) -> RowContext:
    return RowContext(params, 0, len(prompt) + len(output), prompt, output, eos)


@st.composite
def contexts(draw: st.DrawFn) -> RowContext:
    def maybe(strategy: st.SearchStrategy, off: object) -> object:
        return draw(strategy) if draw(st.booleans()) else off

    params = SamplingParams(
        # Four different ids at least, so that two stop tokens never contradict it.
        allowed_token_ids=maybe(st.lists(token, min_size=4, max_size=9, unique=True), None),
        bad_words_token_ids=maybe(st.lists(st.lists(token, min_size=2, max_size=3), max_size=6), ()),
        stop_token_ids=maybe(st.lists(token, max_size=2), ()),
        min_tokens=maybe(st.integers(0, 9), 0),
        max_tokens=None,
        ignore_eos=draw(st.booleans()),
        logit_bias=maybe(st.dictionaries(token, st.floats(-5, 5, width=32), max_size=4), None),
        repetition_penalty=maybe(st.floats(0.5, 2, width=32), 1.0),
        frequency_penalty=maybe(st.floats(-2, 2, width=32), 0.0),
        presence_penalty=maybe(st.floats(-2, 2, width=32), 0.0),
    ) if draw(st.booleans()) else SamplingParams()  # fmt: skip
    return context(params, draw(history), draw(history), draw(st.lists(token, max_size=2)))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[RowContext]]:
    rows = draw(st.lists(contexts(), min_size=1, max_size=5))
    logits = [draw(st.lists(logit, min_size=VOCAB, max_size=VOCAB)) for _ in rows]
    return torch.tensor(logits), rows


@settings(deadline=None, max_examples=300)
@given(batches())
def test_against_the_plain_definition_and_alone(batch: tuple[torch.Tensor, list[RowContext]]) -> None:
    logits, rows = batch
    before = logits.clone()
    out = process(logits, rows)
    assert torch.equal(logits, before)
    for i, row in enumerate(rows):
        assert out[i].tolist() == process_row(logits[i].tolist(), row)
        assert torch.equal(process(logits[i : i + 1], [row])[0], out[i])
    assert torch.equal(process(before, rows, inplace=True), out)
    if out is not logits:
        assert torch.equal(before, out)


def test_nothing_to_do_returns_the_input_itself() -> None:
    logits = torch.randn(3, VOCAB)
    plain = context(SamplingParams(temperature=0.3, top_k=4), [1, 2], [3])
    late = context(SamplingParams(min_tokens=1, bad_words_token_ids=[[4, 5]]), [4], [3], [7])
    assert process(logits, [plain, plain, late]) is logits


def test_low_precision_logits_become_float32() -> None:
    logits = torch.randn(1, VOCAB).bfloat16()
    out = process(logits, [context(SamplingParams(logit_bias={1: 0.001}))])
    expected = logits.float()
    expected[0, 1] += 0.001
    assert out.dtype == torch.float32 and torch.equal(out, expected)


@pytest.mark.parametrize("convert", [list, tuple, np.array, lambda ids: array.array("q", ids)])
def test_histories_of_any_sequence_type(convert) -> None:
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25, bad_words_token_ids=[[3, 3, 1]]
    )
    logits = torch.randn(1, VOCAB)
    row = context(params, convert([1, 2]), convert([3, 3]))
    expected = process_row(logits[0].tolist(), context(params, [1, 2], [3, 3]))
    assert process(logits, [row])[0].tolist() == expected
    empty = context(params, convert([]), convert([]))
    assert torch.equal(process(logits, [empty]), logits)


def test_drafts_in_the_history_count() -> None:
    """Verification rows of one sequence: row i sees the committed output and the drafts before it."""
    params = SamplingParams(min_tokens=3, frequency_penalty=1.0)
    committed, drafts = [4, 5], [4, 6]
    rows = [context(params, [9], committed + drafts[:i], eos=[0]) for i in range(3)]
    out = process(torch.zeros(3, VOCAB), rows)
    assert out[:, 0].tolist() == [-math.inf, 0.0, 0.0]
    assert out[:, 4].tolist() == [-1.0, -2.0, -2.0]
    assert out[:, 6].tolist() == [0.0, 0.0, -1.0]


def test_against_transformers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    ids = torch.randint(0, 50, (4, 9))
    params = SamplingParams(repetition_penalty=1.7)
    rows = [context(params, row[:5].tolist(), row[5:].tolist()) for row in ids]
    assert torch.equal(process(logits, rows), RepetitionPenaltyLogitsProcessor(1.7)(ids, logits))
    words = [[7], [*ids[0, -1:].tolist(), 3], [*ids[1, -2:].tolist(), 4], [1, 2, 3]]
    rows = [context(SamplingParams(bad_words_token_ids=words), [], row.tolist()) for row in ids]
    assert torch.equal(process(logits, rows), NoBadWordsLogitsProcessor(words)(ids, logits))
