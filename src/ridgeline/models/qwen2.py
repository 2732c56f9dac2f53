"""Qwen2 and Qwen2.5: Llama with biased q, k, v; the layers from max_window_layers on may slide. arXiv 2407.10671."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ridgeline.layers.attention import Attention
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import FULL, SLIDING, ModelConfig
from ridgeline.models.llama import Llama


class Qwen2(Llama):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        if not values.get("use_sliding_window"):
            values.pop("sliding_window", None)
        first = values.get("max_window_layers", 0) if "sliding_window" in values else values.get("num_hidden_layers", 0)
        values.setdefault("layer_types", [SLIDING if i >= first else FULL
                                          for i in range(values.get("num_hidden_layers", 0))])

    @staticmethod
    def attention(config: ModelConfig, layer: int, rotary: Rotary) -> Attention:
        return config.attention(layer, rotary, bias=True)
