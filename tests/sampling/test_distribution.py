from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle_sampling import distribution_row
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ridgeline.noise import Purpose, again, uniform
from ridgeline.sampling import RowContext, distribution, inverse_cdf, sample
from ridgeline.sampling.distribution import _mass_threshold
from ridgeline.sampling_params import SamplingParams

INF = math.inf


def context(seed: int = 0, position: int = 0, **fields: object) -> RowContext:
    return RowContext(SamplingParams(**fields), seed, position, [], [])


def random_contexts(count: int) -> list[RowContext]:
    """All combinations of settings, greedy and plain rows among them."""
    generator = torch.Generator().manual_seed(count)

    def pick(*options: float) -> float:
        return options[int(torch.randint(len(options), (), generator=generator))]

    return [
        context(
            seed=i, position=7 * i, temperature=pick(0, 0.3, 1, 1, 1.7), top_k=int(pick(0, 0, 1, 3, 20, 10**6)),
            top_p=pick(1, 1, 0.3, 0.8, 0.999), min_p=pick(0, 0, 0.05, 0.5), typical_p=pick(1, 1, 0.4, 0.95),
        )
        for i in range(count)
    ]  # fmt: skip


# The values are 1/4 apart at least and mass limits uneven, so that rounding decides nothing.
grid = st.integers(-40, 40).map(lambda v: v / 4)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.one_of(grid, st.just(-INF)), min_size=9, max_size=9), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, 9, 100]),
    st.sampled_from([1.0, 0.2137, 0.6713, 0.9377]),
    st.sampled_from([0.0, 0.0371, 0.3331]),
    st.sampled_from([1.0, 0.3137, 0.9173]),
)
def test_against_the_plain_definition(logits, temperature, top_k, top_p, min_p, typical_p) -> None:
    assume(all(max(row) > -INF for row in logits))
    one = context(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    rows = [one, context(), context(temperature=0.0), context(top_p=0.4)][: len(logits)]
    probs = distribution(torch.tensor(logits), rows)
    for got, values, row in zip(probs, logits, rows):
        if typical_p < 1:  # scores of different tokens may agree up to rounding: their order is then open
            expected = distribution_row(values, row)
            near = [distribution_row([v * s for v in values], row) for s in (1 - 1e-6, 1 + 1e-6)]
            assume(all(torch.allclose(torch.tensor(n), torch.tensor(expected), atol=1e-4) for n in near))
        torch.testing.assert_close(got, torch.tensor(distribution_row(values, row)), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("vocab", [37, 512, 1300, 5000])
def test_each_row_is_bitwise_the_same_alone(vocab: int) -> None:
    torch.manual_seed(vocab)
    rows = random_contexts(40)
    logits = torch.randn(40, vocab) * torch.linspace(0.05, 8, 40)[:, None]
    logits[5, 3] = INF
    logits[6, 5:] = -INF
    probs = distribution(logits, rows)
    tokens, kept = sample(logits, rows, keep_probs=True)
    assert torch.equal(kept, probs)
    assert torch.equal(sample(logits, rows)[0], tokens)
    for i, row in enumerate(rows):
        assert torch.equal(distribution(logits[i : i + 1], [row])[0], probs[i]), row.params
        assert sample(logits[i : i + 1], [row])[0].item() == tokens[i]
    torch.testing.assert_close(probs.sum(-1), torch.ones(40))
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    # and in another order
    order = torch.randperm(40)
    assert torch.equal(distribution(logits[order], [rows[i] for i in order]), probs[order])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_wide_row_is_bitwise_the_same_alone_on_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        logits = torch.randn(3, 262_144)
        rows = [context(seed=1, typical_p=0.9), context(seed=2, top_p=0.9), context(seed=3, temperature=0.7)]
        tokens, probs = sample(logits, rows, keep_probs=True)
        for i, row in enumerate(rows):
            alone, own = sample(logits[i : i + 1], [row], keep_probs=True)
            assert torch.equal(own[0], probs[i]) and alone[0] == tokens[i]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("temperature", [0.3, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.95])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("typical_p", [1.0, 0.2, 0.9])
def test_against_transformers(temperature, top_k, top_p, min_p, typical_p) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 500) * torch.tensor([0.2, 0.5, 1, 2, 4, 8])[:, None]
    row = context(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    x = TemperatureLogitsWarper(temperature)(None, logits.double())  # double: rounding decides no token
    if top_k:
        x = TopKLogitsWarper(top_k)(None, x)
    if top_p < 1:
        x = TopPLogitsWarper(top_p)(None, x)
    if min_p:
        x = MinPLogitsWarper(min_p)(None, x)
    if typical_p < 1:
        x = TypicalLogitsWarper(typical_p)(None, x)
    expected = torch.softmax(x, -1)
    got = distribution(logits, [row] * 6).double()
    # In float32 the last token of a nucleus may fall on the other side: its own probability differs, no more.
    other = (got > 1e-30) != (expected > 1e-30)
    assert other.sum(-1).max() <= 1 and other.sum() <= 2
    assert ((got - expected).abs().sum(-1) <= 3 * (torch.maximum(got, expected) * other).sum(-1) + 1e-5).all()


def test_candidates_grow_until_the_mass_is_reached() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 9000) * torch.tensor([5.0, 0.5, 0.01, 1.0])[:, None]
    probs = torch.softmax(x, -1)
    mass = [0.9, 0.5, 0.99, 0.999999]
    got = _mass_threshold(x, probs, mass)
    for i in range(4):
        ordered, ids = x[i].sort(descending=True)
        reached = probs[i][ids].cumsum(0, dtype=torch.float64) >= mass[i]
        assert got[i, 0] == ordered[reached.int().argmax()]


def test_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [1.0, 3.0, 3.0, 0.0], [1.0, 3.0, 3.0, 0.0]])
    rows = [context(temperature=0), context(top_k=1), context(top_p=0.01)]
    assert distribution(logits, rows).tolist() == [[0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0]]
    assert sample(logits, [context(temperature=0)] * 3)[0].tolist() == [1, 1, 1]


