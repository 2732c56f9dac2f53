"""GGUF tensor names and layouts -> Hugging Face names and layouts, per architecture.

llama.cpp's converter does not only rename: it stores some tensors in another order or with other values. `Layout`
says how the Hugging Face tensor is got back, so that the rest of the engine knows one layout only:

* llama, mistral3   the rows of Q and K are permuted, because ggml rotates neighbouring pairs where Hugging Face
                    rotates halves: stored[head, j, half] = original[head, half, j]
* gemma2, gemma3    norm weights are stored as 1 + w
* gpt2              Conv1D matrices (in, out) are stored transposed
* qwen35            norms as 1 + w; A_log as -exp(A_log); the convolution without its middle axis; value heads, if
                    there are more than key heads, in the order [i-th head of each group] and not [group by group]
* phi3              nothing: its fused qkv and gate_up stay fused
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import CorruptFile

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_SANDWICH = {  # a norm before and after each part
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **_MLP,
}
_BLOCKS: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "phi3": {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "olmo2": {
        **_ATTENTION,
        **_HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        **_MLP,
    },
    "gemma2": _SANDWICH,
    "gemma3": {**_SANDWICH, **_HEAD_NORMS},
    "gpt2": {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "qwen35": {
        **_ATTENTION,
        **_HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        **_MLP,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
}
_TOP_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_QWEN35_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}  # no ".weight" on either side
_CONFIGURATION = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_ONE_PLUS = {"gemma2", "gemma3", "qwen35"}
_PERMUTED = {"llama", "mistral3"}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

KNOWN_ARCHITECTURES = tuple(_BLOCKS)
Shapes = dict[str, tuple[int, ...]]  # stored tensor name -> shape


@dataclass(frozen=True)
class Layout:
    """How a Hugging Face tensor is stored in the file. Steps apply in the order of the fields."""

    stored: str                         # tensor name in the file
    rows: np.ndarray | None = None      # row i of the tensor is stored row rows[i] (element i of a vector)
    columns: np.ndarray | None = None   # column j of the tensor is stored column columns[j]
    transpose: bool = False
    subtract_one: bool = False
    log_of_negative: bool = False       # the tensor is log(-stored)
    middle_axis: bool = False           # the tensor is (channels, 1, kernel), stored (channels, kernel)


def layouts(path: Path, architecture: str, shapes: Shapes, config: dict[str, Any]) -> dict[str, Layout]:
    """{Hugging Face name: Layout} for the tensors of a file; a name that we do not know keeps its GGUF name.

    Raises CorruptFile where a tensor's shape contradicts the head counts, before anything of that size is made.
    """
    found: dict[str, Layout] = {}
    for stored, shape in shapes.items():
        if stored in _CONFIGURATION:
            continue  # read into the config as rope_scaling
        name = hugging_face_name(architecture, stored, config)
        try:
            found[name] = _layout(architecture, stored, name, shape, config)
        except ValueError as error:
            raise CorruptFile(f"{path}: tensor {stored!r} ({name}) has the shape {list(shape)}; {error}") from None
    return found


def hugging_face_name(architecture: str, stored: str, config: dict[str, Any]) -> str:
    match = _BLOCK.fullmatch(stored)
    if match is None:
        stem, _, leaf = stored.rpartition(".")
        top = (_TOP_GPT2 if architecture == "gpt2" else _TOP).get(stem)
        return f"{top}.{leaf}" if top else stored
    block, inner = int(match[1]), match[2]
    if block >= config.get("num_hidden_layers", config.get("n_layer", 0)):
        return f"mtp.{stored}"  # multi-token prediction layers come after the last one
    prefix = f"transformer.h.{block}" if architecture == "gpt2" else f"model.layers.{block}"
    if architecture == "qwen35" and inner in _QWEN35_WHOLE:
        return f"{prefix}.{_QWEN35_WHOLE[inner]}"
    stem, _, leaf = inner.rpartition(".")
    part = _BLOCKS[architecture].get(stem)
    return f"{prefix}.{part}.{leaf}" if part else stored


def _layout(
    architecture: str, stored: str, name: str, shape: tuple[int, ...], config: dict[str, Any]
) -> Layout:
    if architecture in _PERMUTED and ".self_attn." in name:
        for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                heads, dim = config[count], config["head_dim"]
                _require(dim % 2 == 0 and shape[0] == heads * dim, f"expected {heads} heads of {dim} rows (even)")
                return Layout(stored, rows=_unpermuted(heads, dim))
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        _require(len(shape) == 2, "expected two dimensions")
        return Layout(stored, transpose=True)
    if ".linear_attn." in name:
        return _linear_attention_layout(stored, name.partition(".linear_attn.")[2], shape, config)
    if architecture in _ONE_PLUS and name.endswith("norm.weight"):
        return Layout(stored, subtract_one=True)
    return Layout(stored)


def _linear_attention_layout(
    stored: str, part: str, shape: tuple[int, ...], config: dict[str, Any]
) -> Layout:
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    value_dim, key_rows = config["linear_value_head_dim"], 2 * groups * config["linear_key_head_dim"]
    _require(heads % groups == 0, f"but {heads} value heads do not divide among {groups} key heads")
    expected = f"expected {heads} value heads of {value_dim}, after {key_rows} rows of queries and keys if fused"
    same_order = groups == heads
    match part:
        case "in_proj_qkv.weight" | "conv1d.weight":
            _require(len(shape) == 2 and shape[0] == key_rows + heads * value_dim, expected)
            values = key_rows + _grouped(groups, heads, value_dim)
            rows = None if same_order else np.concatenate([np.arange(key_rows), values])
            return Layout(stored, rows=rows, middle_axis=part == "conv1d.weight")
        case "in_proj_z.weight":
            _require(shape[0] == heads * value_dim, expected)
            return Layout(stored, rows=None if same_order else _grouped(groups, heads, value_dim))
        case "out_proj.weight":
            _require(len(shape) == 2 and shape[1] == heads * value_dim, expected)
            return Layout(stored, columns=None if same_order else _grouped(groups, heads, value_dim))
        case "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias" | "A_log":
            _require(shape[0] == heads, f"expected {heads} value heads")
            rows = None if same_order else _grouped(groups, heads, 1)
            return Layout(stored, rows=rows, log_of_negative=part == "A_log")
    return Layout(stored)


def _require(condition: bool, expected: str) -> None:
    if not condition:
        raise ValueError(expected)


def _unpermuted(heads: int, head_dim: int) -> np.ndarray:
    order = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)  # (heads, half, head_dim / 2) -> rows


def _grouped(groups: int, heads: int, dim: int) -> np.ndarray:
    order = np.arange(heads * dim).reshape(heads // groups, groups, dim)
    return order.swapaxes(0, 1).reshape(-1)  # (groups, heads of the group, dim) -> rows
