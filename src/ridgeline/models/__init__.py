"""The model families. A family is one file named after its model_type; MODELS is the whole registry."""
from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from ridgeline.errors import UnsupportedModel
from ridgeline.models.base import CausalLM, ModelConfig

MODELS = {
    "gemma2": "gemma2:Gemma2",
    "gemma3_text": "gemma3_text:Gemma3Text",
    "gpt2": "gpt2:GPT2",
    "hidden_drafter": "hidden_drafter:HiddenDrafter",
    "llama": "llama:Llama",
    "mistral": "mistral:Mistral",
    "olmo2": "olmo2:Olmo2",
    "phi3": "phi3:Phi3",
    "qwen2": "qwen2:Qwen2",
    "qwen3": "qwen3:Qwen3",
    "qwen3_5_text": "qwen3_5_text:Qwen35Text",
    "sdar": "sdar:SDAR",
}


def build_model(raw: Mapping[str, Any], *, max_model_len: int | None = None) -> CausalLM:
    """Build the model of a config.json on the meta device: shapes, no memory.

    raises UnsupportedModel with the known model types, or with the field that is missing.
    """
    model_type = raw.get("model_type")
    if model_type not in MODELS:
        raise UnsupportedModel(f"model_type {model_type!r} has no implementation; known: {', '.join(sorted(MODELS))}")
    module, name = MODELS[model_type].split(":")
    family: Any = getattr(importlib.import_module(f"ridgeline.models.{module}"), name)
    config = ModelConfig.read(raw, max_model_len=max_model_len, complete=family.complete, **family.DEFAULTS)
    with torch.device("meta"):
        model: CausalLM = family(config)
    return model.eval()
