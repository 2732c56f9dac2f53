"""What every model family shares: reading the config, the shape of a causal language model, its declarations."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.errors import UnsupportedModel
from ridgeline.layers.attention import Attention
from ridgeline.layers.rope import Rotary, build_rotary
from ridgeline.models.backend import TopHead, WholePass
from ridgeline.types import LayerState
from ridgeline.weights.mapping import From

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


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
    sliding_window: int | None             # keys a query of a sliding layer sees, itself included
    max_model_len: int                     # the longest context that this engine serves
    raw: Mapping[str, Any] = field(repr=False, default_factory=dict)   # every field that is not null

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, max_model_len: int | None = None,
             complete: Callable[[dict[str, Any]], None] | None = None, **defaults: Any) -> ModelConfig:
        """defaults: what a family assumes where config.json is silent, under Hugging Face names; a null is not silent.

        complete: derives further fields in place. raises UnsupportedModel naming the field that is missing or wrong.
        """
        values = {k: v for k, v in {**defaults, **raw}.items() if v is not None}
        if complete is not None:
            complete(values)

        def need(*names: str) -> Any:
            for name in names:
                if name in values:
                    return values[name]
            raise UnsupportedModel(f"config.json of model_type {raw.get('model_type')!r} lacks {names[0]!r}")

        heads, hidden = need("num_attention_heads", "n_head"), need("hidden_size", "n_embd")
        layers, max_position = need("num_hidden_layers", "n_layer"), need("max_position_embeddings", "n_positions")
        kv_heads = values.get("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UnsupportedModel(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads "
                                   f"{kv_heads}")
        types = tuple(values.get("layer_types") or (FULL,) * layers)
        if len(types) != layers:
            raise UnsupportedModel(f"config.json: layer_types has {len(types)} entries for {layers} layers")
        if unknown := set(types) - {FULL, SLIDING, LINEAR}:
            raise UnsupportedModel(f"config.json: layer_types names {sorted(unknown)}; known: {FULL}, {SLIDING}, "
                                   f"{LINEAR}")
        return cls(
            model_type=raw["model_type"], vocab_size=need("vocab_size"), hidden_size=hidden, num_layers=layers,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=values.get("head_dim", hidden // heads),
            intermediate_size=values.get("intermediate_size", values.get("n_inner", 4 * hidden)),
            norm_eps=values.get("rms_norm_eps", values.get("layer_norm_epsilon", 1e-6)),
            activation=(values.get("hidden_activation") or values.get("activation_function")
                        or values.get("hidden_act", "silu")),
            max_position=max_position, tied=values.get("tie_word_embeddings", False), layer_types=types,
            sliding_window=values.get("sliding_window"), max_model_len=max_model_len or max_position, raw=values)

    def require(self, name: str, allowed: Any) -> None:
        """Refuse a variant of the family that has no implementation."""
        if self.raw.get(name, allowed) != allowed:
            raise UnsupportedModel(f"config.json: {name} is {self.raw[name]!r}; {self.model_type} supports {allowed!r}")

    def rope_parameters(self, layer_type: str = FULL) -> dict[str, Any]:
        """The rotation's settings for one kind of layer, from the new (`rope_parameters`) or the old fields."""
        given = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        found = dict(given.get(layer_type, given) or {})
        found.setdefault("rope_type", found.get("type", "default"))
        found.setdefault("rope_theta", self.raw.get("rope_theta", 10000.0))
        found.setdefault("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0))
        if "original_max_position_embeddings" in self.raw:
            found["original_max_position_embeddings"] = self.raw["original_max_position_embeddings"]
        found.setdefault("original_max_position_embeddings", self.max_position)
        return found

    def rotary(self, layer_type: str = FULL, head_dim: int | None = None, **override: Any) -> Rotary:
        return build_rotary({**self.rope_parameters(layer_type), **override}, head_dim or self.head_dim,
                            max_position=self.max_position, max_model_len=self.max_model_len)

    def rotaries(self) -> dict[str, Rotary]:
        """One rotation for each kind of layer; layers of a kind share it, and its tables within a batch."""
        return {kind: self.rotary(kind) for kind in sorted(set(self.layer_types))}

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def attention(self, layer: int, rotary: Rotary | None, **options: Any) -> Attention:
        """Attention of this layer with the config's heads and window. options: see Attention."""
        return Attention(layer, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, rotary=rotary,
                         window=self.window(layer), **options)


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
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in batch.taps:
                taps[index] = x.clone()          # native layers change x in place
            x = layer(x, batch, state)
        if len(self.layers) in batch.taps:
            taps[len(self.layers)] = x.clone()
        return ModelOutput(self.norm(x if batch.wanted is None else x[batch.wanted]), taps)


class CausalLM(nn.Module):
    """A backbone and a head. A family's __init__ builds both; parameter names are those of its checkpoints.

    Families set `embed_scale`, override `cap` (soft-caps) or `sources` (fused or transposed tensors).
    DEFAULTS are the values of fields that a config.json may leave out, under their Hugging Face names. feed_width is
    the width of the rows that a model takes with every token (drafters over hidden states); None: tokens only.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    feed_width: int | None = None
    # Set where a backend finds the most likely tokens without all logits.
    top_head: TopHead | None = None
    # Set where a backend runs a whole pass at once.
    whole: WholePass | None = None
    capped = False  # whether `cap` changes anything
    embed_scale = 1.0

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Derive fields that older configs lack (layer_types) from the others, in place. Default: nothing."""

    def __init__(self, config: ModelConfig, model: Backbone):
        super().__init__()
        self.config, self.model = config, model
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = model.embed_tokens.weight  # type: ignore[assignment]

    def embed(self, tokens: Tensor) -> Tensor:
        """(T,) ids -> (T, hidden)."""
        out: Tensor = self.model.embed_tokens(tokens)
        # The factor was rounded to the model's dtype in training: Gemma's sqrt(3072) = 55.43 is 55.5 in bf16.
        return out if self.embed_scale == 1 else out * torch.tensor(self.embed_scale, dtype=out.dtype, device="cpu")

    def forward(self, batch: Batch, state: CacheView | None = None) -> ModelOutput:
        """One pass over the batch. state: the role's cache, or None for whole sequences without one."""
        x = batch.feed if batch.tokens is None else self.embed(batch.tokens)
        assert x is not None
        out: ModelOutput = self.model(x, batch, state)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(W, hidden) -> (W, vocabulary), in the model's dtype."""
        out: Tensor = self.lm_head(hidden)
        return self.cap(out)

    def cap(self, logits: Tensor) -> Tensor:
        """What a family does to its logits: each by itself, a larger one never below a smaller one. Default: nothing."""
        return logits

    def state_spec(self) -> tuple[LayerState, ...]:
        """What each layer keeps between steps. Default: every block has one mixer that knows."""
        blocks: Any = self.model.layers
        return tuple(block.mixer().state_spec() for block in blocks)

    def sources(self) -> dict[str, From]:
        """Parameters whose checkpoint tensor has another name or layout; the rest are found under their own names."""
        return {}


def embedding(config: ModelConfig, rows: int | None = None) -> nn.Embedding:
    """A vector of the hidden size for each token, or for each of `rows` indexes."""
    # A given weight is not initialised; on the meta device that alone would import torch's compiler, two seconds.
    rows = config.vocab_size if rows is None else rows
    return nn.Embedding(rows, config.hidden_size, _weight=torch.empty(rows, config.hidden_size))
