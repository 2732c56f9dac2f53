"""Llama: pre-norm blocks of rotary grouped-query attention and SwiGLU. arXiv 2307.09288, 2407.21783."""
from __future__ import annotations

from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.layers.attention import Attention
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.models.base import Backbone, CausalLM, ModelConfig, embedding


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation,
                            bias=config.raw.get("mlp_bias", False))

    def mixer(self) -> Attention:
        return self.self_attn

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, state)
        return x + self.mlp(self.post_attention_layernorm(x), batch)


class Llama(CausalLM):
    def __init__(self, config: ModelConfig):
        rotary = config.rotary()
        bias = config.raw.get("attention_bias", False)
        layers: list[nn.Module] = [
            Block(config, Attention(i, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
                                    rotary=rotary, bias=bias, out_bias=bias))
            for i in range(config.num_layers)]
        super().__init__(config, Backbone(embedding(config), layers, RMSNorm(config.hidden_size, config.norm_eps)))
