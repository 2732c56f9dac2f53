"""What a model is made of and the memory it takes, from its shapes alone: nothing is loaded."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ridgeline.cache import RoleLayout
from ridgeline.models.base import CausalLM
from ridgeline.types import PagedKV, Recurrent

# Mixed-precision AdamW, bytes a parameter (arXiv 1910.02054): 16-bit weights and gradients, and in fp32 a master copy
# and two moments.
TRAINING_BYTES = {"weights": 2, "gradients": 2, "optimizer_states": 12}
ACTIVATION_BYTES = 2
LOGIT_BYTES = 4
OUTPUT_LAYERS = ("o_proj", "down_proj", "c_proj", "out_proj")      # their results go into the residual sum, which keeps none


@dataclass(frozen=True)
class ModelMemory:
    """Bytes, with what they were counted for. Definitions: docs/metrics.md."""

    parameters: int
    embedding_parameters: int
    weight_bytes: int                   # at the dtype the engine uses
    kv_bytes_per_token: int             # all layers, one sequence
    state_bytes_per_sequence: int       # recurrent layers
    kv_window: int | None               # largest sliding window, None if some layer sees everything
    training: Mapping[str, int]         # per part, for one batch of `training_tokens`
    training_tokens: int


def measure(model: CausalLM, layout: RoleLayout, *, weight_itemsize: int, training_tokens: int) -> ModelMemory:
    """Count a model that may lie on the meta device. training_tokens: batch x sequence length of the training step."""
    parameters = sum(p.numel() for p in model.parameters())
    # Decays and other parameters whose rounding would add up stay fp32 whatever the dtype.
    weights = sum(p.numel() * (4 if getattr(p, "keep_fp32", False) else weight_itemsize) for p in model.parameters())
    embeddings = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    windows = [spec.window for spec in layout.layers if isinstance(spec, PagedKV)]
    training = {name: size * parameters for name, size in TRAINING_BYTES.items()}
    training["activations"] = activation_bytes(model, training_tokens)
    return ModelMemory(
        parameters, sum(embeddings.values()), weights, layout.kv_bytes_per_token(),
        layout.state_bytes(), None if None in windows or not windows else max(w for w in windows if w is not None),
        training, training_tokens)


def activation_bytes(model: CausalLM, tokens: int) -> int:
    """What the backward pass of one step keeps: the input of each linear layer and norm, q, k, v and the attention's
    output, both factors of a gated product; the logits in fp32.

    Inputs that several linear layers share (q, k, v; gate, up) count once; attention keeps no score matrix, as fused
    kernels do. Without recomputation, 16-bit activations.
    """
    per_token = 0
    for block in model.model.layers:
        shared: set[str] = set()
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                parent, _, leaf = name.rpartition(".")
                # q, k and v read the same input; what the block's last layer reads is its own, of equal width or not.
                key = f"{parent}:{leaf if leaf in OUTPUT_LAYERS else module.in_features}"
                if key not in shared:
                    shared.add(key)
                    per_token += module.in_features
                per_token += 0 if leaf in OUTPUT_LAYERS else module.out_features
            elif "Norm" in type(module).__name__:
                weight = getattr(module, "weight", None)
                per_token += 0 if weight is None else weight.numel()
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    return tokens * (ACTIVATION_BYTES * (per_token + 2 * hidden) + LOGIT_BYTES * vocabulary)


def as_json(memory: ModelMemory, raw: Mapping[str, Any], kinds: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    return {
        "architecture": raw.get("model_type"), "parameters": memory.parameters,
        "embedding_parameters": memory.embedding_parameters,
        "bytes_by_type": {kind: {"tensors": count, "bytes": size} for kind, (count, size) in kinds.items()},
        "weight_bytes": memory.weight_bytes, "kv_bytes_per_token": memory.kv_bytes_per_token,
        "state_bytes_per_sequence": memory.state_bytes_per_sequence,
        "training_bytes": {**memory.training, "total": sum(memory.training.values())},
        "training_tokens": memory.training_tokens,
    }


def layer_summary(layout: RoleLayout) -> str:
    """E.g. "15 x attention (1 KV head of 256, window 512); 3 x attention (1 KV head of 256, all tokens)"."""
    counts: dict[str, int] = {}
    for spec in layout.layers:
        if isinstance(spec, PagedKV):
            heads = f"{spec.heads} KV {'head' if spec.heads == 1 else 'heads'} of {spec.key_dim}"
            name = f"attention ({heads}, {f'window {spec.window}' if spec.window else 'all tokens'})"
        else:
            name = "recurrent" if isinstance(spec, Recurrent) else "shared"
        counts[name] = counts.get(name, 0) + 1
    return "; ".join(f"{count} x {name}" for name, count in counts.items())
