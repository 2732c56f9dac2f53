"""Small models of odd shapes, and what torch computes when they run: multiply-adds by the module that asked for them."""
from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.batch import Batch
from ridgeline.cache.store import CacheStore
from ridgeline.cache.view import RoleLayout
from ridgeline.decoding.base import Run
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM
from ridgeline.runner import Slice, build_batch

COMMON = {"vocab_size": 59, "hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}
GEMMA = {"sliding_window": 5, "query_pre_attn_scalar": 6, "sliding_window_pattern": 2}
# H * h is 24 and d is 20 unless said otherwise.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-one-key-head": {"model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-multi-head": {"model_type": "llama", "num_key_value_heads": 4},
    "mistral-window": {"model_type": "mistral", "sliding_window": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "gemma3": {"model_type": "gemma3_text", **GEMMA},
    "olmo2": {"model_type": "olmo2"},
    "qwen3.5": {"model_type": "qwen3_5_text", "head_dim": 8, "full_attention_interval": 3, "linear_num_key_heads": 2,
                "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
                "linear_conv_kernel_dim": 4, "rope_parameters": {
                    "rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"}},
    "gpt2": {"model_type": "gpt2", "head_dim": None, "num_key_value_heads": None, "intermediate_size": 44},
}


def config(name: str) -> dict[str, Any]:
    return {k: v for k, v in {**COMMON, **MODELS[name]}.items() if v is not None}


def cores_name(name: str) -> bool:
    return name.endswith(("self_attn", "linear_attn"))


def build(name: str) -> CausalLM:
    """With random fp32 weights."""
    model = build_model(config(name)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


class MultiplyAdds(TorchDispatchMode):
    """Counts those of every matrix product, under the name of the innermost module that runs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.found: dict[str, int] = defaultdict(int)
        self.running: list[str] = [""]
        self.hooks = []
        for name, module in model.named_modules():
            self.hooks += [module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name)),
                           module.register_forward_hook(self.leave)]

    def leave(self, *_: Any) -> None:
        self.running.pop()

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in ("mm", "bmm"):
            self.found[self.running[-1]] += out.numel() * args[0].shape[-1]
        elif name == "addmm":
            self.found[self.running[-1]] += out.numel() * args[1].shape[-1]
        return out

    def total(self) -> int:
        return sum(self.found.values())

    def cores(self) -> int:
        """Of attention without its projections."""
        return sum(n for name, n in self.found.items() if cores_name(name))


def run(model: CausalLM, batch: Batch, state: Any = None) -> MultiplyAdds:
    """One pass, head included, on the reference layers."""
    with torch.no_grad(), MultiplyAdds(model) as counted:
        model.logits(model(batch, state).hidden)
    return counted


class Cached:
    """A model on a cache; each row of a pass is a sequence."""

    def __init__(self, model: CausalLM, page_size: int = 4, dtype: torch.dtype = torch.float32):
        self.model = model
        layout = RoleLayout(model.state_spec(), dtype, "traced")
        self.store = CacheStore({"target": layout}, page_size=page_size, num_pages=96, num_states=64, prefix_caching=False)
        self.view = self.store.views["target"]

    def step(self, runs: dict[str, Run], **options: Any) -> tuple[Batch, MultiplyAdds]:
        """One pass over the whole of each sequence's run; nothing is committed."""
        slices = []
        for name, wanted in runs.items():
            placement = self.store.reserve(name, "target", wanted.tokens, write=wanted.written(), **options)
            slices.append(Slice(None, wanted, 0, len(wanted.tokens), placement))          # type: ignore[arg-type]
        batch = build_batch(slices, self.view.page_size)
        return batch, run(self.model, batch, self.view)

    def fill(self, name: str, tokens: int) -> None:
        """A sequence that holds so many tokens."""
        self.store.add(name, [1] * (tokens + 1))
        if tokens:
            self.step({name: Run("target", [1] * tokens)})
            self.store.commit(name)
