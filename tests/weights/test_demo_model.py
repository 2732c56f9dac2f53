"""The packaged Gemma 3 270M: a real file with five kinds of tensors."""
from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ridgeline import hub
from ridgeline.weights.checkpoint import Checkpoint, open_checkpoint
from ridgeline.weights.gguf_file import GGUFFile


@pytest.fixture(scope="module")
def path() -> Path:
    return hub.resolve("gemma3-270m")


@pytest.fixture(scope="module")
def model(path: Path) -> Checkpoint:
    return open_checkpoint(path)


def test_opens_in_under_a_second_of_cpu(path: Path) -> None:
    start = time.process_time()
    checkpoint = open_checkpoint(path)
    assert time.process_time() - start < 1.0
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 262_144


def test_the_config_is_that_of_gemma_3_270m(model: Checkpoint) -> None:
    config = dict(model.config)
    layers = config.pop("layer_types")
    assert [i for i, kind in enumerate(layers) if kind == "full_attention"] == [5, 11, 17]
    assert config == {
        "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048,
        "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": None, "sliding_window": 512, "query_pre_attn_scalar": 256, "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    }
    assert model.bytes_by_kind() == {
        "Q8_0": (10, 179_824_640), "Q5_0": (81, 43_591_680), "Q4_K": (27, 13_271_040), "Q6_K": (9, 9_676_800),
        "F32": (109, 223_744),
    }


def test_values_are_those_of_the_blocks(path: Path, model: Checkpoint) -> None:
    """Large tensors are dequantised in chunks and straight into the wanted type."""
    file = GGUFFile(path)
    stored = {"attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
    for ours, name in stored.items():
        tensor = file.tensors[f"blk.7.{ours}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(file.raw(tensor.name), tensor.type))
        assert torch.equal(model.read(f"model.layers.7.{name}.weight", torch.float32), expected), name
    norm = file.raw("blk.7.attn_norm.weight").reshape(-1).view(np.float32) - 1
    assert torch.equal(model.read("model.layers.7.input_layernorm.weight", torch.float32), torch.from_numpy(norm))
    embedding = model.read("model.embed_tokens.weight", torch.bfloat16)
    assert embedding.shape == (262_144, 640)
    for start in (0, 1630, 262_136):  # the first chunk, across the border of two, the end
        raw = file.raw("token_embd.weight")[start : start + 8]
        expected = torch.from_numpy(gguf.quants.dequantize(raw, file.tensors["token_embd.weight"].type))
        assert torch.equal(embedding[start : start + 8], expected.to(torch.bfloat16))
