"""OLMo 2: norms after attention and MLP instead of before, and on the whole q and k projections. arXiv 2501.00656."""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from ridgeline.layers.attention import Attention
from ridgeline.layers.block import Part, ResidualBlock
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import Backbone, CausalLM, ModelConfig, embedding


class Block(ResidualBlock):
    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def parts(self) -> tuple[Part, Part]:
        return (Part(None, self.self_attn, self.post_attention_layernorm),
                Part(None, self.mlp, self.post_feedforward_layernorm))


class Olmo2(CausalLM):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def __init__(self, config: ModelConfig):
        rotary = config.rotaries()
        layers: list[nn.Module] = [Block(config, self.attention(config, i, rotary[kind]))
                                   for i, kind in enumerate(config.layer_types)]
        super().__init__(config, Backbone(embedding(config), layers, RMSNorm(config.hidden_size, config.norm_eps)))

    @staticmethod
    def attention(config: ModelConfig, layer: int, rotary: Rotary) -> Attention:
        bias = config.raw.get("attention_bias", False)
        return config.attention(layer, rotary, bias=bias, out_bias=bias, norm_over="all",
                                norm=partial(RMSNorm, eps=config.norm_eps))
