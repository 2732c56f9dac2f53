"""A dense family whose attention has sinks, registered while tests run: those of gpt_oss are mixtures of experts."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from ridgeline.layers.attention import Attention
from ridgeline.layers.rope import Rotary
from ridgeline.models import MODELS
from ridgeline.models.base import FULL, SLIDING, ModelConfig
from ridgeline.models.llama import Llama
from tiny_checkpoint import write_model


class WithSinks(Llama):
    """Llama with sinks; where the config says so, a sliding window on every other layer, as gpt_oss has it, and a soft-cap."""

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        if "sliding_window" in values:
            values.setdefault("layer_types", [FULL if i % 2 else SLIDING for i in range(values["num_hidden_layers"])])

    @staticmethod
    def attention(config: ModelConfig, layer: int, rotary: Rotary) -> Attention:
        bias = config.raw.get("attention_bias", False)
        return config.attention(layer, rotary, bias=bias, out_bias=bias, sinks=True,
                                softcap=config.raw.get("attn_logit_softcapping"))


@contextmanager
def registered() -> Iterator[None]:
    """model_type "with_sinks" is known meanwhile."""
    module = "ridgeline.models.with_sinks"
    with patch.dict(MODELS, {"with_sinks": "with_sinks:WithSinks"}):
        sys.modules[module] = sys.modules[__name__]
        try:
            yield
        finally:
            del sys.modules[module]


def write_with_sinks(folder: Path, *, spread: float = 2.0, sinks: float | None = None, **config: Any) -> Path:
    """A checkpoint whose sinks are far from each other, so that one at another head's place shows; or all of one value."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, sharpness=1.0, model_type="with_sinks", **config)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(11)
    tensors = load_file(path)
    for name, old in tensors.items():
        if name.endswith(".self_attn.sinks"):
            values = spread * torch.randn(old.shape, generator=generator)
            tensors[name] = values if sinks is None else torch.full_like(old, sinks)
    save_file(tensors, path)
    return folder
