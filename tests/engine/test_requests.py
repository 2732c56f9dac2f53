"""A bad request, a bad strategy or a bad pass: its own requests fail with a typed error, no other one notices."""
from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from engine_kit import COMMON, VOCAB, Rig, model, prompt, same
from ridgeline.decoding import build_strategy
from ridgeline.decoding.autoregressive import Autoregressive
from ridgeline.decoding.base import Commit, Run, Sample, SequenceView, Steps
from ridgeline.decoding.draft_model import DraftModel
from ridgeline.decoding.ngram import NGram
from ridgeline.decoding.tree import LookupTree
from ridgeline.errors import ConfigError, EngineError, InvalidParams, InvalidPrompt, OutOfMemory
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import EngineRequest, FinishReason


def undisturbed(r: Rig, error: type[Exception], message: str, tokens: Any, **params: Any) -> None:
    """The bad request is refused in the middle of another one, which goes on as if nothing had been."""
    r.add("good", prompt(20), max_tokens=8)
    r.step()
    before = (len(r.engine.scheduler.waiting), len(r.engine.scheduler.running), r.store.stats())
    with pytest.raises(error, match=message):
        r.add("bad", tokens, **params)
    assert (len(r.engine.scheduler.waiting), len(r.engine.scheduler.running), r.store.stats()) == before
    answers = r.finish()
    assert set(answers) == {("good", 0)}
    assert same(answers["good", 0], Rig(model("softmax")).one(prompt(20), max_tokens=8))


@pytest.mark.parametrize("tokens, message", [
    ([], "the prompt is empty; it needs at least one token"),
    ([1, VOCAB, 2], f"token id {VOCAB} in the prompt is out of range; valid: 0 to {VOCAB - 1}"),
    ([1, -3], "token id -3 in the prompt is out of range"),
    ([1] * 80, "the prompt has 80 tokens; at most 79 fit the context of 80 tokens"),
])
def test_bad_prompts(tokens: list[int], message: str) -> None:
    undisturbed(Rig(model("softmax")), InvalidPrompt, message, tokens)


