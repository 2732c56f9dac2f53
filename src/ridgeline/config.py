"""The one configuration of an engine: typed, frozen, resolved once. Flag names follow vLLM's."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ridgeline.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What `LLM(model, **config)` and the command line accept. Sizes are in tokens unless the name says bytes."""

    tokenizer: str | None = None             # folder or file; None = the model's own
    revision: str | None = None              # of a hub id
    load_format: str = "auto"                # auto | safetensors | gguf | dummy
    dtype: str = "auto"                      # of weights and activations; auto = the checkpoint's, bfloat16 for GGUF
    kv_cache_dtype: str = "auto"             # auto = dtype
    device: str = "cpu"                      # any device torch knows
    max_model_len: int | None = None         # longest prompt + output; None = the model's, as far as the cache holds it
    block_size: int = 16                     # positions in a cache page
    kv_cache_memory_bytes: int | None = None   # for pages and recurrent states of all models; None = from free memory
    num_pages: int | None = None             # explicit pages per model, instead of a memory budget
    num_states: int | None = None            # explicit recurrent-state slots per model
    max_num_seqs: int = 64                   # sequences that run at once
    max_num_batched_tokens: int = 512        # rows of one forward pass
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
        for name in ("dtype", "kv_cache_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; valid: {', '.join(DTYPES)}")
        for name in ("max_model_len", "block_size", "kv_cache_memory_bytes", "num_pages", "num_states", "max_num_seqs",
                     "max_num_batched_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")
        if not isinstance(self.max_logprobs, int) or self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs is {self.max_logprobs!r}; it must be an integer of at least 0")
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed is {self.seed!r}; it must be an integer")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """raises ConfigError that lists the valid names."""
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}; valid: {', '.join(names)}")
        return cls(**options)
