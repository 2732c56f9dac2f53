"""Sampled speculation follows the target's distribution: 20,000 outputs against the exact joint probabilities."""
from __future__ import annotations

import itertools
import math

import pytest
import torch

from engine_kit import Rig, logits, model
from ridgeline.decoding import verify
from ridgeline.decoding.draft_model import DraftModel

VOCAB, LENGTH, DRAWS = 5, 3, 20_000
PROMPT = [3, 1, 4]
TEMPERATURE = 0.8


def target():
    return model("softmax", vocab=VOCAB, seed=2, sharpness=1.2)


def draft():
    return model("softmax", vocab=VOCAB, seed=5, sharpness=1.2)


def joint() -> dict[tuple[int, ...], float]:
    """Probability of every continuation of LENGTH tokens, from forward passes without a cache."""
    out = {(): 1.0}
    for _ in range(LENGTH):
        following = {}
        for tokens, probability in out.items():
            p = (logits(target(), [*PROMPT, *tokens])[-1] / TEMPERATURE).softmax(-1).tolist()
            following.update({(*tokens, t): probability * p[t] for t in range(VOCAB)})
        out = following
    return out


def draws(count: int = DRAWS) -> tuple[dict[tuple[int, ...], int], Rig]:
    """How often each continuation comes out of the engine, one request a seed."""
    rig = Rig({"target": target(), "draft": draft()}, {"draft_model": DraftModel(k=2)}, vocab=VOCAB, pages=2100,
              page_size=8, max_num_seqs=2000, max_num_batched_tokens=8000, max_model_len=len(PROMPT) + LENGTH)
    for seed in range(count):
        rig.add(str(seed), PROMPT, temperature=TEMPERATURE, seed=seed, max_tokens=LENGTH)
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0)
    while rig.engine.has_work:
        for out in rig.engine.step():                   # without the integrity walk over 2000 live sequences
            rig.answers.setdefault((out.request_id, 0), []).extend(out.new_tokens)
    rig.check_empty()
    for tokens in rig.answers.values():
        counts[tuple(tokens)] += 1
    return counts, rig


def chi_square(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """(statistic, degrees of freedom); continuations expected fewer than five times share one cell."""
    total = sum(counts.values())
    cells = [(counts[t], p * total) for t, p in expected.items() if p * total >= 5]
    rest = [(counts[t], p * total) for t, p in expected.items() if p * total < 5]
    if rest:
        cells.append((sum(n for n, _ in rest), sum(e for _, e in rest)))
    return sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square >= statistic): the regularised upper incomplete gamma function."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_the_draws_follow_the_target() -> None:
    expected = joint()
    assert math.isclose(sum(expected.values()), 1.0)
    counts, rig = draws()
    stats = rig.engine.stats
    assert 0.2 < stats.accepted_tokens / stats.draft_tokens < 0.9, stats       # both branches are taken, and often
    statistic, freedom = chi_square(counts, expected)
    assert freedom > 40
    assert tail(statistic, freedom) > 1e-3, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("fault", ["residual is p", "q in place of p", "every draft is accepted"])
def test_a_wrong_verifier_fails_the_same_test(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test has the power to see the classical mistakes; an eighth of the draws is enough."""
    if fault == "residual is p":
        monkeypatch.setattr(verify, "_NO_MASS", math.inf)                # "no residual": p itself takes its place
    elif fault == "q in place of p":
        plain = verify.VerifyRequest

        def request(**fields):
            return plain(**{**fields, "rule": lambda p, q: q}) if fields.get("q") else plain(**fields)
        monkeypatch.setattr("ridgeline.runner.VerifyRequest", request)
    else:
        plain = verify.VerifyRequest

        def request(**fields):
            return plain(**{**fields, "accept_u": [0.0] * len(fields["tokens"])} if fields.get("q") else fields)
        monkeypatch.setattr("ridgeline.runner.VerifyRequest", request)
    counts, _ = draws(DRAWS // 8)
    assert tail(*chi_square(counts, joint())) < 1e-6


def test_the_test_statistic() -> None:
    """Tabulated quantiles of the chi-square distribution."""
    assert tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert tail(124.342, 100) == pytest.approx(0.05, abs=1e-4)
