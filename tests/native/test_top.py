"""The k best rows of a head without its products: exactly what the whole products say, and the same tokens drawn from it."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from native_kit import quantised

from ridgeline.native import _native
from ridgeline.native.head import NativeHead, NativeTopHead, Pruning
from ridgeline.noise import Purpose
from ridgeline.sampling import CAPACITY, RowContext, process, sample
from ridgeline.sampling_params import SamplingParams
from ridgeline.top_tokens import top_tokens

torch.set_num_threads(1)

ISA = pytest.mark.parametrize("isa", _native.available())
BROKEN, TIED = -1, -2


def head_of(isa: str, rows: int, cols: int, *, split: bool = True, threads: int = 3, kind: str = "Q8_0",
            seed: int = 0) -> tuple[NativeTopHead, NativeHead]:
    engine = _native.Engine(isa, threads)
    matrix = engine.pack(kind, quantised(kind, rows, cols, seed), cols, False, split and engine.prunes and kind == "Q8_0")
    linear = _native.Linear(matrix, [], "int8")
    head = NativeTopHead(engine, linear, matrix)
    return head, NativeHead(engine, linear, matrix)


def expected(scores: list[float], k: int, touched: set[int]) -> list[tuple[int, float]]:
    """Ids and scores by ascending id: those at least as large as the k-th of the untouched ones."""
    rest = [(i, s) for i, s in enumerate(scores) if i not in touched]
    if k == 0 or not rest:
        return []
    least = sorted((s for _, s in rest), reverse=True)[min(k, len(rest)) - 1]
    return [(i, s) for i, s in rest if s >= least]


@ISA
@pytest.mark.parametrize(("rows", "cols", "kind", "split"), [
    (1, 32, "Q8_0", True), (17, 64, "Q8_0", True), (1000, 640, "Q8_0", True), (4099, 256, "Q8_0", True),
    (1000, 640, "Q8_0", False), (515, 256, "Q4_K", False)])
def test_the_best_rows_are_those_of_the_products(isa: str, rows: int, cols: int, kind: str, split: bool) -> None:
    head, whole = head_of(isa, rows, cols, split=split, kind=kind)
    random = np.random.default_rng(rows)
    x = torch.randn(7, cols, generator=torch.Generator().manual_seed(1))
    x[2] = x[2].sign() * 0.25                                          # a few scores tie
    scores = whole(x)
    for m in (1, 2, 4, 7):
        for k in ([1] * m, [64] * m, [int(n) for n in random.integers(0, 80, m)], [0] * m):
            touched = [np.unique(random.integers(0, rows, int(random.choice([0, 1, 9, rows])))) for _ in range(m)]
            offsets = np.cumsum([0, *map(len, touched)])
            ids, values, apart, counts = head.top(x[:m], k, offsets, np.concatenate(touched), CAPACITY)
            assert torch.equal(apart, torch.cat([scores[r, list(t)] for r, t in enumerate(touched)]))
            for r in range(m):
                found = expected(scores[r].tolist(), k[r], set(touched[r].tolist()))
                assert len(found) <= CAPACITY and counts[r] == len(found), (m, k, r)
                assert list(zip(ids[r, :len(found)].tolist(), values[r, :len(found)].tolist())) == found
                assert (ids[r, len(found):] == -1).all() and (values[r, len(found):] == -torch.inf).all()


@ISA
def test_rows_that_tie_or_are_broken_are_reported(isa: str) -> None:
    head, _ = head_of(isa, 1000, 64)
    none, x = np.empty(0, dtype=np.int64), torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[1], x[2, 40], x[3, 3] = 0, torch.nan, torch.inf
    for pruned in (4, 0):
        head.MOST_PRUNED = pruned
        counts = head.top(x, [5, 5, 5, 5], np.zeros(5, dtype=np.int64), none, CAPACITY)[3]
        assert counts.tolist() == [5, TIED, BROKEN, BROKEN]
        # Only the touched rows of a broken product: they are no numbers either.
        counts = head.top(x, [0] * 4, np.arange(5), np.arange(4), CAPACITY)[3]
        assert counts.tolist() == [0, 0, BROKEN, BROKEN]


@ISA
def test_ties_are_kept_up_to_the_capacity(isa: str) -> None:
    """A hundred equal rows of weights, of which the best 3 are wanted: all hundred come back."""
    engine = _native.Engine(isa, 2)
    raw = quantised("Q8_0", 2000, 64, 0)
    raw[500:600] = raw[500]
    matrix = engine.pack("Q8_0", raw, 64, False, engine.prunes)
    head = NativeTopHead(engine, _native.Linear(matrix, [], "int8"), matrix)
    values = torch.empty(1, 64)
    one = torch.tensor([500])
    engine.lookup(matrix, one.data_ptr(), 1, values.data_ptr())
    for pruned in (4, 0):
        head.MOST_PRUNED = pruned
        ids, scores, _, counts = head.top(values, [3], np.zeros(2, dtype=np.int64), np.empty(0, dtype=np.int64), CAPACITY)
        assert counts.tolist() == [100] and ids[0, :100].tolist() == list(range(500, 600))
        assert len(set(scores[0, :100].tolist())) == 1


def test_bad_queries_are_refused() -> None:
    head, _ = head_of("", 100, 64)
    x = torch.randn(1, 64)
    for k, touched, capacity, message in (
            ([81], [], 128, "k is 81; it must be 0 to 80"), ([-1], [], 128, "k is -1"), ([1], [3, 3], 128, "3 follows 3"),
            ([1], [5, 2], 128, "2 follows 5"), ([1], [100], 128, "within 0 to 99, but 100 follows -1"),
            ([1], [-1], 128, "-1 follows -1"), ([1], [], 79, "room for at least 80")):
        with pytest.raises(ValueError, match=message):
            head.top(x, k, np.array([0, len(touched)]), np.array(touched, dtype=np.int64), capacity)


CAP = 4.0
VOCAB = 700
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 0.0, "logit_bias": {3: 5.0, 650: -2.0}},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5}, {"temperature": 0.0}, {"top_k": 1},
    {"top_k": 64}, {"top_k": 5, "temperature": 0.3}, {"top_k": 40, "top_p": 0.8}, {"top_k": 64, "min_p": 0.1},
    {"top_k": 30, "typical_p": 0.7}, {"top_k": 20, "repetition_penalty": 0.7, "logit_bias": {9: 1.0}},
    {"top_k": 10, "min_tokens": 50, "max_tokens": 90, "stop_token_ids": [4, 8, 600]},
    {"top_k": 10, "bad_words_token_ids": [[9, 30], [31], [1, 2]]},
    {"top_k": 6, "allowed_token_ids": [9, 30, 31, 400, 401, 402, 699], "logit_bias": {9: 2.0, 10: 50.0}},
    {"temperature": 0.0, "allowed_token_ids": [5, 6, 699], "repetition_penalty": 2.0},
]


def contexts(count: int) -> list[RowContext]:
    random = np.random.default_rng(5)
    return [RowContext(SamplingParams(**PARAMS[i % len(PARAMS)]), i, 100 + i, random.integers(0, VOCAB, 60).tolist(),
                       [*random.integers(-1, VOCAB, 30).tolist(), 9], (2, 7)) for i in range(count)]


@ISA
@pytest.mark.parametrize("capped", [False, True])
def test_the_same_tokens_as_from_all_logits(isa: str, capped: bool) -> None:
    """Alone and in a batch, read by halves and whole, and as drawn from processed logits."""
    head, whole = head_of(isa, VOCAB, 96, seed=3)
    model: Any = SimpleNamespace(top_head=head, config=SimpleNamespace(vocab_size=VOCAB), capped=capped,
                                 cap=(lambda x: torch.tanh(x / CAP) * CAP) if capped else (lambda x: x))
    rows = contexts(45)
    hidden = torch.randn(len(rows), 96, generator=torch.Generator().manual_seed(2)) * 0.1
    u = [row.uniform(Purpose.SAMPLE) for row in rows]
    logits = model.cap(whole(hidden))
    tokens = sample(process(logits, rows), rows)[0].tolist()
    assert len(set(tokens)) > 20
    assert top_tokens(model, hidden, rows, u) == tokens
    for most in (4, 0):
        head.MOST_PRUNED = most
        alone = [top_tokens(model, hidden[i:i + 1], rows[i:i + 1], u[i:i + 1])[0] for i in range(len(rows))]
        assert alone == tokens


def test_a_soft_cap_that_rounds_the_best_together_leaves_them_to_all_logits() -> None:
    head, whole = head_of("", VOCAB, 96)
    model: Any = SimpleNamespace(top_head=head, config=SimpleNamespace(vocab_size=VOCAB), capped=True,
                                 cap=lambda x: torch.tanh(x / 1e-3))
    hidden = torch.randn(2, 96, generator=torch.Generator().manual_seed(2))
    rows = [RowContext(SamplingParams(temperature=0.0), 0, 1, (), ()), RowContext(SamplingParams(top_k=3), 0, 1, (), ())]
    assert top_tokens(model, hidden, rows, [0.5, 0.5]) == [None, None]
    assert (model.cap(whole(hidden)) == 1).sum(1).min() > 20


def test_what_no_few_logits_can_tell_is_left_to_all_of_them() -> None:
    head, _ = head_of("", VOCAB, 96)
    model: Any = SimpleNamespace(top_head=head, config=SimpleNamespace(vocab_size=VOCAB), capped=False, cap=lambda x: x)
    params = [SamplingParams(top_k=3), SamplingParams(top_k=3), SamplingParams(temperature=0.0, logit_bias={3: 1.0}),
              SamplingParams(temperature=0.0, allowed_token_ids=[4], bad_words_token_ids=[[4, 3], [3]])]
    rows = [RowContext(p, 0, 1, (), ()) for p in params]
    hidden = torch.randn(4, 96, generator=torch.Generator().manual_seed(2))
    hidden[0], hidden[1, 0] = 0, torch.nan                             # all scores tie; none is a number
    found = top_tokens(model, hidden, rows, [0.5] * 4)
    assert found[:2] == [None, None] and found[2] is not None and found[3] == 4


def test_pruning_stops_where_it_does_not_pay_and_is_tried_again_ever_more_rarely() -> None:
    judge, tries = Pruning(0.2), []
    for i in range(200):
        if judge.wanted():
            tries.append(i)
            judge.saw(0.98)
    assert tries == [0, 17, 50, 115]
    judge = Pruning(0.2)
    for share in (0.01, 0.9, 0.02, 0.01):                              # one difficult token changes nothing
        assert judge.wanted()
        judge.saw(share)
    for _ in range(20):
        judge.saw(0.9)
    assert not judge.wanted()


@pytest.mark.parametrize("isa", [isa for isa in _native.available() if _native.Engine(isa, 1).prunes])
def test_a_head_whose_rows_are_all_alike_is_read_whole(isa: str) -> None:
    """Rows that differ by their low bits only leave doubt everywhere: the first pass finds out, and the tokens are the same."""
    engine = _native.Engine(isa, 2)
    raw = quantised("Q8_0", 4000, 64, 0)
    raw[:] = raw[0]
    raw[:, 2::34] ^= np.random.default_rng(0).integers(0, 4, (4000, 2), dtype=np.uint8)
    matrix = engine.pack("Q8_0", raw, 64, False, True)
    linear = _native.Linear(matrix, [], "int8")
    head, whole = NativeTopHead(engine, linear, matrix), NativeHead(engine, linear, matrix)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    tokens = [head.argmax(x[i:i + 1]).item() for i in range(6)]
    assert tokens == [row.index(max(row)) for row in whole(x).tolist()]
    assert head.rows.total == 6 * 4000 and head.rows.scored > 0.9 * head.rows.total and not head.rows.pruning
