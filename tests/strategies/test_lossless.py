"""Speculation changes how fast tokens come, never which: greedy output equals plain, token for token."""
from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine_kit import COMMON, WINDOW, Answer, Rig, finished, model, prompt, same
from ridgeline.batch import whole
from ridgeline.decoding import build_strategy
from ridgeline.decoding.autoregressive import Autoregressive
from ridgeline.errors import UnsupportedModel
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM

TARGETS = ["softmax", "sliding", "hybrid"]
DRAFTERS = ["ngram", "lookup_tree", "draft_model", "hidden_drafter"]
PROMPTS = [prompt(n, seed=n) for n in (1, 5, 8, 19, 33, 40)]
LENGTHS = [30, 1, 2, 25, 40, 17]


@functools.cache
def plain(kind: str, index: int, **params: Any) -> Answer:
    answer = Rig(model(kind)).one(PROMPTS[index], max_tokens=params.pop("max_tokens", LENGTHS[index]), **params)
    assert answer.error is None
    return answer


@functools.cache
def trained_drafter(kind: str) -> CausalLM:
    """A drafter taught on the target's own greedy output: its next token, and the hidden row of that token."""
    target, drafter = model(kind), copy.deepcopy(model("drafter")).requires_grad_(True)
    drafter.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    drafter.lm_head.load_state_dict(target.lm_head.state_dict())
    texts = [[*p, *plain(kind, i).tokens] for i, p in enumerate(PROMPTS)]
    tokens = torch.tensor([t for text in texts for t in text])
    batch = whole([len(t) for t in texts], tokens)
    with torch.no_grad():
        hidden = target(batch).hidden                                                     # (T, hidden)
        best = target.logits(hidden).argmax(-1)
    first = torch.tensor(batch.offsets[:-1])
    fed = hidden.roll(1, 0).index_fill(0, first, 0.0)                                     # row i - 1 beside token i
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(60):
        out = drafter(whole([len(t) for t in texts], tokens, feed=fed)).hidden
        loss = F.cross_entropy(drafter.logits(out), best) + F.smooth_l1_loss(out, hidden)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False)


def models(kind: str) -> dict[str, CausalLM]:
    """The target; a draft that is the target with some noise; a trained drafter over hidden states."""
    return {"target": model(kind), "draft": model(kind, noise=0.1), "drafter": trained_drafter(kind)}


def strategies(names: list[str]) -> dict[str, Any]:
    options = {"hidden_drafter": {"draft": "drafter"}}
    return {name: build_strategy(name, options.get(name)) for name in names}


def rig(kind: str, names: list[str], **options: Any) -> Rig:
    return Rig(models(kind), strategies(["autoregressive", *names]), **options)


def check(r: Rig, kind: str, names: list[str], **params: Any) -> dict[str, int]:
    """Each prompt with each strategy, all in one engine; returns accepted tokens by strategy."""
    for name in names:
        for i, tokens in enumerate(PROMPTS):
            r.add(f"{name} {i}", tokens, name, **{"max_tokens": LENGTHS[i], **params})
    answers = r.finish()
    accepted = dict.fromkeys(names, 0)
    for (request, _), answer in answers.items():
        name, i = request.split()
        assert same(answer, plain(kind, int(i), **params)), f"{request}: {answer.tokens}"
        accepted[name] += answer.metrics.accepted_tokens
    return accepted


CACHES = [("softmax", 0), ("sliding", 0), ("hybrid", 64), ("hybrid", 3)]      # (target, recurrent states)


@pytest.mark.parametrize("kind, states", CACHES)
@pytest.mark.parametrize("strategy", DRAFTERS)
def test_alone(kind: str, states: int, strategy: str) -> None:
    accepted = 0
    for i, tokens in enumerate(PROMPTS):
        r = rig(kind, [strategy], states=states)
        r.add("a", tokens, strategy, max_tokens=LENGTHS[i])
        answer = r.finish()["a", 0]
        assert same(answer, plain(kind, i))
        accepted += answer.metrics.accepted_tokens
        assert answer.metrics.draft_tokens >= answer.metrics.accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("strategy", DRAFTERS)
def test_few_states_run_at_most_the_accepted_drafts_again(strategy: str) -> None:
    """With a state for every row a rejection costs nothing; without, accepted drafts may run again, and nothing else."""
    rows = {}
    for states in (64, 3):
        r = rig("hybrid", [strategy], states=states)
        assert same(r.one(PROMPTS[3], strategy, max_tokens=LENGTHS[3]), plain("hybrid", 3))
        rows[states] = r.engine.stats.target_rows
    assert rows[64] == len(PROMPTS[3]) + LENGTHS[3] - 1 + r.engine.stats.draft_tokens - r.engine.stats.accepted_tokens
    # A pass always saves the state that no rejection can reach, so only accepted drafts ever run twice.
    assert rows[64] <= rows[3] <= rows[64] + r.engine.stats.accepted_tokens


@pytest.mark.parametrize("kind", TARGETS)
def test_all_strategies_in_one_batch(kind: str) -> None:
    r = rig(kind, DRAFTERS, states=200, max_num_batched_tokens=64)
    accepted = check(r, kind, ["autoregressive", *DRAFTERS])
    assert r.engine.stats.preemptions == 0
    assert accepted.pop("autoregressive") == 0
    assert all(accepted.values()), accepted
    assert r.engine.stats.accepted_tokens == sum(accepted.values())


@pytest.mark.parametrize("kind, states", [("softmax", 0), ("sliding", 0), ("hybrid", 64), ("hybrid", 7)])
def test_all_strategies_with_preemption(kind: str, states: int) -> None:
    r = rig(kind, DRAFTERS, states=states, pages=26, page_size=4, max_num_batched_tokens=24, max_num_seqs=8)
    accepted = check(r, kind, ["autoregressive", *DRAFTERS])
    assert r.engine.stats.preemptions > 0
    assert sum(accepted.values()) > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", TARGETS)
