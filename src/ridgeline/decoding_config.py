"""speculative_config and diffusion_config, checked, to the decoding strategies of an engine."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.decoding import build_strategy
from ridgeline.decoding.base import Strategy
from ridgeline.errors import ConfigError

# Method -> its options under the names users know, and what the strategy calls them.
_LOOKUP = {"num_speculative_tokens": "k", "prompt_lookup_max": "longest", "prompt_lookup_min": "shortest"}
SPECULATIVE_METHODS: Mapping[str, Mapping[str, str]] = {
    "ngram": _LOOKUP,
    "lookup_tree": {**_LOOKUP, "branches": "branches"},
    "draft_model": {"num_speculative_tokens": "k"},
    "hidden_drafter": {"num_speculative_tokens": "k"},
}
WITH_DRAFTER = ("draft_model", "hidden_drafter")

# Mask token and block length are not in every config.json.
DIFFUSION: Mapping[str, Mapping[str, Any]] = {"sdar": {"mask_token": 151669, "block": 4}}
_DIFFUSION_OPTIONS = ("mask_token", "block", "steps", "reveal", "threshold")
_REVEAL = ("threshold", "low_confidence")


def needs_drafter(speculative: Mapping[str, Any]) -> bool:
    """Whether a second model is loaded. raises ConfigError for a method that is not known, or a model too many or few."""
    if not speculative:
        return False
    method, model = _method(speculative), speculative.get("model")
    if method not in WITH_DRAFTER and model is not None:
        raise ConfigError(f"speculative_config: method {method!r} takes no \"model\"")
    if method in WITH_DRAFTER and not (isinstance(model, str) and model):
        raise ConfigError(f"speculative_config: method {method!r} needs \"model\", the name of the drafter; got {model!r}")
    return method in WITH_DRAFTER


def build_strategies(config: EngineConfig, raw: Mapping[str, Any]) -> dict[str, Strategy]:
    """The default first: speculation if configured, block diffusion for models made for it, else one token a step.

    raw: the fields of the target's config.json. raises ConfigError naming the option, its value and what is allowed.
    """
    strategies: dict[str, Strategy] = {}
    if config.speculative_config:
        method = _method(config.speculative_config)
        strategies[method] = build_strategy(method, _speculative_options(method, config.speculative_config))
    if raw.get("model_type") in DIFFUSION or config.diffusion_config:
        strategies["block_diffusion"] = build_strategy("block_diffusion", _diffusion_options(config.diffusion_config, raw))
    strategies["autoregressive"] = build_strategy("autoregressive")
    return strategies


def _method(speculative: Mapping[str, Any]) -> str:
    method = speculative.get("method", "draft_model" if "model" in speculative else None)
    if not isinstance(method, str) or method not in SPECULATIVE_METHODS:
        raise ConfigError(f"speculative_config: method is {method!r}; valid: {', '.join(SPECULATIVE_METHODS)}")
    return method


def _speculative_options(method: str, given: Mapping[str, Any]) -> dict[str, int]:
    names = SPECULATIVE_METHODS[method]
    options: dict[str, int] = {}
    for name, value in given.items():
        if name in ("method", "model"):
            continue
        if name not in names:
            raise ConfigError(f"speculative_config: {name!r} is no option of method {method!r}; valid: {', '.join(names)}")
        options[names[name]] = _at_least_one("speculative_config", name, value)
    longest, shortest = options.get("longest"), options.get("shortest")
    if shortest is not None and shortest > (longest or 4):
        raise ConfigError(f"speculative_config: prompt_lookup_min is {shortest}; it must be at most prompt_lookup_max, "
                          f"{longest or 4}")
    return options


def _diffusion_options(given: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in _DIFFUSION_OPTIONS:
            raise ConfigError(f"diffusion_config: {name!r} is not an option; valid: {', '.join(_DIFFUSION_OPTIONS)}")
    known = DIFFUSION.get(str(raw.get("model_type")), {})
    options = {"mask_token": raw.get("mask_token_id", known.get("mask_token")),
               "block": raw.get("block_size", known.get("block", 4)), **given}
    mask, vocabulary = options["mask_token"], raw["vocab_size"]
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise ConfigError(f"diffusion_config: mask_token is {mask!r}; it must be an id of the vocabulary, 0 to "
                          f"{vocabulary - 1}")
    for name in ("block", "steps"):
        if options.get(name) is not None:
            _at_least_one("diffusion_config", name, options[name])
    if options.get("reveal", "threshold") not in _REVEAL:
        raise ConfigError(f"diffusion_config: reveal is {options['reveal']!r}; valid: {', '.join(_REVEAL)}")
    threshold = options.get("threshold", 0.5)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise ConfigError(f"diffusion_config: threshold is {threshold!r}; it must be a probability, 0 to 1")
    return options


def _at_least_one(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {name} is {value!r}; it must be an integer of at least 1")
    return value
