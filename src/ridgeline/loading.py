"""From a model's name and a configuration to an engine that is ready."""
from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ridgeline.cache import CacheStore, RoleLayout, plan_sizes
from ridgeline.config import DTYPES, EngineConfig
from ridgeline.decoding_config import build_strategies, needs_drafter
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError, CorruptFile
from ridgeline.hub import resolve
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM
from ridgeline.runner import Runner
from ridgeline.scheduling.policies import build_policy
from ridgeline.types import TARGET
from ridgeline.weights.checkpoint import Checkpoint, open_checkpoint
from ridgeline.weights.config_fields import check_fields
from ridgeline.weights.load import load_weights

if TYPE_CHECKING:
    from ridgeline.native.lower import Report

Progress = Callable[[str, int, int], None]       # (model name, bytes done, bytes in all)

DRAFT = "draft"
ISA_VARIABLE = "RIDGELINE_ISA"     # for debugging: the native kernels' instruction set, instead of the machine's best
_log = logging.getLogger(__name__)
# Upper limit of the cache in main memory when nobody says how large it shall be; pages are touched only as they are used.
DEFAULT_CACHE_BYTES = 4 << 30
SHARE_OF_FREE_MEMORY = 0.4         # of main memory, which other programs need too
SHARE_OF_FREE_DEVICE_MEMORY = 0.85
# Prompt rows beside decoding sequences, on a CPU. From some 100 rows on computing is the limit, so smaller pieces cost nothing
# (Gemma 3 270M beside 15 sequences: 0.41 ms a row in pieces of 128 and of 430), and a token waits 66 ms for them, not 200.
MIXED_PREFILL = 128

# What building a model meets when single values are possible but do not go together, or a field has an odd form.
_IMPOSSIBLE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class OpenModel:
    """A model found and opened: its headers are read and checked, its weights not yet. dtype: of its activations."""

    name: str
    path: Path
    checkpoint: Checkpoint
    dtype: torch.dtype


