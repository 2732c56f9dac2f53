from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from ridgeline.decoding import verify
from ridgeline.decoding.verify import (
    RULES,
    Verdict,
    VerifyRequest,
    resolve_rule,
    verify_batch,
    verify_sampled_chain,
    verify_sampled_tree,
    verify_tree_exact,
)
from ridgeline.errors import ConfigError
from ridgeline.noise import Purpose, uniform
from ridgeline.sampling import RowContext, inverse_cdf, sample
from ridgeline.sampling_params import SamplingParams

VOCAB = 5
DRAWS = 20_000
LIMIT = 1e-4  # p-value below which a distribution counts as wrong

Verifier = Callable[[Sequence[VerifyRequest]], list[Verdict]]


class Markov:
    """A language model whose next-token distribution depends on the last token alone: exact sequence probabilities."""

    def __init__(self, seed: int, zeros: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        if zeros:  # truncation leaves tokens of probability 0
            logits[torch.rand(VOCAB, VOCAB, generator=generator) < 0.3] = -torch.inf
            logits[:, 0] = 0.5
        self.table = torch.softmax(logits, -1)  # (V, V)

    def sequence_probability(self, tokens: Sequence[int]) -> float:
        return float(torch.stack([self.table[a, b] for a, b in itertools.pairwise([0, *tokens])]).double().prod())



def draw(table: torch.Tensor, last: Sequence[int], seeds: Sequence[int], position: int, purpose: Purpose) -> list[int]:
    return inverse_cdf(table[list(last)], [uniform(seed, position, purpose) for seed in seeds]).tolist()


def draft_argmax(q: torch.Tensor, last: Sequence[int], *_: object) -> list[int]:
    return q[list(last)].argmax(-1).tolist()


def draft_sampled(q: torch.Tensor, last: Sequence[int], seeds: Sequence[int], position: int) -> list[int]:
    return draw(q, last, seeds, position, Purpose.DRAFT)


def residual_is_p(requests: Sequence[VerifyRequest]) -> list[Verdict]:
    """Wrong on purpose: a rejected token is replaced by a draw from p instead of from norm(max(0, p - q))."""
    verdicts = verify_batch(requests)
    rows = torch.stack([r.p[0][r.p[1] + len(v.path)] for r, v in zip(requests, verdicts)])
    tokens = inverse_cdf(rows, [r.final_u[len(v.path)] for r, v in zip(requests, verdicts)]).tolist()
    return [Verdict(verdict.path, token) for verdict, token in zip(verdicts, tokens)]


def speculate(
    p: Markov,
    q: torch.Tensor,
    k: int,
    length: int,
    draft=draft_sampled,
    verifier: Verifier = verify_batch,
    rule="lossless",
) -> torch.Tensor:
    """Generates DRAWS sequences of `length` tokens after token 0, by rounds of k drafts and a verification, all of
    them together; counts (V, V, ...) what came out."""
    sequences: dict[int, list[int]] = {seed: [0] for seed in range(DRAWS)}
    counts = torch.zeros([VOCAB] * length, dtype=torch.float64)
    while sequences:
        seeds = list(sequences)
        starts = [len(sequences[seed]) for seed in seeds]
        inputs = [[sequences[seed][-1] for seed in seeds]]  # k + 1 lists: the last token, then the drafts
        for i in range(k):
            # The position is each sequence's own, so it goes into the seed.
            inputs.append(draft(q, inputs[-1], [100 * s + at + i for s, at in zip(seeds, starts)], 0))
        rows = p.table[torch.tensor(inputs).T.flatten()]  # (sequences * (k + 1), V)
        requests = [
            VerifyRequest(
                tokens=tokens[1:],
                p=(rows, r * (k + 1)),
                q=[(q, token) for token in tokens[:-1]],
                accept_u=[uniform(100 * seed + at + i, 0, Purpose.ACCEPT) for i in range(k)],
                final_u=[
                    uniform(100 * seed + at + i, 0, Purpose.RESIDUAL if i < k else Purpose.SAMPLE) for i in range(k + 1)
                ],
                rule=rule,
            )
            for r, (seed, at, tokens) in enumerate(zip(seeds, starts, zip(*inputs)))
        ]
        for seed, request, verdict in zip(seeds, requests, verifier(requests)):
            sequences[seed] += [*(request.tokens[i] for i in verdict.path), verdict.token]
            if len(sequences[seed]) > length:
                counts[tuple(sequences.pop(seed)[1 : length + 1])] += 1
    return counts


def p_value(counts: torch.Tensor, probability: Callable[[Sequence[int]], float]) -> float:
    """Chi-square of counts against the exact probability of each outcome; rare outcomes are put together."""
    expected = torch.tensor([probability(index) for index in itertools.product(*map(range, counts.shape))])
    expected, observed = expected.double() * counts.sum(), counts.flatten()
    if observed[expected == 0].sum() > 0:
        return 0.0
    common = expected >= 5
    e = torch.cat([expected[common], expected[~common].sum()[None]])
    o = torch.cat([observed[common], observed[~common].sum()[None]])
    e, o = e[e > 1e-9], o[e > 1e-9]
    statistic = ((o - e) ** 2 / e).sum()
    return float(torch.special.gammaincc(torch.tensor((len(e) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize(("k", "zeros"), [(1, False), (2, True), (3, False)])
def test_a_sampled_chain_is_lossless(k: int, zeros: bool) -> None:
    p, q = Markov(k, zeros), Markov(10 + k, zeros).table
    assert p_value(speculate(p, q, k, 3), p.sequence_probability) > LIMIT


@pytest.mark.parametrize(
    ("k", "wrong"), [(1, {"draft": draft_argmax}), (2, {"verifier": residual_is_p})], ids=["argmax draft", "residual p"]
)
def test_a_wrong_draft_or_verifier_fails_the_same_test(k: int, wrong: dict) -> None:
    p, q = Markov(k), Markov(10 + k).table
    assert p_value(speculate(p, q, k, 2, **wrong), p.sequence_probability) < LIMIT


def test_the_same_noise_for_draft_and_acceptance_is_biased() -> None:
    """Why purposes are disjoint: with one number for both coins the output is another distribution."""
    p, q = Markov(1), Markov(11).table

    def shared(table: torch.Tensor, last: Sequence[int], seeds: Sequence[int], position: int) -> list[int]:
        coins = torch.tensor([uniform(seed, position, Purpose.ACCEPT) for seed in seeds])
        return (table[list(last)].cumsum(-1) <= coins[:, None]).sum(-1).clamp(max=table.shape[1] - 1).tolist()

    assert p_value(speculate(p, q, 1, 2, draft=shared), p.sequence_probability) < LIMIT


def test_the_acceptance_rate_is_one_minus_total_variation() -> None:
    p, q = Markov(4).table[:1], Markov(5).table[:1]
    rows, tokens = p.expand(2, -1), draw(q, [0] * DRAWS, range(DRAWS), 0, Purpose.DRAFT)
    requests = []
    for seed, token in enumerate(tokens):
        u = [uniform(seed, 0, Purpose.ACCEPT)]
        requests.append(VerifyRequest([token], p=(rows, 0), q=[(q, 0)], accept_u=u, final_u=[0.5, 0.5]))
    rate = sum(len(verdict.path) for verdict in verify_batch(requests)) / DRAWS
    assert rate == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.015)  # 4 standard deviations


def draw_tree(
    q: torch.Tensor, parents: list[int], replacement: bool, seeds: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (seeds, n) of trees whose siblings are drawn with or without replacement, and their q (seeds, n, V)."""
    tokens = torch.zeros(len(seeds), len(parents), dtype=torch.int64)
    rows = torch.zeros(len(seeds), len(parents), VOCAB)
    for i, parent in enumerate(parents):
        row = q[torch.zeros(len(seeds), dtype=torch.int64) if parent < 0 else tokens[:, parent]].clone()  # (seeds, V)
        if not replacement:
            for sibling in (j for j in range(i) if parents[j] == parent):
                row.scatter_(1, tokens[:, sibling, None], 0.0)
            row /= row.sum(-1, keepdim=True)
        rows[:, i] = row
        tokens[:, i] = inverse_cdf(row, [uniform(seed, i, Purpose.DRAFT) for seed in seeds])
    return tokens, rows


@pytest.mark.parametrize("draws", [2_000, pytest.param(DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replacement", [True, False])
def test_a_sampled_tree_is_lossless(replacement: bool, draws: int) -> None:
    """Three children of the root, two below the first two: the first two output tokens are distributed as p."""
    p, q = Markov(21), Markov(22).table
    parents = [-1, -1, -1, 0, 0, 1, 1]
    n = len(parents)
    drafts, rows = draw_tree(q, parents, replacement, range(draws))
    firsts: dict[str, list[list[int]]] = {"right": [], "wrong": []}
    for seed, (tokens, own) in enumerate(zip(drafts.tolist(), rows)):
        accept = [uniform(seed, i, Purpose.ACCEPT) for i in range(n)]
        final = [uniform(seed, i, Purpose.RESIDUAL) for i in range(3)]
        # Wrong on purpose: a q that the drafts were not drawn from.
        for name, judged in (("right", own), ("wrong", own.flip(0))):
            path, token = verify_sampled_tree(p.table[[0, *tokens]], judged, tokens, parents, accept, final)
            firsts[name].append([*(tokens[i] for i in path), token])
    for name, outputs in firsts.items():
        extra = draw(p.table, [o[0] for o in outputs], range(draws), 99, Purpose.SAMPLE)
        counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        for output, token in zip(outputs, extra):
            counts[tuple([*output, token][:2])] += 1
        assert (p_value(counts, p.sequence_probability) > LIMIT) == (name == "right")


def contexts(seed: int, start: int, rows: int) -> list[RowContext]:
    return [RowContext(SamplingParams(), seed, start + i, [], []) for i in range(rows)]


@pytest.mark.parametrize("kind", ["constant", "random", "right", "tree"])
def test_drafts_without_q_give_the_plain_seeded_output(kind: str) -> None:
    """Whatever is drafted, the output is that of plain seeded sampling, token for token."""
    p = Markov(31)
    generator = torch.Generator().manual_seed(0)

    def plain(seed: int, length: int) -> list[int]:
        out = [0]
        for position in range(length):
            tokens, _ = sample(p.table[out[-1:]].log(), contexts(seed, position, 1))
            out += tokens.tolist()
        return out

    accepted = 0
    for seed in range(10):
        expected = plain(seed, 20)
        out = [0]
        while len(out) < 20:
            drafts = torch.randint(VOCAB, (4,), generator=generator).tolist()
            parents = [-1, 0, 1, 2]
            depth = [1, 2, 3, 4]
            if kind == "constant":
                drafts = [1] * 4
            elif kind == "right":
                drafts = [*expected[len(out) : len(out) + 2], 9, 9][:4]
                drafts = [token % VOCAB for token in drafts]
            elif kind == "tree":
                drafts = torch.randperm(VOCAB, generator=generator)[:4].tolist()
                parents, depth = [-1, -1, 0, 1], [1, 1, 2, 2]
            inputs = [out[-1], *drafts]
            at = [len(out) - 1 + d for d in (0, *depth)]
            rows = [RowContext(SamplingParams(), seed, position, [], []) for position in at]
            sampled, _ = sample(p.table[inputs].log(), rows)
            path, token = verify_tree_exact(sampled.tolist(), drafts, parents)
            accepted += len(path)
            out += [*(drafts[i] for i in path), token]
        assert out[:20] == expected[:20]
    assert accepted > 0


def test_exact_tree_by_hand() -> None:
    #        root
    #      7      8       children of the root
    #     1 2    3
    tokens, parents = [7, 8, 1, 2, 3], [-1, -1, 0, 0, 1]
    assert verify_tree_exact([7, 2, 0, 0, 5, 0], tokens, parents) == ([0, 3], 5)
    assert verify_tree_exact([8, 2, 4, 0, 5, 0], tokens, parents) == ([1], 4)
    assert verify_tree_exact([9, 2, 4, 0, 5, 0], tokens, parents) == ([], 9)
    assert verify_tree_exact([6], [], []) == ([], 6)
    assert verify_tree_exact([7, 8, 9], [7, 8], [-1, 0]) == ([0, 1], 9)
    assert verify_tree_exact([7, 1, 2, 3], [7, 7, 1], [-1, -1, 0]) == ([0, 2], 3)  # the first of two equal ones


def test_acceptance_is_strict() -> None:
    """A token of probability 0 does not pass at u = 0."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q = torch.tensor([[1.0, 0.0]])
    assert verify_sampled_chain(p, q, [0], [0.0], 0.0, 0.0) == (0, 1)
    assert verify_sampled_tree(p, q, [0], [-1], [0.0], [0.0, 0.0]) == ([], 1)


def test_equal_distributions_leave_no_residual() -> None:
    """A rejection by rounding alone draws from p, not from nothing."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    q = p[:1] + torch.tensor([[1e-10, -1e-10]])
    # a coin of 1 never comes up: it forces the rejection
    assert verify_sampled_chain(p, q, [0], [1.0], 0.3, 0.0) == (0, 1)
    assert verify_sampled_tree(p, q, [0], [-1], [1.0], [0.3, 0.0]) == ([], 1)


def random_requests(count: int) -> list[VerifyRequest]:
    generator = torch.Generator().manual_seed(count)
    rows = torch.softmax(torch.randn(200, VOCAB, generator=generator) * 2, -1)
    steps = [torch.softmax(torch.randn(50, VOCAB, generator=generator) * 2, -1) for _ in range(4)]

    def numbers(n: int) -> list[float]:
        return torch.rand(n, generator=generator).tolist()

    requests = []
    for i in range(count):
        n = i % 5
        tokens = torch.randint(VOCAB, (n,), generator=generator).tolist()
        q = [(steps[j], i % 50) for j in range(n)]
        parents = [-1, -1, 0, 1][:n] if i % 3 == 1 else None
        if i % 4 == 3:
            sampled = torch.randint(VOCAB, (n + 1,), generator=generator).tolist()
            requests.append(VerifyRequest(tokens, parents, sampled=sampled))
        else:
            rule = (lambda p, q: (p + q) / 2) if i % 7 == 2 else "lossless"
            coins, final = numbers(n), numbers(n + 1)
            request = VerifyRequest(tokens, parents, p=(rows, 3 * i), q=q, accept_u=coins, final_u=final, rule=rule)
            requests.append(request)
    return requests


def test_a_batch_gives_each_request_what_it_gets_alone() -> None:
    requests = random_requests(60)
    together = verify_batch(requests)
    assert together == [verify_batch([request])[0] for request in requests]
    assert len({len(verdict.path) for verdict in together}) > 2
    assert verify_batch([]) == []


def test_chain_and_tree_agree_on_chains() -> None:
    for request in random_requests(60):
        if request.q is not None and request.parents is None and request.rule == "lossless":
            n, (rows, first) = len(request.tokens), request.p
            q = torch.stack([t[i] for t, i in request.q]) if n else torch.empty(0, VOCAB)
            p = rows[first : first + n + 1]
            path, token = verify_sampled_tree(p, q, request.tokens, range(-1, n - 1), request.accept_u, request.final_u)
            (verdict,) = verify_batch([request])
            assert verdict == Verdict(path, token)
            if n:
                final = request.final_u
                got = verify_sampled_chain(p, q, request.tokens, request.accept_u, final[len(path)], final[-1])
                assert got == (len(path), token)


def test_a_rule_is_verified_against_its_own_pi() -> None:
    """With pi = (p + q) / 2 the first token follows pi, and not p."""
    p, q = Markov(41), Markov(42).table
    counts = speculate(p, q, 1, 1, rule=lambda p, q: (p + q) / 2)
    mixture = Markov(41)
    mixture.table = (p.table + q) / 2
    assert p_value(counts, mixture.sequence_probability) > LIMIT
    assert p_value(counts, p.sequence_probability) < LIMIT


def test_rules_by_name() -> None:
    p, q = torch.rand(2, 3), torch.rand(2, 3)
    assert resolve_rule("lossless")(p, q) is p
    assert all(callable(resolve_rule(name)) for name in RULES)
    with pytest.raises(ConfigError, match=r"'lossy'.*allowed: .*lossless"):
        resolve_rule("lossy")
    request = VerifyRequest([0], p=(p, 0), q=[(q, 0)], accept_u=[0.5], final_u=[0.5, 0.5], rule="lossy")
    with pytest.raises(ConfigError, match="lossy"):
        verify_batch([request])


def test_rules_are_loaded_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "RULES", {**RULES, "missing": "ridgeline.decoding.no_such_module:rule"})
    assert verify.resolve_rule("lossless")
    with pytest.raises(ModuleNotFoundError):
        verify.resolve_rule("missing")


def test_q_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the row of the rejected draft is taken from q, and one transfer brings the values at the draft tokens."""
    requests = [r for r in random_requests(60) if r.q is not None and r.parents is None and r.rule == "lossless"]
    taken: list[int] = []
    rows = verify._rows

    def counting(refs):
        taken.append(len(refs))
        return rows(refs)

    monkeypatch.setattr(verify, "_rows", counting)
    verdicts = verify_batch(requests)
    rejected = sum(len(v.path) < len(r.tokens) for v, r in zip(verdicts, requests))
    assert taken == [len(requests), rejected]
