"""Llama: pre-norm blocks of rotary grouped-query attention and SwiGLU. arXiv 2307.09288, 2407.21783."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from ridgeline.layers.attention import Attention
from ridgeline.layers.block import Part, ResidualBlock
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import Backbone, CausalLM, ModelConfig, embedding


class Block(ResidualBlock):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)). norm(): builds one."""

    def __init__(self, attention: Attention, mlp: nn.Module, norm: Callable[[], nn.Module]):
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def parts(self) -> tuple[Part, Part]:
        return (Part(self.input_layernorm, self.self_attn, None),
                Part(self.post_attention_layernorm, self.mlp, None))


class Llama(CausalLM):
    def __init__(self, config: ModelConfig):
        rotary = config.rotaries()
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps)
        bias = config.raw.get("mlp_bias", False)
        layers: list[nn.Module] = [
            Block(self.attention(config, i, rotary[kind]),
                  GatedMLP(config.hidden_size, config.intermediate_size, config.activation, bias=bias), norm)
            for i, kind in enumerate(config.layer_types)]
        super().__init__(config, Backbone(embedding(config), layers, norm()))

    @staticmethod
    def attention(config: ModelConfig, layer: int, rotary: Rotary) -> Attention:
        bias = config.raw.get("attention_bias", False)
        return config.attention(layer, rotary, bias=bias, out_bias=bias)
