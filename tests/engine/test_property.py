"""Any mix of requests, in any cache that holds the longest of them: each output is that of the request run alone."""
from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine_kit import MASK, VOCAB, Answer, Rig, model, prompt, same
from ridgeline.decoding import build_strategy
from ridgeline.types import FinishReason

MAX_LEN = 64
EOS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "block_diffusion": {"mask_token": MASK, "block": 4},
    "hidden_drafter": {"draft": "drafter", "k": 2},
}
STRATEGIES = {
    "softmax": ["autoregressive", "ngram", "lookup_tree", "draft_model", "hidden_drafter", "block_diffusion"],
    "sliding": ["autoregressive", "ngram", "lookup_tree", "draft_model", "hidden_drafter"],
    "hybrid": ["autoregressive", "ngram", "lookup_tree", "draft_model", "hidden_drafter"],
}
TOKEN = st.integers(0, VOCAB - 1)


@functools.cache
def models(kind: str) -> dict[str, Any]:
    return {"target": model(kind), "draft": model(kind, noise=0.2), "drafter": model("drafter")}


def rig(kind: str, names: list[str], **options: Any) -> Rig:
    built = {name: build_strategy(name, OPTIONS.get(name)) for name in names}
    return Rig(models(kind), built, max_model_len=MAX_LEN, eos_token_ids=(EOS,), **options)


@st.composite
def params(draw: st.DrawFn, strategy: str) -> dict[str, Any]:
    """Sampling parameters, most of them at rest."""
    def sometimes(values: st.SearchStrategy[Any], rest: Any) -> Any:
        return draw(values) if draw(st.integers(0, 3)) == 0 else rest

    most = draw(st.sampled_from([1, 3, 9, 20, 30, None]))
    given: dict[str, Any] = {
        "max_tokens": most, "temperature": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])), "seed": draw(st.integers(0, 99)),
        "top_k": sometimes(st.integers(1, 8), 0), "top_p": sometimes(st.sampled_from([0.5, 0.9]), 1.0),
        "min_p": sometimes(st.sampled_from([0.05, 0.3]), 0.0), "typical_p": sometimes(st.sampled_from([0.4, 0.9]), 1.0),
        "repetition_penalty": sometimes(st.sampled_from([0.8, 1.3]), 1.0),
        "presence_penalty": sometimes(st.sampled_from([-1.0, 0.7]), 0.0),
        "frequency_penalty": sometimes(st.sampled_from([-0.5, 0.6]), 0.0),
        "logit_bias": sometimes(st.dictionaries(TOKEN, st.sampled_from([-5.0, 2.0, 30.0]), max_size=3), None),
        "allowed_token_ids": sometimes(st.sets(TOKEN, min_size=10).map(sorted), None),
        "bad_words_token_ids": sometimes(st.lists(st.lists(TOKEN, min_size=1, max_size=2), min_size=1, max_size=3), ()),
        "stop_token_ids": sometimes(st.lists(TOKEN, min_size=1, max_size=2), ()),
        "min_tokens": sometimes(st.integers(0, min(most or 20, 7)), 0), "ignore_eos": draw(st.booleans()),
        "logprobs": sometimes(st.integers(0, 3), None), "n": sometimes(st.integers(2, 3), 1),
        "prompt_logprobs": None if strategy == "block_diffusion" else sometimes(st.integers(0, 2), None),
        "cache_salt": draw(st.sampled_from(["", "", "", "x"])), "priority": draw(st.integers(-1, 1)),
    }
    if most == 1 and given["prompt_logprobs"] is not None and draw(st.booleans()):
        given["max_tokens"] = given["min_tokens"] = 0                        # scoring
    return given


@st.composite
def request(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    strategy = draw(st.sampled_from(STRATEGIES[kind]))
    length = draw(st.sampled_from([1, 2, 3, 7, 8, 13, 16, 24, 31, 45]))
    tokens = prompt(length, seed=draw(st.integers(0, 1)))                    # few seeds: requests share prefixes
    return {"prompt": tokens, "strategy": strategy, "params": draw(params(strategy)),
            "step": draw(st.integers(0, 10)), "abort": draw(st.sampled_from([None, None, None, None, 1, 4]))}


@st.composite
def scenario(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    page = draw(st.sampled_from([4, 8, 16]))
    longest = -(-(MAX_LEN + 6) // page)                                      # pages of one sequence with its drafts
    requests = draw(st.lists(request(kind), min_size=5, max_size=9))
    longest_prompt = max(requests, key=lambda r: len(r["prompt"]))
    requests.append({**longest_prompt, "step": 14, "abort": None})           # its prefix is likely to be cached by then
    return {
        "requests": requests, "page_size": page,
        "pages": longest + draw(st.integers(0, longest // 3)), "states": draw(st.sampled_from([3, 9, 40, 40])),
        "prefix_caching": draw(st.sampled_from([True, True, False])), "max_num_seqs": draw(st.sampled_from([3, 6, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([8, 11, 24, 100])),
        "max_mixed_prefill_tokens": draw(st.sampled_from([None, 1, 5])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority", "static"]))}


def alone(kind: str, wanted: dict[str, Any]) -> dict[int, Answer]:
    r = rig(kind, [wanted["strategy"]])
    r.add("r", wanted["prompt"], **wanted["params"])
    return {index: answer for (_, index), answer in r.finish().items()}


def check(kind: str, case: dict[str, Any]) -> Rig:
    case = dict(case)
    requests = case.pop("requests")
    r = rig(kind, STRATEGIES[kind], **case)
    step = 0
    while r.engine.has_work or step <= 14:
        for i, wanted in enumerate(requests):
            if wanted["step"] == step:
                r.add(str(i), wanted["prompt"], wanted["strategy"], **wanted["params"])
            if wanted["abort"] is not None and wanted["step"] + wanted["abort"] == step:
                r.engine.abort(str(i))
        r.step()
        step += 1
        assert step < 3000, "no end"
    r.finish()
    for i, wanted in enumerate(requests):
        for index, expected in alone(kind, wanted).items():
            answer = r.answers[str(i), index]
            if answer.finish_reason is FinishReason.ABORT:
                assert wanted["abort"] is not None
                assert answer.tokens == expected.tokens[:len(answer.tokens)]
            else:
                assert same(answer, expected), f"{wanted}: {answer} instead of {expected}"
                assert str(answer.error) == str(expected.error)
    return r


QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None,
                 phases=(Phase.explicit, Phase.generate))


@pytest.mark.parametrize("kind", ["softmax", "sliding", "hybrid"])
def test_each_output_is_that_of_the_request_run_alone(kind: str) -> None:
    seen = {"requests": 0, "preemptions": 0, "prefix_hits": 0, "accepted_tokens": 0}

    @settings(QUICK, max_examples=15)
    @given(scenario(kind))
    def run(case: dict[str, Any]) -> None:
        r = check(kind, case)
        seen["requests"] += len(case["requests"])
        for name in ("preemptions", "prefix_hits", "accepted_tokens"):
            seen[name] += getattr(r.engine.stats, name)

    run()
    print(seen)
    assert all(seen.values()), f"the examples do not reach what they are meant to: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["softmax", "sliding", "hybrid"])
def test_each_output_is_that_of_the_request_run_alone_at_length(kind: str) -> None:
    @settings(QUICK, max_examples=150, derandomize=False, print_blob=True, phases=(*QUICK.phases, Phase.shrink))
    @given(scenario(kind))
    def run(case: dict[str, Any]) -> None:
        check(kind, case)

    run()