@dataclass(frozen=True)
class LoadedModel(OpenModel):
    """An open model and its module: on the meta device before `load`, with its weights after it."""

    model: CausalLM
    layout: RoleLayout
    report: Report | None = None     # what runs natively; None before `load`, and where the torch backend runs it all

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token id that ends a text, from generation_config.json and config.json."""
        found: list[int] = []
        for source in (self.checkpoint.generation_config, self.checkpoint.config):
            ids = source.get("eos_token_id")
            found += [ids] if isinstance(ids, int) else list(ids or ())
        return tuple(dict.fromkeys(found))


def open_model(name: str, config: EngineConfig) -> OpenModel:
    """Find and open a model. raises ModelNotFound, CorruptFile, UnsupportedModel or ConfigError."""
    path = resolve(name, revision=config.revision, progress=config.progress is not False)
    checkpoint = open_checkpoint(path, load_format=config.load_format)
    for fields in (checkpoint.config, checkpoint.generation_config):
        check_fields(str(checkpoint.path), fields)
    return OpenModel(name, path, checkpoint, _dtype(config.dtype, checkpoint))


def build(opened: OpenModel, config: EngineConfig, max_model_len: int | None = None) -> LoadedModel:
    """Give an open model its shapes and what it would keep in the cache; no weights are read.

    raises UnsupportedModel, or CorruptFile for a configuration whose values fit no model.
    """
    checkpoint = opened.checkpoint
    try:
        model = build_model(checkpoint.config, max_model_len=max_model_len)
        states = model.state_spec()
    except _IMPOSSIBLE as error:
        raise CorruptFile(f"{checkpoint.path}: the values of its configuration fit no model of type "
                          f"{checkpoint.config.get('model_type')!r}: {type(error).__name__}: "
                          f"{str(error).splitlines()[0] if str(error) else 'no details'}") from error
    layout = RoleLayout(states, _kv_dtype(config, opened.dtype), _fingerprint(opened))
    return LoadedModel(opened.name, opened.path, checkpoint, opened.dtype, model, layout)


def describe(name: str, config: EngineConfig) -> LoadedModel:
    """A model without its weights."""
    return build(open_model(name, config), config, config.max_model_len)


def load(found: LoadedModel, config: EngineConfig, progress: Progress | None = None) -> Report | None:
    """Read the weights; returns what became of the layers where the native backend runs them.

    raises CorruptFile or ModelError, naming the tensor.
    """
    tell = None if progress is None else lambda done, total: progress(found.name, done, total)
    for note in found.checkpoint.notes:
        _log.warning("%s: %s", found.checkpoint.path, note)
    report, dtype = None, found.dtype
    if native_reason(config) is None:
        from ridgeline.native.lower import lower

        report = lower(found.model, found.checkpoint, precision=activation_dtype(config), quantization=config.quantization,
                       threads=config.threads or 0, isa=os.environ.get(ISA_VARIABLE, ""), strict=config.strict_native,
                       page_size=config.block_size, kv_dtype=found.layout.kv_dtype, progress=tell)
        dtype, tell = torch.float32, None      # native layers work on fp32 rows; what is left to torch goes along
        if report.complete:
            torch.set_num_threads(1)           # torch's pool spins after each op, on the cores that the kernels need
    load_weights(found.model, found.checkpoint, dtype=dtype, device=config.device, progress=tell,
                 taken=() if report is None else report.tensors)
    return report


def activation_dtype(config: EngineConfig) -> str:
    """Of native matrix products: int8, exact where the dtype asks for it, unless the configuration says otherwise."""
    if config.activation_dtype != "auto":
        return config.activation_dtype
    return "float32" if config.dtype in ("float32", "float64") else "int8"


def survey(found: LoadedModel, config: EngineConfig) -> Report | str:
    """What `load` would report for a model without its weights, from the headers alone; or why all of it runs on torch."""
    reason = native_reason(config)
    if reason is not None:
        return reason
    from ridgeline.native.lower import survey as survey_layers

    return survey_layers(found.model, found.checkpoint, quantization=config.quantization, threads=config.threads or 0,
                         page_size=config.block_size, kv_dtype=found.layout.kv_dtype)


def native_reason(config: EngineConfig) -> str | None:
    """Why no layer is lowered, or None where the native backend runs.

    raises ConfigError where the configuration asks for the native backend and it cannot run.
    """
    if config.backend == "torch":
        return "backend is 'torch'"
    if config.device != "cpu":
        reason = f"device is {config.device!r}"
    elif config.dtype == "float64":
        reason = "the native backend computes in float32, and dtype is 'float64'"
    elif importlib.util.find_spec("ridgeline.native._native") is None:
        reason = "the native backend was not built for this machine; reinstall the package with a C++ compiler"
    else:
        return None
    if config.backend == "native" or config.quantization or config.strict_native:
        raise ConfigError(f"{reason}, but backend is {config.backend!r}, quantization {config.quantization!r} and "
                          f"strict_native {config.strict_native}")
    return reason


def load_engine(name: str, config: EngineConfig, progress: Progress | None = None) -> tuple[Engine, LoadedModel]:
    """Load the target, the drafter if the configuration asks for one, and size the cache.

    Everything that the configuration or a header can be wrong about is found before the first weight is read.
    """
    build_policy(config.scheduling_policy)
    device = _device(config.device)
    with_drafter = needs_drafter(config.speculative_config)
    opened = {TARGET: open_model(name, config)}
    if with_drafter:
        opened[DRAFT] = _open_drafter(str(config.speculative_config["model"]), config, opened[TARGET])
    length = _max_model_len(opened, config)
    found = {role: build(model, config, length) for role, model in opened.items()}
    strategies = build_strategies(config, found[TARGET].model.config.raw)
    _check_roles(found, config)
    if config.threads:
        torch.set_num_threads(config.threads)
    for role, model in found.items():
        found[role] = replace(model, report=load(model, config, progress))
    layouts = {role: model.layout for role, model in found.items()}
    rollback = max(s.lookahead() for s in strategies.values())
    pages, states = _sizes(config, layouts, length, rollback, device)
    if config.max_model_len is None and any(layout.kv_bytes_per_token() for layout in layouts.values()):
        # The model could go further than this cache; a user who names a length gets an error instead.
        length = min(length, max(1, pages * config.block_size - rollback))
    store = CacheStore(layouts, page_size=config.block_size, num_pages=pages, num_states=states, device=device,
                       prefix_caching=config.enable_prefix_caching)
    engine = Engine(
        {role: Runner(model.model, store.views[role], device) for role, model in found.items()}, store, strategies,
        max_model_len=length, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_mixed_prefill_tokens=_mixed_prefill(config, device), scheduling_policy=config.scheduling_policy,
        eos_token_ids=found[TARGET].eos_token_ids,
        vocab_size=found[TARGET].model.config.vocab_size, max_logprobs=config.max_logprobs, seed=config.seed)
    return engine, found[TARGET]


def _mixed_prefill(config: EngineConfig, device: torch.device) -> int | None:
    if config.max_mixed_prefill_tokens is not None or device.type != "cpu":
        return config.max_mixed_prefill_tokens
    return MIXED_PREFILL


def _open_drafter(name: str, config: EngineConfig, target: OpenModel) -> OpenModel:
    """The drafter finds its own format, but is random where the target is; flags that name the target are not for it."""
    own = replace(config, revision=None, load_format="dummy" if config.load_format == "dummy" else "auto")
    drafter = open_model(name, own)
    # A hidden drafter reads the target's rows, so it computes in the target's dtype.
    fed = config.speculative_config.get("method") == "hidden_drafter"
    return replace(drafter, dtype=target.dtype) if fed else drafter


def _check_roles(found: Mapping[str, LoadedModel], config: EngineConfig) -> None:
    target, draft = found[TARGET], found.get(DRAFT)
    if target.model.feed_width is not None:
        raise ConfigError(f"{target.name} is a drafter over another model's hidden states and generates no text alone; name "
                          'it in speculative_config: {"method": "hidden_drafter", "model": ...}')
    if draft is None:
        return
    where = f"speculative_config: the drafter {draft.name}"
    fed = config.speculative_config.get("method") == "hidden_drafter"
    width, hidden = draft.model.feed_width, target.model.config.hidden_size
    if fed and width is None:
        raise ConfigError(f"{where} reads no hidden states; use method draft_model for it")
    if not fed and width is not None:
        raise ConfigError(f"{where} reads the target's hidden states; use method hidden_drafter for it")
    if width is not None and width != hidden:
        raise ConfigError(f"{where} reads hidden states of width {width}, the target {target.name} has {hidden}")
    wanted, has = target.model.config.vocab_size, draft.model.config.vocab_size
    if wanted != has:
        raise ConfigError(f"{where} has a vocabulary of {has} tokens, the target {target.name} of {wanted}; both must be "
                          "equal")


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
    if device.type == "meta":
        raise ConfigError("device 'meta' holds no data; valid: cpu, cuda and other devices that compute")
    return device


def _max_model_len(opened: Mapping[str, OpenModel], config: EngineConfig) -> int:
    """The configured length, else the shortest of the models' own."""
    lengths: list[int] = []
    for model in opened.values():
        raw = model.checkpoint.config
        most = raw.get("max_position_embeddings") or raw.get("n_positions") or 2048
        if raw.get("model_type") == "gpt2" and (config.max_model_len or 0) > most:
            raise ConfigError(f"max_model_len is {config.max_model_len}; {model.name} has learned positions for {most} tokens "
                              "only")
        lengths.append(most)
    return config.max_model_len or min(lengths)


