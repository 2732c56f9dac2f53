"""Gemma 2: scaled embeddings, (1 + w) norms around attention and MLP, soft-caps, every other layer sliding.

arXiv 2408.00118.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ridgeline.layers.attention import Attention
from ridgeline.layers.block import Part, ResidualBlock
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import FULL, SLIDING, Backbone, CausalLM, ModelConfig, embedding


class Block(ResidualBlock):
    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.input_layernorm = norm(config)
        self.self_attn = attention
        self.post_attention_layernorm = norm(config)
        self.pre_feedforward_layernorm = norm(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = norm(config)

    def parts(self) -> tuple[Part, Part]:
        return (Part(self.input_layernorm, self.self_attn, self.post_attention_layernorm),
                Part(self.pre_feedforward_layernorm, self.mlp, self.post_feedforward_layernorm))


class Gemma2(CausalLM):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256000, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        values.setdefault("layer_types", [FULL if i % 2 else SLIDING
                                          for i in range(values.get("num_hidden_layers", 0))])

    def __init__(self, config: ModelConfig):
        config.require("use_bidirectional_attention", False)
        rotary = config.rotaries()
        layers: list[nn.Module] = [Block(config, self.attention(config, i, rotary[kind]))
                                   for i, kind in enumerate(config.layer_types)]
        super().__init__(config, Backbone(embedding(config), layers, norm(config)))
        self.embed_scale = config.hidden_size ** 0.5
        self.capped = config.raw.get("final_logit_softcapping") is not None

    @staticmethod
    def attention(config: ModelConfig, layer: int, rotary: Rotary) -> Attention:
        return config.attention(layer, rotary, bias=config.raw.get("attention_bias", False),
                                out_bias=config.raw.get("attention_bias", False),
                                scale=config.raw["query_pre_attn_scalar"] ** -0.5,
                                softcap=config.raw.get("attn_logit_softcapping"))

    def cap(self, logits: Tensor) -> Tensor:
        cap = self.config.raw.get("final_logit_softcapping")
        return logits if cap is None else torch.tanh(logits / cap) * cap


def norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, plus_one=True)
