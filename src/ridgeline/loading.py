"""From a model's name and a configuration to an engine that is ready."""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.cache import CacheStore, RoleLayout, plan_sizes
from ridgeline.config import DTYPES, EngineConfig
from ridgeline.decoding import build_strategy
from ridgeline.decoding.base import Strategy
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError
from ridgeline.hub import resolve
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM
from ridgeline.runner import Runner
from ridgeline.types import TARGET
from ridgeline.weights.checkpoint import Checkpoint, open_checkpoint
from ridgeline.weights.load import load_weights

Progress = Callable[[str, int, int], None]       # (model name, bytes done, bytes in all)

# Upper limit of the cache when nobody says how large it shall be; pages are touched only as they are used.
DEFAULT_CACHE_BYTES = 4 << 30
SHARE_OF_FREE_MEMORY = 0.4

# Mask token and block length are not in every config.json.
DIFFUSION = {"sdar": {"mask_token": 151669, "block": 4}}

SPECULATIVE_METHODS = ("ngram", "lookup_tree", "draft_model", "hidden_drafter")
_SPECULATIVE_NAMES = {"num_speculative_tokens": "k", "prompt_lookup_max": "longest", "prompt_lookup_min": "shortest"}


@dataclass
class LoadedModel:
    """A model with its weights, where they came from, and the dtype of its activations."""

    name: str
    path: Path
    checkpoint: Checkpoint
    model: CausalLM
    dtype: torch.dtype


def load_model(name: str, config: EngineConfig, *, max_model_len: int | None = None, load_format: str | None = None,
               progress: Progress | None = None) -> LoadedModel:
    """Find, open, build and fill a model. raises ModelNotFound, CorruptFile, UnsupportedModel."""
    path = resolve(name, revision=config.revision, progress=config.progress is not False)
    checkpoint = open_checkpoint(path, load_format=load_format or config.load_format)
    dtype = _dtype(config.dtype, checkpoint)
    model = build_model(checkpoint.config, max_model_len=max_model_len)
    load_weights(model, checkpoint, dtype=dtype, device=config.device,
                 progress=None if progress is None else lambda done, total: progress(name, done, total))
    return LoadedModel(name, path, checkpoint, model, dtype)


def load_engine(name: str, config: EngineConfig, progress: Progress | None = None) -> tuple[Engine, LoadedModel]:
    """Load the target, the drafter if the configuration asks for one, and size the cache."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    path = resolve(name, revision=config.revision, progress=config.progress is not False)
    checkpoint = open_checkpoint(path, load_format=config.load_format)
    strategies = _strategies(config, checkpoint.config)
    length = _max_model_len(name, config, checkpoint.config)
    loaded = {TARGET: load_model(name, config, max_model_len=length, progress=progress)}
    drafter = config.speculative_config.get("model")
    if drafter is not None:
        loaded["draft"] = load_model(str(drafter), replace(config, revision=None), max_model_len=length,
                                     progress=progress)
        _check_drafter(loaded[TARGET], loaded["draft"])
    layouts = {role: RoleLayout(m.model.state_spec(), _kv_dtype(config, m.dtype), _fingerprint(m))
               for role, m in loaded.items()}
    rollback = max(s.lookahead() for s in strategies.values())
    pages, states = _sizes(config, layouts, length, rollback)
    capacity = pages * config.block_size - rollback
    if capacity < length and config.max_model_len is None and capacity > 0:
        length = capacity                       # the model could go further than this cache
    store = CacheStore(layouts, page_size=config.block_size, num_pages=pages, num_states=states, device=device,
                       prefix_caching=config.enable_prefix_caching)
    engine = Engine(
        {role: Runner(m.model, store.views[role], device) for role, m in loaded.items()}, store, strategies,
        max_model_len=length, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        scheduling_policy=config.scheduling_policy, eos_token_ids=_eos(checkpoint),
        vocab_size=loaded[TARGET].model.config.vocab_size, max_logprobs=config.max_logprobs, seed=config.seed)
    return engine, loaded[TARGET]


@dataclass(frozen=True)
class Description:
    """A model without its weights: shapes on the meta device, and what it would keep in the cache."""

    path: Path
    checkpoint: Checkpoint
    model: CausalLM
    dtype: torch.dtype
    layout: RoleLayout


def describe(name: str, config: EngineConfig) -> Description:
    """Find and open a model and build its shapes; no weights are read."""
    path = resolve(name, revision=config.revision, progress=config.progress is not False)
    checkpoint = open_checkpoint(path, load_format=config.load_format)
    dtype = _dtype(config.dtype, checkpoint)
    model = build_model(checkpoint.config, max_model_len=config.max_model_len)
    return Description(path, checkpoint, model, dtype, RoleLayout(model.state_spec(), _kv_dtype(config, dtype), ""))


def _dtype(wanted: str, checkpoint: Checkpoint) -> torch.dtype:
    """auto: what the checkpoint says; bfloat16 where it says nothing or holds quantised blocks."""
    name = wanted
    if wanted == "auto":
        name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
        if checkpoint.format == "gguf" or name not in DTYPES:
            name = "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return dtype
    found: torch.dtype = getattr(torch, config.kv_cache_dtype)
    return found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _eos(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Every token id that ends a text, from generation_config.json and config.json."""
    found: list[int] = []
    for source in (checkpoint.generation_config, checkpoint.config):
        ids = source.get("eos_token_id")
        found += [ids] if isinstance(ids, int) else list(ids or ())
    return tuple(dict.fromkeys(found))


