"""What requests share: cached prefixes and forked prompts. A hit gives what a miss gives."""
from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_kit import VOCAB, Answer, Rig, alike, logits, model, prompt, same
from ridgeline.types import FinishReason, TokenLogprobs

KINDS = ["softmax", "sliding", "hybrid"]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 4, "logprobs": 2, "repetition_penalty": 1.2}],
                         ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_gives_what_a_miss_gives(kind: str, params: dict[str, Any]) -> None:
    r = Rig(model(kind), page_size=8)
    text = prompt(45)
    miss = r.one(text, max_tokens=12, **params)
    hit = r.one(text, max_tokens=12, **params)
    assert same(miss, hit)
    assert (miss.metrics.cached_tokens, hit.metrics.cached_tokens) == (0, 40)
    assert (r.engine.stats.prefix_queries, r.engine.stats.prefix_hits) == (90, 40)
    assert r.engine.stats.prompt_tokens == 45 + 5
    # A prefix of it, and a text that goes on differently. Recurrent layers have a state at 24 once one was wanted there.
    for other, state in ((text[:30], 0), ([*text[:24], *prompt(9, seed=9)], 24)):
        fresh = Rig(model(kind), page_size=8, prefix_caching=False).one(other, max_tokens=12, **params)
        again = r.one(other, max_tokens=12, **params)
        assert same(again, fresh)
        assert again.metrics.cached_tokens == (state if kind == "hybrid" else 24)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_continues_from_its_own_output(kind: str) -> None:
    r = Rig(model(kind), page_size=8)
    text = prompt(20)
    for _ in range(3):
        answer = r.one(text, max_tokens=10)
        text = [*text, *answer.tokens, *prompt(3, seed=7)]
    assert answer.metrics.cached_tokens >= 24
    fresh = Rig(model(kind), page_size=8, prefix_caching=False).one(text[:-13], max_tokens=10)
    assert same(answer, fresh)


def test_a_text_that_parts_from_another_is_reused_where_they_part() -> None:
    """The second request that goes another way leaves a recurrent state at the junction for the third."""
    r = Rig(model("hybrid"), page_size=8)
    stem = prompt(24)
    cached = [r.one([*stem, *prompt(12, seed=s)], max_tokens=2).metrics.cached_tokens for s in (1, 2, 3)]
    assert cached == [0, 0, 24]


def test_without_prefix_caching_nothing_is_reused() -> None:
    r = Rig(model("softmax"), prefix_caching=False)
    assert [r.one(prompt(40), max_tokens=2).metrics.cached_tokens for _ in range(2)] == [0, 0]
    assert r.engine.stats.prefix_hits == 0


def test_salts_keep_prefixes_apart() -> None:
    r = Rig(model("softmax"))
    cached = [r.one(prompt(40), max_tokens=3, cache_salt=salt).metrics.cached_tokens for salt in ("", "a", "a", "b", "")]
    assert cached == [0, 0, 32, 0, 32]


def test_strategies_of_one_visibility_share_prefixes() -> None:
    r = Rig({"target": model("softmax"), "draft": model("softmax", noise=0.1)}, ["ngram", "draft_model"])
    names = ("autoregressive", "ngram", "draft_model", "draft_model")
    answers = [r.one(prompt(40), name, max_tokens=9) for name in names]
    assert [a.metrics.cached_tokens for a in answers] == [0, 32, 32, 32]
    assert all(same(a, answers[0]) for a in answers)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_share_the_prompt(kind: str) -> None:
    r = Rig(model(kind), page_size=8)
    r.add("a", prompt(45), n=4, max_tokens=10, temperature=1.0, seed=6)
    answers = r.finish()
    # The first sample runs the prompt; recurrent layers go on from the last full page, 40.
    assert r.engine.stats.prompt_tokens == 45 + 3 * (5 if kind == "hybrid" else 1)
    for index in range(4):
        alone = Rig(model(kind)).one(prompt(45), max_tokens=10, temperature=1.0, seed=6 + index)
        assert same(answers["a", index], alone)
    assert len({tuple(a.tokens) for a in answers.values()}) == 4


@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
def test_more_samples_than_seats(policy: str) -> None:
    r = Rig(model("softmax"), max_num_seqs=2, scheduling_policy=policy)
    r.add("a", prompt(20), n=5, max_tokens=6, temperature=1.0, seed=6)
    r.add("b", prompt(9), max_tokens=6, priority=-1)
    answers = r.finish()
    assert len(answers) == 6
    for index in range(5):
        assert same(answers["a", index], Rig(model("softmax")).one(prompt(20), max_tokens=6, temperature=1.0, seed=6 + index))