def test_few_tokens(kind: str, max_tokens: int) -> None:
    check(rig(kind, DRAFTERS), kind, DRAFTERS, max_tokens=max_tokens)


@pytest.mark.parametrize("kind", TARGETS)
def test_stop_token_among_accepted_drafts(kind: str) -> None:
    """The output ends at the stop token, however many drafts behind it were accepted with it."""
    stop = plain(kind, 4, max_tokens=40).tokens[13]
    r = rig(kind, DRAFTERS)
    check(r, kind, DRAFTERS, max_tokens=40, stop_token_ids=(stop,))
    assert finished(r.answers)["stop"] >= len(DRAFTERS)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("params", [
    {"temperature": 0.4, "seed": 11}, {"temperature": 1.0, "seed": 12, "top_k": 6, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.5, "seed": 13, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 9, "max_tokens": 20,
     "stop_token_ids": (3, 4, 5, 6), "bad_words_token_ids": ((7, 8), (9,))}], ids=["cold", "truncated", "penalties"])
def test_seeded_draws_are_those_of_plain_decoding(kind: str, params: dict[str, Any]) -> None:
    """Drafts that were not sampled toss no coin, so even a sampled output is the plain one."""
    names = ["ngram", "lookup_tree", "hidden_drafter"]
    accepted = check(rig(kind, names, states=200), kind, names, **params)
    assert sum(accepted.values()) > 0
    check(rig(kind, names, pages=22, states=9, page_size=4), kind, names, **params)


def test_a_perfect_draft_is_accepted_whole() -> None:
    r = Rig({"target": model("softmax"), "draft": model("softmax")}, ["draft_model"])
    for temperature in (0.0, 1.0):
        answer = r.one(PROMPTS[3], "draft_model", max_tokens=21, temperature=temperature, seed=1)
        assert answer.metrics.accepted_tokens == answer.metrics.draft_tokens == 16
        assert answer.metrics.target_steps == 5                      # the first token, then four times 4 + 1


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "sampled"])
def test_drafts_know_the_drafts_before_them(params: dict[str, Any]) -> None:
    """Penalties count the tokens drafted so far, for the draft as for the target: the perfect draft stays perfect."""
    params = {**params, "max_tokens": 21, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    r = Rig({"target": model("softmax"), "draft": model("softmax")}, ["draft_model"])
    metrics = r.one(PROMPTS[3], "draft_model", **params).metrics
    assert metrics.accepted_tokens == metrics.draft_tokens == 16


@pytest.mark.parametrize("kind", TARGETS)
def test_sampled_draft_model_is_the_same_alone_in_a_batch_and_preempted(kind: str) -> None:
    """Its output is not that of plain seeded decoding, but it depends on nothing but the request: windows start where
    the last commit ended, and a preemption starts one again with the same noise."""
    params = {"temperature": 0.8, "seed": 5, "max_tokens": 24}
    alone = [rig(kind, ["draft_model"], states=100).one(tokens, "draft_model", **params) for tokens in PROMPTS]
    crowded = rig(kind, ["draft_model", "ngram"], pages=22, page_size=4, states=20, max_num_batched_tokens=20)
    for i, tokens in enumerate(PROMPTS):
        crowded.add(f"{i}", tokens, "draft_model", **params)
        crowded.add(f"n{i}", tokens, "ngram", **params)
    answers = crowded.finish()
    assert crowded.engine.stats.preemptions > 0
    for i, answer in enumerate(alone):
        assert same(answers[f"{i}", 0], answer)
    assert sum(a.metrics.accepted_tokens for a in alone) > 0
    assert sum(a.metrics.accepted_tokens for a in alone) < sum(a.metrics.draft_tokens for a in alone)


def test_training_makes_the_hidden_drafter_agree_more() -> None:
    def accepted(drafter: CausalLM) -> int:
        r = Rig({"target": model("softmax"), "drafter": drafter}, strategies(["hidden_drafter"]))
        for i, tokens in enumerate(PROMPTS):
            r.add(f"{i}", tokens, max_tokens=30)
        r.finish()
        return r.engine.stats.accepted_tokens
    assert accepted(trained_drafter("softmax")) > 2 * accepted(model("drafter"))


def test_hidden_drafter_needs_rows_as_wide_as_its_own() -> None:
    config = {**COMMON, "model_type": "hidden_drafter", "target_hidden_size": 48}
    with pytest.raises(UnsupportedModel, match="target_hidden_size is 48 and hidden_size 32"):
        build_model(config)
    assert build_model({**config, "target_hidden_size": 32}).feed_width == 32


def test_sequences_are_longer_than_the_window() -> None:
    """Otherwise the sliding target would be a softmax one."""
    assert model("sliding").config.window(0) == WINDOW < min(len(PROMPTS[i]) + LENGTHS[i] for i in (0, 2, 3, 4, 5))


def test_the_autoregressive_strategy_serves_any_role() -> None:
    class Second(Autoregressive):
        roles = ("second",)

    r = Rig({"target": model("softmax"), "second": model("hybrid")}, {"first": Autoregressive(), "second": Second()})
    for i, tokens in enumerate(PROMPTS):
        r.add(f"first {i}", tokens, "first", max_tokens=LENGTHS[i])
        r.add(f"second {i}", tokens, "second", max_tokens=LENGTHS[i])
    answers = r.finish()
    for i in range(len(PROMPTS)):
        assert same(answers[f"first {i}", 0], plain("softmax", i))
        assert same(answers[f"second {i}", 0], plain("hybrid", i))
