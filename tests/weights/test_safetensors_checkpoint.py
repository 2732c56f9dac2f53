"""Model folders: config.json, one or many safetensors files, older and multimodal names, and damage."""
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.errors import ConfigError, CorruptFile, ModelError, ModelNotFound, UnsupportedModel
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.hf_config import read_config

INDEX = "model.safetensors.index.json"


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"model.embed_tokens.weight": torch.ones(4, 2)}, folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(2), "lm_head.weight": torch.zeros(4, 2)}, folder / "b.safetensors")
    weight_map = {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors",
                  "lm_head.weight": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shape_kind_bytes_and_values(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(3, 2).to(torch.bfloat16)
    file = open_checkpoint(write(tmp_path, {"model.norm.weight": torch.ones(2), "lm_head.weight": weight}))
    assert file.format == "safetensors" and file.path == tmp_path and file.metadata == {}
    assert sorted(file.names()) == ["lm_head.weight", "model.norm.weight"]
    assert open_checkpoint(tmp_path / "config.json").names() == file.names()  # any file of a folder means the folder
    assert file.shape("lm_head.weight") == (3, 2)
    assert file.kind("lm_head.weight") == "BF16" and file.nbytes("lm_head.weight") == 12
    assert torch.equal(file.read("lm_head.weight", torch.float32), weight.float())
    assert torch.equal(file.read("lm_head.weight", torch.bfloat16, rows=(1, 3)), weight[1:3])
    assert file.packed("lm_head.weight") is None
    assert file.bytes_by_kind() == {"BF16": (1, 12), "F32": (1, 8)}
    with pytest.raises(KeyError):
        file.shape("nothing")


def test_tensors_of_the_right_type_alias_the_file(tmp_path: Path) -> None:
    file = open_checkpoint(write(tmp_path, {"lm_head.weight": torch.ones(64, 64)}))
    first = file.read("lm_head.weight", torch.float32)
    assert file.read("lm_head.weight", torch.float32).data_ptr() == first.data_ptr()
    before = (tmp_path / "model.safetensors").read_bytes()
    first.zero_()  # a private mapping: the page is copied
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_sharded(tmp_path: Path) -> None:
    file = open_checkpoint(write_sharded(tmp_path))
    assert sorted(file.names()) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert file.read("lm_head.weight", torch.float32).sum() == 0
    assert file.read("model.embed_tokens.weight", torch.float32).sum() == 8


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CorruptFile, match=r"index\.json: names the shard b\.safetensors \(2 tensors\)"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_the_index_promises_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(CorruptFile, match=r"b\.safetensors: tensor 'lm_head\.weight' is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("index", "message"), [
    ("{", "not valid JSON"),
    ("{}", "weight_map"),
    ('{"weight_map": {}}', "weight_map"),
    ('{"weight_map": {"a": "../../secret.safetensors"}}', "name of a file in the folder"),
    ('{"weight_map": {"a": 3}}', "name of a file in the folder"),
])
def test_a_bad_index(tmp_path: Path, index: str, message: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CorruptFile, match=message):
        open_checkpoint(tmp_path)


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize("content", [
    b"",
    b"\x01\x02",
    header(b"{}", 1 << 60),
    header(b'{"lm_head.weight": {"dtype"'),
    header(b'{"lm_head.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
    header(b'{"lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}') + bytes(8),
    header(b'{"lm_head.weight": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}') + bytes(8),
    header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
           b' "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}') + bytes(12),
])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {"lm_head.weight": torch.ones(2)})
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"model\.safetensors: not a whole safetensors file"):
        open_checkpoint(tmp_path)


