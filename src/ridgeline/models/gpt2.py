"""GPT-2: LayerNorm, learned positions, multi-head attention and a plain MLP, biases everywhere.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Checkpoints store linear layers as Conv1D,
(in, out), and q, k, v as one tensor; here they are ordinary linear layers under the names of the other families.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.errors import ConfigError
from ridgeline.layers.attention import Attention
from ridgeline.layers.mlp import MLP
from ridgeline.models.base import Backbone, CausalLM, ModelConfig, ModelOutput, embedding
from ridgeline.models.llama import Block
from ridgeline.weights.mapping import From


class Positioned(Backbone):
    """A backbone whose input carries a learned vector for each absolute position."""

    def __init__(self, embed_tokens: nn.Module, embed_positions: nn.Module, layers: list[nn.Module], norm: nn.Module):
        super().__init__(embed_tokens, layers, norm)
        self.embed_positions = embed_positions

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> ModelOutput:
        return super().forward(x + self.embed_positions(batch.positions), batch, state)


class GPT2(CausalLM):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}

    def __init__(self, config: ModelConfig):
        config.require("add_cross_attention", False)
        if config.max_model_len > config.max_position:
            raise ConfigError(f"max_model_len is {config.max_model_len}; this gpt2 has {config.max_position} learned "
                              "positions, and no more are possible")
        norm = partial(nn.LayerNorm, config.hidden_size, eps=config.norm_eps)
        layers: list[nn.Module] = [
            Block(self.attention(config, i), MLP(config.hidden_size, config.intermediate_size, config.activation), norm)
            for i in range(config.num_layers)]
        positions = embedding(config, config.max_position)
        super().__init__(config, Positioned(embedding(config), positions, layers, norm()))

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        scale = config.head_dim ** -0.5 if config.raw.get("scale_attn_weights", True) else 1.0
        if config.raw.get("scale_attn_by_inverse_layer_idx"):
            scale /= layer + 1
        return config.attention(layer, None, bias=True, out_bias=True, scale=scale)

    def sources(self) -> dict[str, From]:
        hidden = self.config.hidden_size
        found = {"model.embed_tokens.weight": From("transformer.wte.weight"),
                 "model.embed_positions.weight": From("transformer.wpe.weight")}
        for leaf in ("weight", "bias"):
            found[f"model.norm.{leaf}"] = From(f"transformer.ln_f.{leaf}")
            for i in range(self.config.num_layers):
                ours, theirs, turn = f"model.layers.{i}", f"transformer.h.{i}", leaf == "weight"
                found[f"{ours}.input_layernorm.{leaf}"] = From(f"{theirs}.ln_1.{leaf}")
                found[f"{ours}.post_attention_layernorm.{leaf}"] = From(f"{theirs}.ln_2.{leaf}")
                for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
                    found[f"{ours}.self_attn.{name}.{leaf}"] = From(
                        f"{theirs}.attn.c_attn.{leaf}", rows=(part * hidden, (part + 1) * hidden), transpose=turn)
                for name, stored in (("self_attn.o_proj", "attn.c_proj"), ("mlp.up_proj", "mlp.c_fc"),
                                     ("mlp.down_proj", "mlp.c_proj")):
                    found[f"{ours}.{name}.{leaf}"] = From(f"{theirs}.{stored}.{leaf}", transpose=turn)
        return found
