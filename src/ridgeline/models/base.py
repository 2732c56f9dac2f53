"""What every model family shares: reading the config, the shape of a causal language model, its declarations."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.errors import UnsupportedModel
from ridgeline.layers.rope import Rotary, build_rotary
from ridgeline.types import LayerState
from ridgeline.weights.mapping import From


@dataclass(frozen=True)
class ModelConfig:
    """The fields that most families share, read from a Hugging Face config.json; `raw` holds the rest."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: str
    max_position: int
    tied: bool
    layer_types: tuple[str, ...]           # "full_attention" | "sliding_attention" | "linear_attention", one a layer
    sliding_window: int | None
    max_model_len: int                     # the longest context that this engine serves
    raw: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, max_model_len: int | None = None, **defaults: Any) -> ModelConfig:
        """defaults: values a family assumes where its config.json is silent, under Hugging Face field names."""
        values = {**defaults, **{k: v for k, v in raw.items() if v is not None}}

        def need(*names: str) -> Any:
            for name in names:
                if name in values:
                    return values[name]
            raise UnsupportedModel(f"config.json of model_type {raw.get('model_type')!r} lacks {names[0]!r}")

        heads, hidden = need("num_attention_heads", "n_head"), need("hidden_size", "n_embd")
        layers, max_position = need("num_hidden_layers", "n_layer"), need("max_position_embeddings", "n_positions")
        types = tuple(values.get("layer_types") or ("full_attention",) * layers)
        if len(types) != layers:
            raise UnsupportedModel(f"config.json: layer_types has {len(types)} entries for {layers} layers")
        return cls(
            model_type=raw["model_type"], vocab_size=need("vocab_size"), hidden_size=hidden, num_layers=layers,
            num_heads=heads, num_kv_heads=values.get("num_key_value_heads", heads),
            head_dim=values.get("head_dim", hidden // heads),
            intermediate_size=values.get("intermediate_size", 4 * hidden),
            norm_eps=values.get("rms_norm_eps", 1e-6),
            activation=values.get("hidden_activation") or values.get("hidden_act", "silu"),
            max_position=max_position, tied=values.get("tie_word_embeddings", False), layer_types=types,
            sliding_window=values.get("sliding_window"), max_model_len=max_model_len or max_position, raw=values)

    def rope_parameters(self, layer_type: str = "full_attention") -> dict[str, Any]:
        """The rotation's settings for one kind of layer, from the new (`rope_parameters`) or the old fields."""
        new = self.raw.get("rope_parameters")
        if new:
            found = dict(new.get(layer_type, new))
        else:
            found = {**(self.raw.get("rope_scaling") or {})}
            found["rope_type"] = found.get("rope_type", found.get("type", "default"))
        found.setdefault("rope_theta", self.raw.get("rope_theta", 10000.0))
        found.setdefault("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0))
        if "original_max_position_embeddings" in self.raw:
            found.setdefault("original_max_position_embeddings", self.raw["original_max_position_embeddings"])
        elif found.get("rope_type") in ("yarn", "llama3", "longrope"):
            found.setdefault("original_max_position_embeddings", self.max_position)
        return found

    def rotary(self, layer_type: str = "full_attention", head_dim: int | None = None, **override: Any) -> Rotary:
        return build_rotary({**self.rope_parameters(layer_type), **override}, head_dim or self.head_dim,
                            max_position=self.max_position, max_model_len=self.max_model_len)

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


@dataclass
class ModelOutput:
    """hidden: (W, hidden) rows after the final norm, those of batch.wanted or all; taps: layer -> (T, hidden)."""

    hidden: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)


class Backbone(nn.Module):
    """embed_tokens, layers, norm: `model.*` in the checkpoints of most families."""

    def __init__(self, embed_tokens: nn.Module, layers: list[nn.Module], norm: nn.Module):
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embed_tokens, nn.ModuleList(layers), norm

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> ModelOutput:
        """x: (T, hidden), embedded tokens or fed rows."""
        taps = {}
        for index, layer in enumerate(self.layers):
            if index in batch.taps:
                taps[index] = x
            x = layer(x, batch, state)
        if len(self.layers) in batch.taps:
            taps[len(self.layers)] = x
        return ModelOutput(self.norm(x if batch.wanted is None else x[batch.wanted]), taps)


class CausalLM(nn.Module):
    """A backbone and a head. A family's __init__ builds both; parameter names are those of its checkpoints.

    Subclasses override `embed` (scaled embeddings), `logits` (soft-caps) or `sources` (fused or transposed tensors).
    """

    def __init__(self, config: ModelConfig, model: Backbone):
        super().__init__()
        self.config, self.model = config, model
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = model.embed_tokens.weight  # type: ignore[assignment]

    def embed(self, tokens: Tensor) -> Tensor:
        """(T,) ids -> (T, hidden)."""
        out: Tensor = self.model.embed_tokens(tokens)
        return out

    def forward(self, batch: Batch, state: CacheView | None = None) -> ModelOutput:
        """One pass over the batch. state: the role's cache, or None for whole sequences without one."""
        x = batch.feed if batch.tokens is None else self.embed(batch.tokens)
        assert x is not None
        out: ModelOutput = self.model(x, batch, state)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(W, hidden) -> (W, vocabulary), in the model's dtype."""
        out: Tensor = self.lm_head(hidden)
        return out

    def state_spec(self) -> tuple[LayerState, ...]:
        """What each layer keeps between steps. Default: every block has one mixer that knows."""
        return tuple(block.mixer().state_spec() for block in self.model.layers)

    def sources(self) -> dict[str, From]:
        """Parameters whose checkpoint tensor has another name or layout; the rest are found under their own names."""
        return {}


def embedding(config: ModelConfig) -> nn.Embedding:
    return nn.Embedding(config.vocab_size, config.hidden_size)
