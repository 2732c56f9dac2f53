"""The values a model's configuration may hold, whatever the family; which fields a family needs it says itself."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import CorruptFile

_COUNTS = (
    "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "max_position_embeddings", "n_positions",
    "original_max_position_embeddings", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern",
    "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "target_hidden_size",
)
_NUMBERS = (
    "rms_norm_eps", "layer_norm_epsilon", "rope_theta", "partial_rotary_factor", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping",
)
_KINDS: Mapping[str, tuple[type, str]] = {
    "hidden_act": (str, "a string"), "hidden_activation": (str, "a string"), "activation_function": (str, "a string"),
    "rope_parameters": (Mapping, "an object"), "rope_scaling": (Mapping, "an object"), "layer_types": (list, "a list"),
}


def check_fields(source: str, config: Mapping[str, Any]) -> None:
    """raises CorruptFile naming `source`, the field, its value and what is allowed. A null counts as left out."""

    def refuse(name: str, allowed: str) -> None:
        raise CorruptFile(f"{source}: {name} is {config[name]!r}; it must be {allowed}")

    for name in _COUNTS:
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            refuse(name, "an integer of at least 1")
    for name in _NUMBERS:
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))
                                  or not 0 < value < math.inf):
            refuse(name, "a number above 0")
    for name, (kind, allowed) in _KINDS.items():
        value = config.get(name)
        if value is not None and not isinstance(value, kind):
            refuse(name, allowed)
    end = config.get("eos_token_id")
    ends = end if isinstance(end, list) else [] if end is None else [end]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ends):
        refuse("eos_token_id", "a token id or a list of them")