@pytest.mark.parametrize("params, message", [
    ({"logprobs": 6}, "logprobs is 6; at most 5"),
    ({"prompt_logprobs": 7}, "prompt_logprobs is 7; at most 5"),
    ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token id {VOCAB} is out of range"),
    ({"allowed_token_ids": [1, 99]}, "allowed_token_ids: token id 99 is out of range"),
    ({"stop_token_ids": [77]}, "stop_token_ids: token id 77 is out of range"),
    ({"bad_words_token_ids": [[1, 78]]}, "bad_words_token_ids: token id 78 is out of range"),
    ({"strategy": "none"}, "strategy 'none' is not loaded; loaded: autoregressive"),
    ({"max_tokens": 0}, "max_tokens: got 0 with neither echo nor prompt_logprobs"),
    ({"temperature": -1}, "temperature: got -1"),
])
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    undisturbed(Rig(model("softmax"), max_logprobs=5), InvalidParams, message, [1, 2], **params)


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    r = Rig(model("softmax"))
    r.add("a", [1, 2], max_tokens=3)
    with pytest.raises(InvalidParams, match="request_id 'a' is in use by a live request"):
        r.add("a", [1, 2], max_tokens=3)
    r.finish()
    r.answers.clear()
    r.add("a", [1, 2], max_tokens=3)
    assert r.finish()["a", 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("options, message", [
    ({"strategies": ["draft_model"]}, "strategy 'draft_model' needs a model for draft; loaded: target"),
    ({"pages": 9}, "the cache of 9 pages of 8 tokens cannot hold one sequence of 80 tokens"),
    ({"strategies": ["ngram"], "max_num_batched_tokens": 4}, "max_num_batched_tokens is 4; strategy 'ngram' needs at least 5"),
    ({"scheduling_policy": "none"}, "scheduling_policy is 'none'; valid: fcfs, priority, static"),
])
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rig(model("softmax"), **options)


def test_drafting_with_recurrent_layers_takes_three_states() -> None:
    nets = {"target": model("softmax"), "draft": model("hybrid")}
    with pytest.raises(ConfigError, match="num_states=2: a model with recurrent layers needs at least 3"):
        Rig(nets, ["draft_model"], states=2)
    answer = Rig(nets, ["draft_model"], states=3).one(prompt(9), "draft_model", max_tokens=20)
    assert same(answer, Rig(model("softmax")).one(prompt(9), max_tokens=20))


def test_unknown_strategies_and_options_are_named() -> None:
    with pytest.raises(ConfigError, match="decoding strategy 'none' is not known; known: autoregressive"):
        build_strategy("none")
    with pytest.raises(ConfigError, match=r"decoding strategy 'ngram'.*'depth'"):
        build_strategy("ngram", {"depth": 3})


@pytest.mark.parametrize("strategy", [NGram(k=4), LookupTree(k=3, branches=2), DraftModel(k=4)])
def test_the_smallest_budget_is_enough(strategy: Any) -> None:
    nets = {"target": model("softmax"), "draft": model("softmax", noise=0.1)}
    r = Rig(nets, {"s": strategy}, max_num_batched_tokens=strategy.lookahead() + 1)
    for n in (1, 6, 20, 33):
        r.add(str(n), prompt(n), max_tokens=12)
    answers = r.finish()
    for n in (1, 6, 20, 33):
        assert same(answers[str(n), 0], Rig(model("softmax")).one(prompt(n), max_tokens=12))


# Faults on the way.


class Faulty(Autoregressive):
    """Three good tokens, then a fault."""

    def __init__(self, fault: str):
        self.fault = fault

    def run(self, seq: SequenceView) -> Steps:
        while len(seq.tokens) < seq.prompt_len + 3:
            out = yield Run(self.target, seq.pending(self.target), want=(Sample(),))
            yield Commit(out.tokens)
        if self.fault == "raises":
            raise ZeroDivisionError("a fault of the strategy")
        if self.fault == "empty run":
            yield Run(self.target, [])


@pytest.mark.parametrize("fault, message", [
    ("raises", "ZeroDivisionError: a fault of the strategy"), ("empty run", "Faulty yielded a run without tokens"),
    ("ends", "Faulty ended before the sequence did")])
def test_a_faulty_strategy_fails_its_own_requests(fault: str, message: str) -> None:
    r = Rig(model("softmax"), {"good": Autoregressive(), "faulty": Faulty(fault)})
    r.add("good", prompt(20), max_tokens=8)
    r.add("bad", prompt(11), "faulty", max_tokens=8, n=2, temperature=1.0, seed=1)
    answers = r.finish()
    assert same(answers["good", 0], Rig(model("softmax")).one(prompt(20), max_tokens=8))
    for index in range(2):
        bad = answers["bad", index]
        assert (bad.finish_reason, len(bad.tokens)) == (FinishReason.ERROR, 3)
        assert isinstance(bad.error, EngineError) and message in str(bad.error)


class Failing(torch.nn.Module):
    """A model whose pass number `at` raises."""

    def __init__(self, net: Any, at: int):
        super().__init__()
        self.net, self.at, self.passes = net, at, 0
        self.feed_width, self.lm_head, self.top_head = net.feed_width, net.lm_head, net.top_head
        self.logits, self.whole = net.logits, net.whole

    def forward(self, batch: Any, state: Any) -> Any:
        self.passes += 1
        if self.passes == self.at:
            raise RuntimeError("the device is gone")
        return self.net(batch, state)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_failing_pass_fails_the_requests_in_it(role: str) -> None:
    nets = {"target": model("softmax"), "draft": model("softmax", noise=0.1)}
    r = Rig(nets, ["draft_model"])
    r.engine.runners[role].model = Failing(nets[role], at=4)
    for i in range(3):
        r.add(f"draft {i}", prompt(9 + i), "draft_model", max_tokens=20)
    for _ in range(4 if role == "target" else 2):
        r.step()
    assert [str(r.answers[f"draft {i}", 0].error) for i in range(3)] == ["RuntimeError: the device is gone"] * 3
    assert all(isinstance(a.error, EngineError) and isinstance(a.error.__cause__, RuntimeError) for a in r.answers.values())
    r.check_empty()
    r.add("later", prompt(9), "draft_model", max_tokens=8)                        # the engine goes on
    assert same(r.finish()["later", 0], Rig(model("softmax")).one(prompt(9), max_tokens=8))


@pytest.mark.parametrize("kind", ["softmax", "sliding", "hybrid"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"logprobs": 1}],
                         ids=["greedy", "sampled", "logprobs"])
def test_not_a_number_stays_with_its_request(kind: str, params: dict[str, Any]) -> None:
    """One token's embedding is NaN: requests with it fail, and their pages do not poison who gets them next."""
    poison = 5
    net = copy.deepcopy(model(kind))
    with torch.no_grad():
        net.model.embed_tokens.weight[poison] = math.nan
    clean = [[t for t in prompt(20 + i, seed=i) if t != poison] for i in range(3)]
    r = Rig({"target": net, "draft": net}, ["ngram", "lookup_tree", "draft_model"], pages=30, page_size=4)
    for i, name in enumerate(("autoregressive", "ngram", "lookup_tree", "draft_model")):
        r.add(f"bad {i}", [*clean[0][:5], poison, *clean[1]], name, max_tokens=8, **params)
        r.add(f"good {i}", clean[i % 3], name, max_tokens=8, allowed_token_ids=[0, 1, 2, 3, 4], temperature=0.0)
    answers = r.finish()
    for i in range(4):
        bad, good = answers[f"bad {i}", 0], answers[f"good {i}", 0]
        assert isinstance(bad.error, EngineError) and "not a number" in str(bad.error)
        fresh = Rig(model(kind)).one(clean[i % 3], max_tokens=8, allowed_token_ids=[0, 1, 2, 3, 4])
        assert same(good, fresh)


