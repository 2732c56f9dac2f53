from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from ridgeline.errors import InvalidParams
from ridgeline.sampling_params import SamplingParams


def test_defaults_are_vllms() -> None:
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.n, p.max_tokens) == (1.0, 0, 1.0, 0.0, 1, 16)
    assert not p.greedy and SamplingParams(temperature=0).greedy


WRONG = [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("temperature", True), ("temperature", None), ("temperature", 10**400), ("temperature", 1j),
    ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1),
    ("typical_p", 0.0), ("typical_p", 2), ("top_k", -2), ("top_k", 1.5), ("top_k", True), ("top_k", "4"),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", "x"),
    ("n", 0), ("n", True), ("n", 1.0), ("min_tokens", -1), ("max_tokens", -1), ("max_tokens", 1.0),
    ("logprobs", -1), ("logprobs", True), ("prompt_logprobs", -1), ("seed", 1.0), ("seed", 2**64),
    ("seed", "7"), ("priority", 0.5), ("priority", None), ("cache_salt", None), ("cache_salt", 3),
    ("ignore_eos", 1), ("echo", "yes"), ("detokenize", None), ("skip_special_tokens", 0),
    ("include_stop_str_in_output", None),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 3), ("stop", b"x"), ("bad_words", [""]),
    ("stop_token_ids", 3), ("stop_token_ids", [True]), ("stop_token_ids", [-1]), ("stop_token_ids", "12"),
    ("stop_token_ids", [1.0]), ("allowed_token_ids", []), ("allowed_token_ids", [-3]),
    ("allowed_token_ids", 3), ("bad_words_token_ids", [[]]), ("bad_words_token_ids", [3]),
    ("bad_words_token_ids", 3), ("bad_words_token_ids", [[1, "a"]]), ("bad_words_token_ids", [[1], None]),
    ("logit_bias", [1, 2]), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: "2"}),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {True: 1.0}), ("logit_bias", {1: math.inf}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda v: repr(v)[:20])
def test_a_wrong_value_names_field_value_and_what_is_allowed(field: str, value: object) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}: got ") and "allowed: " in message
    if not isinstance(value, dict | list | int) or isinstance(value, bool):
        assert repr(value) in message
    assert len(message) < 300


CONTRADICTIONS = [
    ({"min_tokens": 17}, ("min_tokens", "17", "16")),
    ({"max_tokens": 0}, ("max_tokens", "echo", "prompt_logprobs")),
    ({"stop": "x", "detokenize": False}, ("stop", "detokenize")),
    ({"allowed_token_ids": [3, 4], "bad_words_token_ids": [[3], [4]]}, ("allowed_token_ids", "bad word")),
    ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1}, ("allowed_token_ids", "min_tokens 1")),
]


@pytest.mark.parametrize(("fields", "words"), CONTRADICTIONS, ids=lambda v: str(v)[:30])
def test_a_contradiction_names_both_sides(fields: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**fields)
    assert all(word in str(caught.value) for word in words)


def test_combinations_that_are_allowed() -> None:
    SamplingParams(temperature=0, n=4)
    SamplingParams(max_tokens=0, echo=True)
    SamplingParams(max_tokens=0, prompt_logprobs=0)
    SamplingParams(max_tokens=None, min_tokens=1000)
    SamplingParams(min_tokens=16)
    SamplingParams(top_k=-1, seed=-(2**63))
    SamplingParams(allowed_token_ids=[3, 4], bad_words_token_ids=[[3], [4, 5]])
    SamplingParams(allowed_token_ids=[3], stop_token_ids=[3])


def test_values_are_normalised_and_copied() -> None:
    bias = {np.int64(3): 1}
    p = SamplingParams(
        temperature=1, top_k=np.int32(5), top_p=np.float32(0.5), stop="end", stop_token_ids=[1, 2],
        allowed_token_ids=np.array([4, 5]), bad_words_token_ids=[[1, 2], (3,)], bad_words=["a"], logit_bias=bias,
    )  # fmt: skip
    assert type(p.temperature) is float and type(p.top_k) is int and type(p.top_p) is float
    assert p.stop == ("end",) and p.stop_token_ids == (1, 2) and p.allowed_token_ids == (4, 5)
    assert p.bad_words_token_ids == ((1, 2), (3,)) and p.bad_words == ("a",)
    bias[4] = 1
    assert p.logit_bias == {3: 1.0}


def test_frozen_replaceable_picklable() -> None:
    p = SamplingParams(logit_bias={1: 2.0}, stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.top_k = 3  # type: ignore[misc]
    assert dataclasses.replace(p, top_k=3) == SamplingParams(logit_bias={1: 2.0}, stop="a", top_k=3)
    with pytest.raises(InvalidParams, match="top_p"):
        dataclasses.replace(p, top_p=3.0)
    assert pickle.loads(pickle.dumps(p)) == p


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {100: 1.0}), ("allowed_token_ids", [1, 100]), ("stop_token_ids", [100]),
        ("bad_words_token_ids", [[1, 2], [3, 100]]), ("logprobs", 101), ("prompt_logprobs", 101),
    ],
)  # fmt: skip
def test_check_vocab(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})
    params.check_vocab(1000)
    with pytest.raises(InvalidParams, match=rf"{field}: .*10[01] .*allowed: 0 to (99|100) "):
        params.check_vocab(100)


def test_needs_no_torch() -> None:
    code = "import sys, ridgeline.sampling_params, ridgeline.noise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
