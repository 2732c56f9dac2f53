"""Decoding strategies: STRATEGIES is the whole registry, one small file each."""
from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ridgeline.decoding.base import Strategy
from ridgeline.errors import ConfigError

STRATEGIES = {
    "autoregressive": "autoregressive:Autoregressive",
    "score": "score:Score",
    "embed": "embed:Embed",
    "ngram": "ngram:NGram",
    "lookup_tree": "tree:LookupTree",
    "draft_model": "draft_model:DraftModel",
    "hidden_drafter": "hidden_drafter:HiddenDrafter",
    "block_diffusion": "block_diffusion:BlockDiffusion",
}


def build_strategy(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """raises ConfigError that lists the known strategies, or names the option that one does not have."""
    if name not in STRATEGIES:
        raise ConfigError(f"decoding strategy {name!r} is not known; known: {', '.join(sorted(STRATEGIES))}")
    module, cls = STRATEGIES[name].split(":")
    try:
        strategy: Strategy = getattr(importlib.import_module(f"ridgeline.decoding.{module}"), cls)(**(options or {}))
    except TypeError as error:
        raise ConfigError(f"decoding strategy {name!r}: {error}") from error
    return strategy
