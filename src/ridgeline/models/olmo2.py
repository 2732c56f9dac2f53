"""OLMo 2: norms after attention and MLP instead of before, and on the whole q and k projections. arXiv 2501.00656."""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.layers.attention import Attention
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import Backbone, CausalLM, ModelConfig, embedding


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def mixer(self) -> Attention:
        return self.self_attn

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, batch, state))
        out: Tensor = x + self.post_feedforward_layernorm(self.mlp(x, batch))
        return out


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
