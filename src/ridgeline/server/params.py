"""From the fields of a request to SamplingParams."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.sampling_params import SamplingParams
from ridgeline.server.errors import ApiError
from ridgeline.server.schemas.sampling import SamplingFields

# Fields whose names and meanings are those of SamplingParams.
SAME = ("n", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
        "ignore_eos", "min_tokens", "skip_special_tokens", "prompt_logprobs", "priority", "cache_salt")
# What a model's generation_config.json may say about sampling.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MOST_SAMPLES = 128                  # n, as OpenAI limits it


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a model's authors recommend; a model meant for greedy decoding is not made greedy."""
    return {name: generation_config[name] for name in MODEL_DEFAULTS
            if isinstance(generation_config.get(name), (int, float)) and not isinstance(generation_config[name], bool)}


def sampling_params(request: SamplingFields, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
    """raises InvalidParams or ApiError. defaults: of this server; more: what the interface and its features add."""
    given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(token): bias for token, bias in request.logit_bias.items()}
    if given.get("n", 1) > MOST_SAMPLES:
        raise ApiError(400, f"n: got {given['n']}; allowed: 1 to {MOST_SAMPLES}", param="n", code="invalid_value")
    if isinstance(given.get("stop"), str) and not given["stop"]:
        del given["stop"]                                # several clients send "" for none
    return SamplingParams(**{**defaults, **given, **more})


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ApiError(400, f"logit_bias: got the key {text!r}; allowed: token ids", param="logit_bias",
                       code="invalid_value") from None
