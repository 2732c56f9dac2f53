"""GGUF metadata -> a Hugging Face config, per architecture.

Rotary settings come out in the older, flat style: `rope_theta` and `rope_scaling` at the top level, and for gemma3
`rope_local_base_freq` for the sliding-window layers. One rope type is ours: GGUF stores the *result* of the llama3
rule, one divisor per rotated pair, in rope_freqs.weight; it becomes {"rope_type": "factors", "factors": [...]}
(inverse frequency i is divided by factors[i]), which is exact where guessing the rule's parameters back is not.

What a file does not say, and llama.cpp does not know either: the sliding window of mistral and qwen2 (none is
assumed), and the query scale of gemma2 and gemma3 (the 27B ones, known by their layer counts, use
hidden_size / heads; all others the head dimension).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline.errors import CorruptFile, UnsupportedModel
from ridgeline.weights.gguf_file import GGUFFile
from ridgeline.weights.gguf_names import KNOWN_ARCHITECTURES

_REQUIRED = object()
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class _Fields:
    """Typed look-up in the metadata of one file; a wrong or missing field is a CorruptFile that names it."""

    def __init__(self, file: GGUFFile, shapes: dict[str, tuple[int, ...]]) -> None:
        self.file, self.shapes = file, shapes
        self.architecture = str(file.metadata.get("general.architecture"))

    def _get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full, default)
        if value is _REQUIRED:
            raise CorruptFile(f"{self.file.path}: metadata key {full!r} is missing")
        if value is not default and (not isinstance(value, kinds) or isinstance(value, bool)):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise CorruptFile(f"{self.file.path}: metadata key {full!r} is {value!r}; expected {names}")
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """A count. Some architectures store one number a layer; then all must agree."""
        value = self._get(key, (int, np.ndarray), default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise UnsupportedModel(
                    f"{self.file.path}: {self.architecture}.{key} differs between layers ({value.tolist()}); "
                    "only one value for all layers is supported"
                )
            value = int(value[0])
        if value is not default and not 0 <= value < 1 << 40:
            raise CorruptFile(f"{self.file.path}: {self.architecture}.{key} is {value}; expected a count")
        return value

    def positive(self, key: str, default: Any = _REQUIRED) -> int:
        value: int = self.integer(key, default)
        if value < 1:
            raise CorruptFile(f"{self.file.path}: {self.architecture}.{key} is {value}; expected at least 1")
        return value

    def layers(self) -> int:
        count = self.positive("block_count")
        if count > len(self.shapes):
            raise CorruptFile(
                f"{self.file.path}: {self.architecture}.block_count is {count}, but there are only {len(self.shapes)} "
                "tensors"
            )
        return count

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A float32 field as the shortest decimal with that float32 value: 1e-06 and not 9.99999997e-07."""
        value = self._get(key, (float, int), default)
        return value if value is default else float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, (str,), default))

    def vector(self, tensor: str, length: int) -> list[float] | None:
        """A small F32 tensor that is configuration rather than a weight."""
        found = self.file.tensors.get(tensor)
        if found is None:
            return None
        if found.type.name != "F32" or found.shape != (length,):
            raise CorruptFile(
                f"{self.file.path}: tensor {tensor!r} is {found.type.name} {list(found.shape)}; expected F32 [{length}]"
            )
        return [float(str(x)) for x in self.file.raw(tensor).reshape(-1).view(np.float32)]

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes


