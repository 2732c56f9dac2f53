"""Tokens drawn from logits by the native sampler: those of the torch implementation, whatever truncates the distribution."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ridgeline.native import _native
from ridgeline.native.head import NativeTopHead
from ridgeline.noise import again
from ridgeline.sampling import Candidates, RowContext, distribution, draw, inverse_cdf, sample
from ridgeline.sampling.candidates import candidates
from ridgeline.sampling_params import SamplingParams

torch.set_num_threads(1)

ISA = pytest.mark.parametrize("isa", _native.available())
SETTINGS = [dict(zip(("temperature", "top_k", "top_p", "min_p", "typical_p"), values)) for values in itertools.product(
    (1.0, 0.6), (0, 2, 70, 10**6), (1.0, 0.83, 0.31), (0.0, 0.07), (1.0, 0.77))]


def head_of(isa: str, threads: int = 2) -> NativeTopHead:
    engine = _native.Engine(isa, threads)
    matrix = engine.allocate("F32", 16, 32)
    return NativeTopHead(engine, _native.Linear(matrix, [], "float32"), matrix)


def context(seed: int, **fields: float) -> RowContext:
    return RowContext(SamplingParams(**fields), seed, 9, (), ())          # type: ignore[arg-type]


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(vocab)
    x = torch.randn(rows, vocab, generator=random)
    if kind == "sharp":
        return 4 * x
    if kind == "coarse":                                                # many ties
        return (2 * x).round()
    if kind == "masked":
        return torch.where(torch.rand(rows, vocab, generator=random) < 0.9, -torch.inf, 3 * x)
    return x


@ISA
@pytest.mark.parametrize("kind", ["flat", "sharp", "coarse", "masked"])
@pytest.mark.parametrize("vocab", [75, 512, 1300])
def test_the_tokens_are_those_of_the_torch_implementation(isa: str, kind: str, vocab: int) -> None:
    head = head_of(isa)
    rows = [context(i, **fields) for i, fields in enumerate(SETTINGS) for _ in range(2)]
    logits = logits_of(kind, len(rows), vocab)
    probs, differ = distribution(logits, rows), 0
    for u in np.linspace(0, 0.9999, 23):
        numbers = [(u + 0.0173 * i) % 1 for i in range(len(rows))]
        found, expected = head.draw(logits, rows, numbers), inverse_cdf(probs, numbers)
        assert (probs.gather(1, found[:, None]) > 0).all(), "a token that is cut off"
        differ += int((found != expected).sum())
    # Where two tokens meet, a last bit decides; typicalities of different tokens may agree up to rounding.
    assert differ <= (0.003 * 23 * len(rows) if kind == "coarse" else 2)


@ISA
def test_draws_follow_the_distribution(isa: str) -> None:
    head, vocab, draws = head_of(isa), 1100, 20_000
    logits = logits_of("sharp", 1, vocab) / 2
    for fields in ({}, {"temperature": 0.7, "top_p": 0.9}, {"min_p": 0.02}, {"typical_p": 0.8}, {"top_k": 100}):
        rows = [context(0, **fields)]
        random = np.random.default_rng(3)
        tokens = torch.cat([head.draw(logits, rows, [u]) for u in random.random(draws)])
        expected = distribution(logits, rows)[0].double() * draws
        seen = torch.bincount(tokens, minlength=vocab).double()
        assert (seen[expected == 0] == 0).all()
        often = expected >= 5
        chi = float(((seen - expected)[often] ** 2 / expected[often]).sum())
        freedom = int(often.sum())
        assert chi < freedom + 5 * (2 * freedom) ** 0.5, fields


@ISA
def test_rows_without_a_distribution(isa: str) -> None:
    head = head_of(isa)
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[0.0, nan, 1.0], [-inf, -inf, -inf], [nan, inf, 0.0], [-inf, 1.0, -inf], [0.0, inf, -inf],
                           [-inf, 3.0, -inf], [1.0, 2.0, 3.0]])
    for fields in ({}, {"top_p": 0.5}, {"typical_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}):
        rows = [context(i, **fields) for i in range(7)]
        u = [0.5] * 7
        found = head.draw(logits, rows, u).tolist()
        assert found == inverse_cdf(distribution(logits, rows), u).tolist()
        assert found[:6] == [-1, -1, -1, 1, 1, 1]
    tiny = [context(0, temperature=1e-42), context(1, temperature=1e-30, typical_p=0.5, top_p=0.5)]
    assert head.draw(torch.tensor([[1.0, 7.0, 3.0]] * 2), tiny, [0.99, 0.99]).tolist() == [1, 1]


def test_threads_and_batches_change_nothing() -> None:
    rows = [context(i, **SETTINGS[7 * i % len(SETTINGS)]) for i in range(32)]
    logits = logits_of("sharp", 32, 5000)
    u = [0.031 * i for i in range(32)]
    together = head_of("", 1).draw(logits, rows, u)
    for threads in (2, 3):
        head = head_of("", threads)
        assert torch.equal(head.draw(logits, rows, u), together)
        assert [head.draw(logits[i:i + 1], rows[i:i + 1], u[i:i + 1]).item() for i in range(32)] == together.tolist()
    whole, _ = sample(logits, rows, wide=head.draw)
    assert [sample(logits[i:i + 1], rows[i:i + 1], wide=head.draw)[0].item() for i in range(32)] == whole.tolist()


def test_bad_arguments_are_refused() -> None:
    engine = _native.Engine("", 1)
    x, tokens = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    one = (1.0, 0, 1.0, 0.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="one set of parameters for each of at least one row"):
        engine.sample(x.data_ptr(), 2, 8, [one], tokens.data_ptr())
    with pytest.raises(ValueError, match="temperature must be above 0"):
        engine.sample(x.data_ptr(), 1, 8, [(0.0, *one[1:])], tokens.data_ptr())


@pytest.mark.parametrize("kind", ["flat", "sharp", "coarse"])
@pytest.mark.parametrize("cut", [True, False])
def test_few_candidates_give_the_tokens_of_the_torch_implementation(kind: str, cut: bool) -> None:
    """cut=False: as many candidates as a model with a soft-cap has, more than top-k leaves."""
    head, vocab, differ = head_of("scalar"), 5000, 0
    fields = [dict(each, top_k=k) for each in SETTINGS if each["top_k"] == 2 for k in (1, 40, 64)]
    rows = [context(i, **each) for i, each in enumerate(fields)]
    logits = logits_of(kind, len(rows), vocab)
    found = candidates(logits, rows if cut else [context(0, top_k=64)] * len(rows))
    for u in np.linspace(0, 0.9999, 31):
        numbers = [(u + 0.0173 * i) % 1 for i in range(len(rows))]
        expected = draw(found, rows, numbers, cut=cut)
        own = head.draw_few(found, rows, numbers, cut=cut)
        differ += int((own != expected)[found.known].sum())
    assert found.known.any() and differ <= 3


def test_few_candidates_with_nothing_to_draw() -> None:
    ids, scores = torch.full((3, 128), -1), torch.full((3, 128), -torch.inf)
    ids[1:, 0], scores[1, 0], scores[2, 0] = 7, torch.inf, torch.nan
    rows = [context(0, top_k=3)] * 3
    found = head_of("scalar").draw_few(Candidates(ids, scores, torch.zeros(3, dtype=torch.bool)), rows, [0.5] * 3)
    assert (found < 0).all()


def test_the_second_number_is_that_of_the_noise_module() -> None:
    """Of 64 equally likely candidates in one block, the place is the second number times 64."""
    count = 64
    ids, scores = torch.full((1, 128), -1), torch.full((1, 128), -torch.inf)
    ids[0, :count], scores[0, :count] = torch.arange(count), 0.0
    found, head = Candidates(ids, scores, torch.ones(1, dtype=torch.bool)), head_of("scalar")
    for u in np.random.default_rng(0).random(50):
        assert head.draw_few(found, [context(0, top_k=64)], [float(u)]).item() == int(again(float(u)) * count)