def _sizes(config: EngineConfig, layouts: Mapping[str, RoleLayout], length: int, rollback: int,
           device: torch.device) -> tuple[int, int]:
    if config.num_pages is not None:
        recurrent = any(layout.state_bytes() for layout in layouts.values())
        return config.num_pages, config.num_states or (2 * config.max_num_seqs * (2 + rollback) if recurrent else 0)
    budget = config.kv_cache_memory_bytes
    if budget is None:
        per_token = sum(layout.kv_bytes_per_token() for layout in layouts.values())
        states = sum(layout.state_bytes() for layout in layouts.values()) * 2 * (2 + rollback)
        useful = config.max_num_seqs * ((length + rollback + config.block_size) * per_token + 2 * states)
        budget = max(1, min(useful, _free_memory(device)))
    return plan_sizes(layouts, config.block_size, budget, config.max_num_seqs, rollback=rollback)


def _free_memory(device: torch.device) -> int:
    """Bytes that the cache may take of what is free on the device, the models' weights being there already."""
    if device.type == "cuda":
        return int(SHARE_OF_FREE_DEVICE_MEMORY * torch.cuda.mem_get_info(device)[0])
    # Half of all memory where the system gives no estimate of its own.
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    return min(DEFAULT_CACHE_BYTES, int(SHARE_OF_FREE_MEMORY * free))


def _fingerprint(opened: OpenModel) -> str:
    """Tells models apart in the prefix key: the configuration, the file and the dtype."""
    text = json.dumps([opened.checkpoint.config, str(opened.path), str(opened.dtype)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