def test_every_truncation_is_a_corrupt_file(tmp_path: Path) -> None:
    write(tmp_path, {"lm_head.weight": torch.ones(3, 5), "model.norm.weight": torch.ones(5)})
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CorruptFile):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(("config", "message"), [
    ("{", r"config\.json: not valid JSON"),
    ("\xff\xfe", r"config\.json: not valid JSON"),
    ("[]", r"config\.json: holds a JSON list; expected an object"),
    ("{}", r"config\.json: model_type is None"),
    ('{"model_type": 3}', r"config\.json: model_type is 3"),
])
def test_a_bad_config(tmp_path: Path, config: str, message: str) -> None:
    write(tmp_path, {"lm_head.weight": torch.ones(2)})
    (tmp_path / "config.json").write_bytes(config.encode("latin-1"))
    for load_format in ("auto", "dummy"):
        with pytest.raises(CorruptFile, match=message):
            open_checkpoint(tmp_path, load_format=load_format)


def test_no_config(tmp_path: Path) -> None:
    write(tmp_path, {"lm_head.weight": torch.ones(2)})
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json: missing"):
        open_checkpoint(tmp_path)


def test_what_is_in_the_folder_decides(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors and no \*\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"load_format is 'pickle'; valid: auto, safetensors, gguf, dummy"):
        open_checkpoint(tmp_path, load_format="pickle")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="only pickled weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors in this folder"):
        open_checkpoint(tmp_path, load_format="safetensors")
    with pytest.raises(ModelNotFound, match=r"no \*\.gguf in this folder"):
        open_checkpoint(tmp_path, load_format="gguf")
    assert open_checkpoint(tmp_path, load_format="dummy").format == "dummy"


def test_quantised_safetensors_are_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "hqq", "bits": 4}}
    with pytest.raises(UnsupportedModel, match="quant_method is 'hqq'; supported: awq, gptq, compressed-tensors, and plain"):
        open_checkpoint(write(tmp_path, {"lm_head.weight": torch.ones(2)}, config))


@pytest.mark.parametrize(("model_type", "stored", "expected"), [
    ("llama", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("llama", "embed_tokens.weight", "model.embed_tokens.weight"),
    ("llama", "lm_head.weight", "lm_head.weight"),
    ("gpt2", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
    ("gpt2", "wte.weight", "transformer.wte.weight"),
    ("gpt2", "transformer.ln_f.bias", "transformer.ln_f.bias"),
    ("gemma3", "language_model.model.norm.weight", "model.norm.weight"),
    ("gemma3", "language_model.lm_head.weight", "lm_head.weight"),
    ("gemma3", "model.language_model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    ("qwen3_5", "model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("qwen3_5", "model.visual.patch_embed.proj.weight", "model.visual.patch_embed.proj.weight"),
    ("qwen3_5", "mtp.norm.weight", "mtp.norm.weight"),
])
def test_names_are_those_of_a_causal_lm(tmp_path: Path, model_type: str, stored: str, expected: str) -> None:
    file = open_checkpoint(write(tmp_path, {stored: torch.ones(2)}, {"model_type": model_type, "text_config": {}}))
    assert file.names() == [expected]
    assert file.read(expected, torch.float32).sum() == 2


def test_the_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {"hidden_size": 8, "eos_token_id": 9}
    path.write_text(json.dumps({"model_type": "gemma3", "eos_token_id": 1, "bos_token_id": 2, "text_config": text}))
    inner = {"model_type": "gemma3_text", "hidden_size": 8, "eos_token_id": 9, "bos_token_id": 2}
    assert read_config(tmp_path) == inner
    path.write_text(json.dumps({"model_type": "qwen3_5", "tie_word_embeddings": True,
                                "text_config": {"model_type": "qwen3_5_text", "hidden_size": 4}}))
    assert read_config(tmp_path) == {"model_type": "qwen3_5_text", "hidden_size": 4, "tie_word_embeddings": True}


def test_generation_config(tmp_path: Path) -> None:
    write(tmp_path, {"lm_head.weight": torch.ones(2)})
    assert open_checkpoint(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": 64, "eos_token_id": [1, 106]}')
    assert open_checkpoint(tmp_path).generation_config == {"top_k": 64, "eos_token_id": [1, 106]}