def test_extreme_logits() -> None:
    nan = math.nan
    logits = torch.tensor(
        [
            [INF, 0, INF, 1],
            [-INF, -INF, 2, -INF],
            [-INF] * 4,
            [0, nan, 1, 2],
            [3e38, -3e38, 0, -INF],
            [INF, nan, 0, 0],
        ]
    )
    expected = torch.tensor([[0.5, 0, 0.5, 0], [0, 0, 1, 0], [0] * 4, [0] * 4, [1, 0, 0, 0], [0] * 4])
    for fields in ({}, {"temperature": 1e-30}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}, {"typical_p": 0.9}):
        rows = [context(seed=i, **fields) for i in range(6)]
        tokens, probs = sample(logits, rows, keep_probs=True)
        assert torch.equal(probs, expected), fields
        assert tokens.tolist()[1:] == [2, -1, -1, 0, -1] and tokens[0] in (0, 2)
    greedy = [context(temperature=0)] * 6
    tokens, probs = sample(logits, greedy, keep_probs=True)
    assert tokens.tolist() == sample(logits, greedy)[0].tolist() == [0, 2, -1, -1, 0, -1]
    assert probs.sum(-1).tolist() == [1, 1, 0, 0, 1, 0]


def test_a_tiny_temperature_is_greedy_and_not_overflow() -> None:
    probs = distribution(torch.tensor([[10.0, 300.0, 299.0]]), [context(temperature=1e-38)])
    assert probs.tolist() == [[0, 1, 0]]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 1600), st.integers(0, 10**9), st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)))
def test_inverse_cdf(size: int, seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(3, size, generator=generator, dtype=torch.float64)
    weights *= torch.rand(3, size, generator=generator) < 0.1
    weights = (weights * 2.0 ** torch.randint(-40, 3, (3, size), generator=generator)).float()
    weights[2] = 0
    got = inverse_cdf(weights, [u, 0.0, u]).tolist()
    for token, row, number in zip(got[:2], weights, (u, 0.0)):
        if row.sum() == 0:
            assert token == -1
            continue
        assert row[token] > 0
        # u chooses the block of 512, and a second number made from u the token inside it.
        first = token // 512 * 512
        for values, index, draw in ((row.split(512), token // 512, number),
                                    (row[first:first + 512], token - first, again(number))):
            sums = [math.fsum(v.reshape(-1).tolist()) for v in values]
            total, below = math.fsum(sums), math.fsum(sums[:index])
            assert below <= draw * total * (1 + 1e-12) and below + sums[index] >= draw * total * (1 - 1e-12)
    assert got[2] == -1


def test_ends_of_the_unit_interval() -> None:
    weights = torch.zeros(2, 1100)
    weights[:, 600:1000] = torch.rand(400) + 1e-3
    assert all(600 <= token < 1000 for token in inverse_cdf(weights, [0.0, 1 - 2**-53]).tolist())


def test_rounding_of_logits_hardly_changes_draws() -> None:
    """What a batch of another shape does to fp32 logits may change a draw, but not at each of 262,144 boundaries."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 262144, generator=generator) * 2
    noisy = logits + 4e-5 * torch.randn(8, 262144, generator=generator)
    changed = 0
    for seed in range(40):
        draws = [[uniform(seed, i, Purpose.SAMPLE) for i in range(8)]] * 2
        a, b = (inverse_cdf(torch.softmax(x, -1), d).tolist() for x, d in zip((logits, noisy), draws))
        changed += sum(x != y for x, y in zip(a, b))
    assert changed <= 1, f"{changed} of 320 draws changed"


def test_samples_follow_the_distribution() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 60) * 3
    draws = 20_000
    for fields in ({}, {"temperature": 0.7, "top_p": 0.8}):
        rows = [context(seed=5, position=i, **fields) for i in range(draws)]
        expected = distribution(logits, rows[:1])[0].double() * draws
        tokens, _ = sample(logits.expand(draws, -1), rows)
        counts = torch.bincount(tokens, minlength=60).double()
        assert counts[expected == 0].sum() == 0
        big = expected >= 5
        e = torch.cat([expected[big], expected[~big].sum()[None]])
        o = torch.cat([counts[big], counts[~big].sum()[None]])
        e, o = e[e > 0], o[e > 0]
        statistic = ((o - e) ** 2 / e).sum()
        assert torch.special.gammaincc(torch.tensor((len(e) - 1) / 2.0).double(), statistic / 2) > 1e-4