def _max_model_len(name: str, config: EngineConfig, raw: Mapping[str, Any]) -> int:
    most = raw.get("max_position_embeddings") or raw.get("n_positions") or 2048
    if config.max_model_len is None:
        return int(most)
    if raw.get("model_type") == "gpt2" and config.max_model_len > most:
        raise ConfigError(f"max_model_len is {config.max_model_len}; {name} has learned positions for {most} tokens only")
    return config.max_model_len


def _sizes(config: EngineConfig, layouts: Mapping[str, RoleLayout], length: int, rollback: int) -> tuple[int, int]:
    if config.num_pages is not None:
        return config.num_pages, config.num_states or 2 * config.max_num_seqs * (2 + rollback)
    budget = config.kv_cache_memory_bytes
    if budget is None:
        per_token = sum(layout.kv_bytes_per_token() for layout in layouts.values())
        states = sum(layout.state_bytes() for layout in layouts.values()) * 2 * (2 + rollback)
        useful = config.max_num_seqs * ((length + rollback + config.block_size) * per_token + 2 * states)
        budget = max(1, min(useful, DEFAULT_CACHE_BYTES, int(SHARE_OF_FREE_MEMORY * _free_memory())))
    return plan_sizes(layouts, config.block_size, budget, config.max_num_seqs, rollback=rollback)


def _free_memory() -> int:
    """Bytes that can be had without swapping, by the system's own estimate; half of all memory where it has none."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _fingerprint(loaded: LoadedModel) -> str:
    """Tells models apart in the prefix key: the configuration, the file and the dtype."""
    text = json.dumps([loaded.checkpoint.config, str(loaded.path), str(loaded.dtype)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _strategies(config: EngineConfig, raw: Mapping[str, Any]) -> dict[str, Strategy]:
    """The default strategy first: speculation if configured, block diffusion for such models, else one token a step."""
    model_type = str(raw.get("model_type"))
    options = dict(config.speculative_config)
    strategies: dict[str, Strategy] = {}
    if options:
        method = options.pop("method", "draft_model" if "model" in options else None)
        if method not in SPECULATIVE_METHODS:
            raise ConfigError(f"speculative_config: method is {method!r}; valid: {', '.join(SPECULATIVE_METHODS)}")
        needs_model = method in ("draft_model", "hidden_drafter")
        if needs_model != (options.pop("model", None) is not None):
            raise ConfigError(f"speculative_config: method {method!r} {'needs' if needs_model else 'takes no'} \"model\"")
        strategies[method] = build_strategy(method, {_SPECULATIVE_NAMES.get(k, k): v for k, v in options.items()})
    if model_type in DIFFUSION or config.diffusion_config:
        known = {**DIFFUSION.get(model_type, {}), **config.diffusion_config}
        known["mask_token"] = config.diffusion_config.get("mask_token", raw.get("mask_token_id", known.get("mask_token")))
        known["block"] = config.diffusion_config.get("block", raw.get("block_size", known.get("block", 4)))
        if known["mask_token"] is None or not 0 <= known["mask_token"] < raw["vocab_size"]:
            raise ConfigError(f"diffusion_config: mask_token is {known['mask_token']!r}; it must be an id of the "
                              f"vocabulary, 0 to {raw['vocab_size'] - 1}")
        strategies["block_diffusion"] = build_strategy("block_diffusion", known)
    strategies["autoregressive"] = build_strategy("autoregressive")
    return strategies


def _check_drafter(target: LoadedModel, draft: LoadedModel) -> None:
    wanted, found = target.model.config.vocab_size, draft.model.config.vocab_size
    if wanted != found:
        raise ConfigError(f"speculative_config: the drafter {draft.name} has a vocabulary of {found} tokens, the target "
                          f"{target.name} of {wanted}; both must be equal")
    width, hidden = draft.model.feed_width, target.model.config.hidden_size
    if width is not None and width != hidden:
        raise ConfigError(f"speculative_config: the drafter {draft.name} reads hidden states of width {width}, the target "
                          f"{target.name} has {hidden}")
