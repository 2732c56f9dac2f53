"""The one configuration of an engine: typed, frozen, resolved once. Flag names follow vLLM's."""
from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any

from ridgeline.errors import ConfigError

BACKENDS = ("auto", "native", "torch")
ACTIVATION_DTYPES = ("auto", "int8", "bfloat16", "float32")
QUANTIZATIONS = (None, "int8", "int4")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
KV_CACHE_DTYPES = (*DTYPES, "int8")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What `LLM(model, **config)` and the command line accept. Sizes are in tokens unless the name says bytes."""

    tokenizer: str | None = None             # folder or file; None = the model's own
    skip_tokenizer_init: bool = False        # run without a tokenizer: token ids in, token ids out
    revision: str | None = None              # of a hub id
    load_format: str = "auto"                # auto | safetensors | gguf | dummy
    dtype: str = "auto"                      # of weights and activations; auto = the checkpoint's, bfloat16 for GGUF
    kv_cache_dtype: str = "auto"             # auto = dtype; int8: with one scale per (token, KV head)
    device: str = "cpu"                      # any device torch knows
    backend: str = "auto"                    # auto | native | torch; auto = native on a CPU
    strict_native: bool = False              # a layer that the native backend declines is an error
    activation_dtype: str = "auto"           # native: int8 | bfloat16 | float32; auto = int8, exact at float32
    quantization: str | None = None          # int8 | int4: quantise float weights at load (native backend)
    max_model_len: int | None = None         # longest prompt + output; None = the model's, as far as the cache holds it
    block_size: int = 16                     # positions in a cache page
    kv_cache_memory_bytes: int | None = None   # for pages and recurrent states of all models; None = from free memory
    num_pages: int | None = None             # explicit pages per model, instead of a memory budget
    num_states: int | None = None            # explicit recurrent-state slots per model
    max_num_seqs: int = 64                   # sequences that run at once
    max_num_batched_tokens: int = 512        # rows of one forward pass
    max_mixed_prefill_tokens: int | None = None   # prompt rows beside decoding ones; None = 128 on a CPU, else no limit
    scheduling_policy: str = "fcfs"          # fcfs | priority | static
    enable_prefix_caching: bool = True
    seed: int = 0                            # of requests that bring none
    max_logprobs: int = 20
    speculative_config: Mapping[str, Any] = field(default_factory=dict)   # {"method": ..., "model": ..., ...}
    diffusion_config: Mapping[str, Any] = field(default_factory=dict)     # options of BlockDiffusion
    chat_template: str | None = None         # text of a template that replaces the model's
    threads: int | None = None               # torch threads; None = the cores this process may use
    progress: bool | None = None             # progress bars; None = when standard error is a terminal

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "kv_cache_memory_bytes", "num_pages", "num_states", "max_num_seqs",
                     "max_num_batched_tokens", "max_mixed_prefill_tokens", "threads"):
            optional = name not in ("block_size", "max_num_seqs", "max_num_batched_tokens")
            self._integer(name, least=1, optional=optional)
        self._integer("max_logprobs", least=0)
        self._integer("seed")
        for name, valid in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES), ("backend", BACKENDS),
                            ("activation_dtype", ACTIVATION_DTYPES), ("quantization", QUANTIZATIONS)):
            if getattr(self, name) not in valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; valid: {', '.join(map(str, valid))}")
        for name in ("load_format", "device", "scheduling_policy"):
            self._kind(name, str, "a string")
        for name in ("tokenizer", "revision", "chat_template"):
            self._kind(name, (str, NoneType), "a string or None")
        for name in ("enable_prefix_caching", "skip_tokenizer_init", "strict_native"):
            self._kind(name, bool, "True or False")
        self._kind("progress", (bool, NoneType), "True, False or None")
        for name in ("speculative_config", "diffusion_config"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, {})
            self._kind(name, Mapping, "a mapping of options")
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError(f"tokenizer is {self.tokenizer!r} and skip_tokenizer_init is True; give one of them")
        if self.backend == "torch" and (self.quantization is not None or self.strict_native or self.activation_dtype != "auto"):
            raise ConfigError("backend is 'torch'; quantization, strict_native and activation_dtype need the native one")
        if self.backend == "native" and self.device != "cpu":
            raise ConfigError(f"device is {self.device!r}; the native backend runs on 'cpu'")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(f"num_pages is {self.num_pages} and kv_cache_memory_bytes {self.kv_cache_memory_bytes}; give "
                              "one of them")
        if self.num_states is not None and self.num_pages is None:
            raise ConfigError(f"num_states is {self.num_states} without num_pages; give both, or kv_cache_memory_bytes alone")

    def _kind(self, name: str, kind: Any, allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise ConfigError(f"{name} is {value!r}; it must be {allowed}")

    def _integer(self, name: str, *, least: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            allowed = "an integer" if least is None else f"an integer of at least {least}"
            raise ConfigError(f"{name} is {value!r}; it must be {allowed}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """raises ConfigError that lists the valid names."""
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            near = difflib.get_close_matches(unknown[0], names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ";"
            raise ConfigError(f"unknown option {', '.join(unknown)}{hint} valid: {', '.join(names)}")
        return cls(**options)
