"""Qwen3.5, the dense text model: three Gated DeltaNet layers to each layer of gated softmax attention.

Norms multiply by 1 + w. Attention rotates a part of each head; the three position axes of the multimodal model are one
and the same for text. https://huggingface.co/Qwen
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.errors import UnsupportedModel
from ridgeline.layers.attention import Attention, attend_cached
from ridgeline.layers.block import Part, ResidualBlock
from ridgeline.layers.delta import GatedDeltaNet
from ridgeline.layers.mlp import GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.rope import Rotary
from ridgeline.models.base import FULL, LINEAR, SLIDING, Backbone, CausalLM, ModelConfig, embedding


def norm(config: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, plus_one=True)


class GatedAttention(Attention):
    """Attention whose output is multiplied by sigmoid(gate); q_proj yields [q | gate] for each head."""

    def __init__(self, layer: int, config: ModelConfig, rotary: Rotary):
        bias = config.raw.get("attention_bias", False)
        super().__init__(layer, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
                         rotary=rotary, bias=bias, out_bias=bias, norm=lambda size: norm(config, size))
        self.q_proj = nn.Linear(config.hidden_size, 2 * config.num_heads * config.head_dim, bias=bias)

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)        # (T, heads, d) each
        k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, k, batch)
        out = attend_cached(q, k, v, batch, state, self.layer, scale=self.scale)
        projected: Tensor = self.o_proj((out * gate.sigmoid()).flatten(1))
        return projected


class Block(ResidualBlock):
    """Either mixer under the name it has in the checkpoint: linear_attn or self_attn."""

    def __init__(self, config: ModelConfig, mixer: GatedDeltaNet | GatedAttention):
        super().__init__()
        self.input_layernorm = norm(config, config.hidden_size)
        self.mixer_name = "self_attn" if isinstance(mixer, GatedAttention) else "linear_attn"
        self.add_module(self.mixer_name, mixer)
        self.post_attention_layernorm = norm(config, config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)

    def parts(self) -> tuple[Part, Part]:
        return (Part(self.input_layernorm, self.get_submodule(self.mixer_name), None),
                Part(self.post_attention_layernorm, self.mlp, None))


class Qwen35Text(CausalLM):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        every = values["full_attention_interval"]
        values.setdefault("layer_types", [LINEAR if (i + 1) % every else FULL
                                          for i in range(values.get("num_hidden_layers", 0))])

    def __init__(self, config: ModelConfig):
        raw, rotary = config.raw, config.rotary()
        if SLIDING in config.layer_types:
            raise UnsupportedModel(f"config.json: layer_types names {SLIDING}; {config.model_type} supports {FULL}, "
                                   f"{LINEAR}")
        key_heads, value_heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
        if value_heads % key_heads:
            raise UnsupportedModel(f"config.json: linear_num_value_heads {value_heads} is no multiple of "
                                   f"linear_num_key_heads {key_heads}")

        def mixer(layer: int, kind: str) -> GatedDeltaNet | GatedAttention:
            if kind == FULL:
                return GatedAttention(layer, config, rotary)
            return GatedDeltaNet(layer, config.hidden_size, key_heads, value_heads, raw["linear_key_head_dim"],
                                 raw["linear_value_head_dim"], width=raw["linear_conv_kernel_dim"],
                                 eps=config.norm_eps, act=config.activation)

        layers: list[nn.Module] = [Block(config, mixer(i, kind)) for i, kind in enumerate(config.layer_types)]
        super().__init__(config, Backbone(embedding(config), layers, norm(config, config.hidden_size)))
