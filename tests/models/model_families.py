"""Tiny random checkpoints of every family, made by transformers, and the same loaded here. Shared by tests/models."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from ridgeline.cache.store import CacheStore
from ridgeline.cache.view import RoleLayout
from ridgeline.decoding.base import Run
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM
from ridgeline.runner import Slice, build_batch
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.load import load_weights

VOCAB, WINDOW, PAGE = 256, 6, 8


@dataclass(frozen=True)
class Family:
    """config: the transformers class; options: what differs from COMMON; model_type: written over the saved one."""

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    plus_one: bool = False


COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
          "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}
GPT2_COMMON = {"vocab_size": VOCAB, "n_embd": 64, "n_inner": 96, "n_layer": 4, "n_head": 4, "n_positions": 128,
               "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}
SLIDING = {"sliding_window": WINDOW}
GEMMA = {**SLIDING, "hidden_size": 48, "head_dim": 24, "query_pre_attn_scalar": 20}

FAMILIES = {
    "llama": Family("LlamaConfig"),
    "llama-multi-head": Family("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-multi-query": Family("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-biases": Family("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Family("MistralConfig", SLIDING),
    "mistral-full": Family("MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "qwen2": Family("Qwen2Config"),
    "qwen2-sliding": Family("Qwen2Config", {**SLIDING, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": Family("Qwen3Config", {"head_dim": 24}),
    "phi3": Family("Phi3Config", {**SLIDING, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default",
                                                                 "partial_rotary_factor": 0.5}}),
    "olmo2": Family("Olmo2Config", {"attention_bias": True}),
    "gemma2": Family("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
                     plus_one=True),
    "gemma3_text": Family("Gemma3TextConfig", {
        **GEMMA, "sliding_window_pattern": 3, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, plus_one=True),
    "gpt2": Family("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
    "sdar": Family("Qwen3Config", {"head_dim": 24}, model_type="sdar"),
}


def model_type(family: Family) -> str:
    """As it stands in the checkpoint's config.json."""
    found: str = family.model_type or getattr(transformers, family.config).model_type
    return found


def reference(family: Family, seed: int = 0) -> Any:
    """A transformers model in eval mode with every weight random, norms and biases too."""
    common = GPT2_COMMON if family.config == "GPT2Config" else COMMON
    config = getattr(transformers, family.config)(**{**common, **family.options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):                          # a norm
                parameter.copy_(noise * 0.3 + (0.0 if family.plus_one else 1.0))
            else:
                parameter.copy_(noise * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
    return model


def save(model: Any, folder: Path, model_type: str | None = None) -> dict[str, Any]:
    """Write the checkpoint and return its config.json."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    if model_type:
        config["model_type"] = model_type
        path.write_text(json.dumps(config))
    return config


def load(folder: Path, *, dtype: torch.dtype = torch.float32, max_model_len: int | None = None) -> CausalLM:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, max_model_len=max_model_len)
    load_weights(model, checkpoint, dtype=dtype)
    return model


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Cached:
    """A model over a cache store: runs slices of sequences and returns their logits."""

    def __init__(self, model: CausalLM, *, page_size: int = PAGE, num_pages: int = 64):
        self.model, self.dtype = model, model.lm_head.weight.dtype
        layout = RoleLayout(model.state_spec(), self.dtype, "tiny")
        self.store = CacheStore({"target": layout}, page_size=page_size, num_pages=num_pages, num_states=64,
                                prefix_caching=False)
        self.view = self.store.views["target"]

    def add(self, name: str, prompt: list[int]) -> None:
        self.store.add(name, prompt)

    @torch.no_grad()
    def run(self, runs: dict[str, Run], **options: Any) -> dict[str, torch.Tensor]:
        """One forward over the whole of each run; name -> (tokens of the run, vocabulary)."""
        slices = []
        for name, run in runs.items():
            placement = self.store.reserve(name, "target", run.tokens, write=run.written(), **options)
            slices.append(Slice(None, run, 0, len(run.tokens), placement))          # type: ignore[arg-type]
        out = self.model(build_batch(slices, self.view.page_size), self.view)
        logits = self.model.logits(out.hidden).split([s.count for s in slices])
        self.store.check_integrity()
        return dict(zip(runs, logits))

    def prefill(self, name: str, prompt: list[int], chunk: int) -> torch.Tensor:
        """The prompt in chunks of at most this many tokens, committed one by one -> (prompt, vocabulary)."""
        self.add(name, prompt)
        out = []
        for a in range(0, len(prompt), chunk):
            out.append(self.run({name: Run("target", prompt[a:a + chunk])})[name])
            self.store.commit(name)
        return torch.cat(out)
