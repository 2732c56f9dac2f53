"""Gemma 3, text: Gemma 2 with norms on query and key heads instead of the attention soft-cap. arXiv 2503.19786.

Five sliding layers with a RoPE base of their own to every full one; RoPE scaling concerns the full ones only.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from ridgeline.layers.attention import Attention
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import FULL, SLIDING, ModelConfig
from ridgeline.models.gemma2 import Gemma2


class Gemma3Text(Gemma2):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Gemma2.DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "attn_logit_softcapping": None,
        "final_logit_softcapping": None}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", 6))
        values.setdefault("layer_types", [SLIDING if (i + 1) % pattern else FULL
                                          for i in range(values.get("num_hidden_layers", 0))])
        new = values.get("rope_parameters") or {}
        values["rope_parameters"] = {
            FULL: {"rope_theta": values.get("rope_theta", 1e6),
                   **(new.get(FULL) or values.get("rope_scaling") or {})},
            SLIDING: {"rope_theta": values.get("rope_local_base_freq", 1e4), **(new.get(SLIDING) or {})}}

    @staticmethod
    def attention(config: ModelConfig, layer: int, rotary: Rotary) -> Attention:
        bias = config.raw.get("attention_bias", False)
        return config.attention(layer, rotary, bias=bias, out_bias=bias,
                                scale=config.raw["query_pre_attn_scalar"] ** -0.5,
                                norm=partial(RMSNorm, eps=config.norm_eps, plus_one=True))