class Broken(Failing):
    """A model whose pass number `at` writes and returns NaN."""

    def forward(self, batch: Any, state: Any) -> Any:
        self.passes += 1
        if self.passes != self.at:
            return self.net(batch, state)
        broken = copy.deepcopy(self.net)
        for parameter in broken.parameters():
            parameter.fill_(math.nan)
        return broken(batch, state)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_broken_pass_leaves_nothing_in_the_prefix_cache(at: int) -> None:
    """The pages of an earlier chunk were published before the NaN showed."""
    r = Rig(model("softmax"), max_num_batched_tokens=16)
    r.engine.runners["target"].model = Broken(model("softmax"), at)
    assert "not a number" in str(r.one(prompt(45), max_tokens=3).error)
    again = r.one(prompt(45), max_tokens=3)
    assert same(again, Rig(model("softmax")).one(prompt(45), max_tokens=3))
    assert r.one(prompt(45), max_tokens=3).metrics.cached_tokens == 40


def test_masks_that_exclude_everything_fail_the_request() -> None:
    r = Rig(model("softmax"), eos_token_ids=(3,))
    r.add("bad", prompt(5), max_tokens=5, min_tokens=2, allowed_token_ids=[3])
    r.add("good", prompt(5), max_tokens=5)
    answers = r.finish()
    assert "masks exclude every token" in str(answers["bad", 0].error)
    assert answers["good", 0].error is None


def test_a_request_that_the_cache_cannot_hold_ends_with_an_error() -> None:
    """A strategy that runs more than it announced would otherwise be put back and start again for ever."""
    class Greedy(Autoregressive):
        def run(self, seq: SequenceView) -> Steps:
            yield Run(self.target, [1] * 90)
            raise AssertionError("not reached")

    r = Rig(model("softmax"), {"good": Autoregressive(), "greedy": Greedy()}, pages=10, max_num_batched_tokens=200)
    r.add("bad", prompt(5), "greedy", max_tokens=5)
    r.add("good", prompt(5), max_tokens=5)
    answers = r.finish()
    assert isinstance(answers["bad", 0].error, OutOfMemory)
    assert same(answers["good", 0], Rig(model("softmax")).one(prompt(5), max_tokens=5))


def test_abort_is_reported_once_and_frees_at_once() -> None:
    r = Rig(model("softmax"), max_num_seqs=1)
    r.add("running", prompt(20), max_tokens=30)
    r.add("waiting", prompt(20), max_tokens=30)
    for _ in range(3):
        r.step()
    for name in ("running", "waiting", "unknown", "running"):
        r.engine.abort(name)
    r.check_empty()
    assert r.engine.has_work                                   # the reports wait for the next step
    answers = r.finish()
    assert {k: a.finish_reason for k, a in answers.items()} == dict.fromkeys(
        [("running", 0), ("waiting", 0)], FinishReason.ABORT)
    assert len(answers["running", 0].tokens) == 3 and not answers["waiting", 0].tokens


def test_requests_without_a_seed_differ_and_an_engine_seed_repeats_them() -> None:
    def outputs(seed: int) -> list[list[int]]:
        r = Rig(model("softmax"), seed=seed)
        for i in range(3):
            r.engine.add_request(EngineRequest(str(i), [1, 2], SamplingParams(max_tokens=20)))
        return [a.tokens for _, a in sorted(r.finish().items())]

    assert outputs(1) == outputs(1) != outputs(2)
    assert len(set(map(tuple, outputs(1)))) == 3


def test_the_end_of_the_context_ends_the_output() -> None:
    assert COMMON["max_position_embeddings"] > 80
    for strategy in ("autoregressive", "ngram"):
        answer = Rig(model("softmax"), ["ngram"], max_model_len=80).one(prompt(60), strategy, max_tokens=None)
        assert (len(answer.tokens), answer.finish_reason) == (20, FinishReason.LENGTH)


def test_stop_tokens_end_tokens_and_the_fewest_tokens() -> None:
    r = Rig(model("softmax"), eos_token_ids=(9,))
    plain = r.one(prompt(8), max_tokens=30, ignore_eos=True).tokens
    stop = plain[4]
    first = plain.index(stop)
    answer = r.one(prompt(8), max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    assert (answer.tokens, answer.finish_reason, answer.stop_token) == (plain[:first + 1], FinishReason.STOP, stop)
    later = r.one(prompt(8), max_tokens=30, ignore_eos=True, stop_token_ids=[stop], min_tokens=first + 2)
    assert len(later.tokens) >= first + 2 and stop not in later.tokens[:first + 1]
    ended = Rig(model("softmax"), eos_token_ids=(stop,)).one(prompt(8), max_tokens=30)
    assert (ended.tokens, ended.finish_reason, ended.stop_token) == (plain[:first + 1], FinishReason.STOP, None)