def hugging_face_config(file: GGUFFile, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config.json that this file's model would have. `shapes`: all tensors, of all files of a split model."""
    fields = _Fields(file, shapes)
    builder = _BUILDERS.get(fields.architecture)
    if builder is None:
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {fields.architecture!r} is not supported; "
            f"known: {', '.join(KNOWN_ARCHITECTURES)}"
        )
    if fields.integer("expert_count", 0):
        raise UnsupportedModel(
            f"{file.path}: a mixture of {fields.integer('expert_count')} experts in architecture "
            f"{fields.architecture} is not supported; known: {', '.join(KNOWN_ARCHITECTURES)}, dense"
        )
    if "token_embd.weight" not in shapes:
        raise CorruptFile(f"{file.path}: tensor 'token_embd.weight' is missing")
    return builder(fields) | _token_ids(file.metadata)


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Sampling defaults and end tokens; an end-of-turn token, if there is one, also ends a generation."""
    meta = file.metadata
    config: dict[str, Any] = _token_ids(meta)
    ends = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    if found := list(dict.fromkeys(token for token in ends if isinstance(token, int))):
        config["eos_token_id"] = found
    for key, name in _SAMPLING.items():
        value = meta.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)):
            config[name] = float(str(np.float32(value))) if isinstance(value, float) else value
    return config


def _token_ids(meta: dict[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _common(f: _Fields, model_type: str) -> dict[str, Any]:
    hidden, heads = f.positive("embedding_length"), f.positive("attention.head_count")
    head_dim = f.positive("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": f.shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": f.positive("feed_forward_length"),
        "num_hidden_layers": f.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": f.positive("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": f.positive("context_length"),
        "rms_norm_eps": f.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_theta": f.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not f.has("output.weight"),
    }
    rotated = f.positive("rope.dimension_count", head_dim)
    config["rope_scaling"] = _rope_scaling(f, rotated // 2)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    return config


def _attention_bias(f: _Fields) -> dict[str, Any]:
    blocks = (name for name in f.shapes if name.startswith("blk."))
    return {"attention_bias": any(name.endswith(".attn_q.bias") for name in blocks)}


def _rope_scaling(f: _Fields, pairs: int) -> dict[str, Any] | None:
    if (factors := f.vector("rope_freqs.weight", pairs)) is not None:
        return {"rope_type": "factors", "factors": factors}
    original = f.integer("rope.scaling.original_context_length", None)
    long, short = f.vector("rope_factors_long.weight", pairs), f.vector("rope_factors_short.weight", pairs)
    if long is not None and short is not None:
        if original is None:
            f.integer("rope.scaling.original_context_length")  # raises: it is required here
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
        }
    kind = f.text("rope.scaling.type", "none")
    if kind == "none" or kind == "longrope":  # longrope without factors scales nothing
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{f.file.path}: rope scaling {kind!r} is not supported; known: none, linear, yarn, "
                               "longrope")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": f.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original or f.positive("context_length")
        for key, name in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"),
                          ("attn_factor", "attention_factor"), ("log_multiplier", "mscale_all_dim")):
            if (value := f.number(f"rope.scaling.yarn_{key}", None)) is not None:
                scaling[name] = value
    return scaling


def _layer_types(f: _Fields, layers: int, default_period: int) -> list[str]:
    """Sliding or full attention per layer: a list of flags, or a period whose last layer is full."""
    key = "attention.sliding_window_pattern"
    pattern = f.file.metadata.get(f"{f.architecture}.{key}")
    if isinstance(pattern, np.ndarray):
        if len(pattern) < layers:
            raise CorruptFile(
                f"{f.file.path}: {f.architecture}.{key} has {len(pattern)} entries; expected {layers}"
            )
        sliding = [bool(x) for x in pattern[:layers]]
    else:
        period = f.integer(key, default_period)
        sliding = [period == 0 or i % period < period - 1 for i in range(layers)]
    return ["sliding_attention" if x else "full_attention" for x in sliding]


def _llama(f: _Fields) -> dict[str, Any]:
    return _common(f, "llama") | _attention_bias(f) | {"mlp_bias": f.has("blk.0.ffn_up.bias")}


def _mistral3(f: _Fields) -> dict[str, Any]:
    config = _common(f, "mistral") | {"sliding_window": None}
    if beta := f.number("attention.temperature_scale", 0.0):  # queries scaled by position: another model
        config["model_type"] = "ministral3"
        config["rope_scaling"] = {**(config["rope_scaling"] or {}), "llama_4_scaling_beta": beta}
    return config


def _qwen2(f: _Fields) -> dict[str, Any]:
    return _common(f, "qwen2") | {"use_sliding_window": False, "sliding_window": None}


def _qwen3(f: _Fields) -> dict[str, Any]:
    return _common(f, "qwen3") | _attention_bias(f) | {"use_sliding_window": False, "sliding_window": None}


def _phi3(f: _Fields) -> dict[str, Any]:
    config = _common(f, "phi3") | {"sliding_window": f.integer("attention.sliding_window", 0) or None}
    config["original_max_position_embeddings"] = f.positive(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    return config


def _olmo2(f: _Fields) -> dict[str, Any]:
    config = _common(f, "olmo2") | _attention_bias(f)
    if window := f.integer("attention.sliding_window", 0):  # OLMo 3 shares the architecture name
        config |= {
            "model_type": "olmo3",
            "sliding_window": window,
            "layer_types": _layer_types(f, config["num_hidden_layers"], 4),
        }
    return config


def _gemma(f: _Fields, model_type: str, layers_of_27b: int) -> dict[str, Any]:
    config = _common(f, model_type) | _attention_bias(f)
    large = config["num_hidden_layers"] == layers_of_27b
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    )
    del config["hidden_act"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["final_logit_softcapping"] = f.number("final_logit_softcapping", None)
    return config


def _gemma2(f: _Fields) -> dict[str, Any]:
    config = _gemma(f, "gemma2", layers_of_27b=46)
    config["attn_logit_softcapping"] = f.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = f.number("final_logit_softcapping", 30.0)
    config["sliding_window"] = f.positive("attention.sliding_window", 4096)
    config["layer_types"] = _layer_types(f, config["num_hidden_layers"], 2)
    return config


def _gemma3(f: _Fields) -> dict[str, Any]:
    config = _gemma(f, "gemma3_text", layers_of_27b=62)
    config["attn_logit_softcapping"] = None
    config["sliding_window"] = f.integer("attention.sliding_window", 0) or None
    config["layer_types"] = _layer_types(
        f, config["num_hidden_layers"], 6 if config["sliding_window"] else 1
    )
    config["rope_local_base_freq"] = f.number("rope.freq_base_swa", 10000.0)
    return config


def _gpt2(f: _Fields) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": f.shapes["token_embd.weight"][0],
        "n_embd": f.positive("embedding_length"),
        "n_layer": f.layers(),
        "n_head": f.positive("attention.head_count"),
        "n_inner": f.positive("feed_forward_length"),
        "n_positions": f.positive("context_length"),
        "layer_norm_epsilon": f.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": not f.has("output.weight"),
    }


def _qwen35(f: _Fields) -> dict[str, Any]:
    config = _common(f, "qwen3_5_text") | _attention_bias(f)
    layers = config["num_hidden_layers"] - f.integer("nextn_predict_layers", 0)
    recurrent = f.file.metadata.get("qwen35.attention.recurrent_layers")
    if not isinstance(recurrent, np.ndarray):
        period = f.positive("full_attention_interval", 4)
        recurrent = np.array([(i + 1) % period != 0 for i in range(layers)])
    if len(recurrent) < layers:
        raise CorruptFile(f"{f.file.path}: qwen35.attention.recurrent_layers has {len(recurrent)} entries; "
                          f"expected {layers}")
    value_heads = f.positive("ssm.time_step_rank")
    return config | {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if x else "full_attention" for x in recurrent[:layers]],
        "linear_conv_kernel_dim": f.positive("ssm.conv_kernel"),
        "linear_key_head_dim": f.positive("ssm.state_size"),
        "linear_num_key_heads": f.positive("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": f.positive("ssm.inner_size") // value_heads,
    }


_BUILDERS: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "qwen35": _qwen35,
}
