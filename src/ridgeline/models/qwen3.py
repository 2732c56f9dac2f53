"""Qwen3, dense: Qwen2 without the biases, with an RMS norm on each query and key head. arXiv 2505.09388."""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from ridgeline.layers.attention import Attention
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import ModelConfig
from ridgeline.models.qwen2 import Qwen2


class Qwen3(Qwen2):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Qwen2.DEFAULTS, "head_dim": 128}

    @staticmethod
    def attention(config: ModelConfig, layer: int, rotary: Rotary) -> Attention:
        bias = config.raw.get("attention_bias", False)
        return config.attention(layer, rotary, bias=bias, out_bias=bias, norm=partial(RMSNorm, eps=config.norm_eps))