def test_aborting_the_first_sample_frees_the_others() -> None:
    r = Rig(model("softmax"), max_num_batched_tokens=8)
    r.add("a", prompt(45), n=3, max_tokens=6, temperature=1.0, seed=6)
    r.step()
    r.engine.abort("a", 0)
    answers = r.finish()
    assert answers["a", 0].finish_reason is FinishReason.ABORT
    for index in (1, 2):
        assert same(answers["a", index], Rig(model("softmax")).one(prompt(45), max_tokens=6, temperature=1.0, seed=6 + index))


# Log-probabilities of the prompt.


def expected_prompt_logprobs(kind: str, text: list[int], k: int) -> list[TokenLogprobs | None]:
    table = logits(model(kind), text).log_softmax(-1)
    out: list[TokenLogprobs | None] = [None]
    for row, token in zip(table, text[1:]):
        values, ids = row.topk(k)
        out.append(TokenLogprobs(token, float(row[token]), int((row > row[token]).sum()) + 1,
                                 list(zip(ids.tolist(), values.tolist()))))
    return out


CUTS: dict[str, dict[str, Any]] = {
    "whole": {}, "chunks of 8": {"max_num_batched_tokens": 8}, "chunks of 13": {"max_num_batched_tokens": 13},
    "preempted": {"pages": 22, "page_size": 4, "max_num_batched_tokens": 30}}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_are_those_of_a_plain_pass(kind: str, cut: str) -> None:
    strategies = ["ngram", "lookup_tree", "draft_model"]
    r = Rig({"target": model(kind), "draft": model(kind, noise=0.2)}, strategies, **CUTS[cut])
    names = ["autoregressive", *strategies]
    for i, name in enumerate(names):
        r.add(name, prompt(20 + 7 * i, seed=i), name, prompt_logprobs=i, max_tokens=15, n=1 + i % 2)
    r.add("again", prompt(41, seed=3), prompt_logprobs=2, max_tokens=1)                # its prefix may be cached
    answers = r.finish()
    for i, name in enumerate(names):
        text = prompt(20 + 7 * i, seed=i)
        assert alike(answers[name, 0].prompt_logprobs, expected_prompt_logprobs(kind, text, i))
        assert (name, 1) not in answers or answers[name, 1].prompt_logprobs is None
    assert alike(answers["again", 0].prompt_logprobs, expected_prompt_logprobs(kind, prompt(41, seed=3), 2))
    if cut == "preempted":
        assert r.engine.stats.preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_plain_pass(kind: str) -> None:
    """Of the unprocessed distribution, whatever temperature and masks chose the token."""
    answer = Rig(model(kind)).one(prompt(19), max_tokens=8, logprobs=3, temperature=2.0, seed=1, logit_bias={4: 1.5})
    table = logits(model(kind), [*prompt(19), *answer.tokens])[18:-1].log_softmax(-1)
    for row, token, told in zip(table, answer.tokens, answer.logprobs):
        assert (told.token, len(told.top)) == (token, 3)
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert told.rank == int((row > row[token]).sum()) + 1
        torch.testing.assert_close(torch.tensor([p for _, p in told.top]), row.topk(3).values.float(), atol=1e-5, rtol=0)


def test_scoring_runs_the_prompt_and_draws_nothing() -> None:
    r = Rig(model("softmax"), ["ngram"], max_num_batched_tokens=16)
    r.add("score", prompt(45), "ngram", max_tokens=0, prompt_logprobs=1)
    r.add("echo", prompt(7), max_tokens=0, echo=True, n=2)
    r.add("other", prompt(12), max_tokens=5)
    answers = r.finish()
    score: Answer = answers["score", 0]
    assert (score.tokens, score.finish_reason) == ([], FinishReason.LENGTH)
    assert alike(score.prompt_logprobs, expected_prompt_logprobs("softmax", prompt(45), 1))
    assert score.metrics.first_token is None and score.metrics.completion_tokens == 0
    for index in (0, 1):
        assert (answers["echo", index].tokens, answers["echo", index].prompt_logprobs) == ([], None)
    assert same(answers["other", 0], Rig(model("softmax")).one(prompt(12), max_tokens=5))
    longest = Rig(model("softmax"), max_model_len=80).one(prompt(80), max_tokens=0, prompt_logprobs=0)
    assert len(longest.prompt_logprobs) == 80
    assert max(t.token for t in longest.prompt_logprobs[1:]) < VOCAB
