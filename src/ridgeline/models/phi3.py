"""Phi-3 and Phi-4 mini: Llama with fused projections in the file, LongRoPE and a sliding window. arXiv 2404.14219."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ridgeline.models.mistral import Mistral
from ridgeline.weights.mapping import From


class Phi3(Mistral):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        super().complete(values)
        for name in ("rope_parameters", "rope_scaling"):
            given = values.get(name)
            if given and given.get("rope_type", given.get("type")) in ("su", "yarn"):   # early names of LongRoPE
                values[name] = {**given, "rope_type": "longrope"}

    def sources(self) -> dict[str, From]:
        c = self.config
        query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        found = {}
        for i in range(c.num_layers):
            layer = f"model.layers.{i}"
            qkv, gate_up = f"{layer}.self_attn.qkv_proj.weight", f"{layer}.mlp.gate_up_proj.weight"
            found[f"{layer}.self_attn.q_proj.weight"] = From(qkv, rows=(0, query))
            found[f"{layer}.self_attn.k_proj.weight"] = From(qkv, rows=(query, query + key))
            found[f"{layer}.self_attn.v_proj.weight"] = From(qkv, rows=(query + key, query + 2 * key))
            found[f"{layer}.mlp.gate_proj.weight"] = From(gate_up, rows=(0, c.intermediate_size))
            found[f"{layer}.mlp.up_proj.weight"] = From(gate_up, rows=(c.intermediate_size, 2 * c.intermediate_size))
        return found
