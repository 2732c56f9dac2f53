"""Layers that only plans know, from the fields of a config.json: mixtures of experts and latent attention."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.analysis.spec import Feed, Layer, Matrix, Mixer, Mla, Mlp, Moe, Spec
from ridgeline.errors import UnsupportedModel

_PLAIN_ROPE = {"rope_scaling": None, "rope_parameters": None}
# Model types whose shapes are those of a family of the engine but for their MLPs and, of DeepSeek, their attention.
DENSE: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mistral"}, "qwen3_moe": {"model_type": "qwen3"},
    "deepseek_v2": {"model_type": "llama", **_PLAIN_ROPE}, "deepseek_v3": {"model_type": "llama", **_PLAIN_ROPE}}


def replaced(spec: Spec, raw: Mapping[str, Any], kind: str) -> Spec:
    """The spec with the mixers and MLPs of this config; kind: stored type of their matrices. Routers stay in 16 bits."""
    layers = []
    for index, layer in enumerate(spec.layers):
        mix = latent(raw, spec.hidden, kind) if raw.get("kv_lora_rank") else layer.mix.inner
        feed = experts(raw, spec.hidden, kind) if _is_sparse(raw, index) else layer.feed.inner
        layers.append(Layer(replace(layer.mix, inner=mix), replace(layer.feed, inner=feed)))
    return replace(spec, layers=tuple(layers))


def _is_sparse(raw: Mapping[str, Any], layer: int) -> bool:
    if layer in raw.get("mlp_only_layers", ()):
        return False
    every = raw.get("decoder_sparse_step") or raw.get("moe_layer_freq") or 1
    return layer >= raw.get("first_k_dense_replace", 0) and (layer + 1) % every == 0


def experts(raw: Mapping[str, Any], hidden: int, kind: str) -> Feed:
    count, width = _first(raw, "n_routed_experts", "num_experts", "num_local_experts"), _first(
        raw, "moe_intermediate_size", "intermediate_size")
    up, down = Matrix.of(width, hidden, kind), Matrix.of(hidden, width, kind)
    shared = raw.get("n_shared_experts") or 0
    wide = Mlp(Matrix.of(shared * width, hidden, kind), Matrix.of(hidden, shared * width, kind)) if shared else None
    return Moe(Matrix.of(count, hidden, "bf16"), up, up, down, count, _first(raw, "num_experts_per_tok"),
               *((wide.up, wide.up, wide.down) if wide else ()))


def latent(raw: Mapping[str, Any], hidden: int, kind: str) -> Mixer:
    heads, rank, nope, rope, value = (_first(raw, name) for name in (
        "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    own = raw.get("q_lora_rank")
    return Mla(Matrix.of(heads * (nope + rope), own or hidden, kind), Matrix.of(rank + rope, hidden, kind),
               Matrix.of(heads * (nope + value), rank, kind), Matrix.of(hidden, heads * value, kind), heads, nope, rope, value,
               Matrix.of(own, hidden, kind) if own else None)


def _first(raw: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if raw.get(name) is not None:
            return int(raw[name])
    raise UnsupportedModel(f"config.json of model_type {raw.get('model_type')!r} lacks {names[0]!r}")
