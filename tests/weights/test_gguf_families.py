"""Each family as llama.cpp's converter wrote it reads back as the safetensors model that it was made from."""
from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ridgeline.errors import CorruptFile, ModelNotFound, UnsupportedModel
from ridgeline.weights.checkpoint import Checkpoint, open_checkpoint
from ridgeline.weights.gguf_file import GGUFFile

DATA = Path(__file__).parents[1] / "data" / "gguf"
FAMILIES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
COMPUTED = ("A_log",)  # log(exp(x)): not exact in fp32


def original(family: str) -> Checkpoint:
    return open_checkpoint(DATA / family, load_format="safetensors")


def converted(family: str, kind: str) -> Checkpoint:
    return open_checkpoint(DATA / family / f"model-{kind}.gguf")


def test_all_families_are_here() -> None:
    assert FAMILIES == ["gemma2", "gemma3_text", "gpt2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
                        "qwen3_5_text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_f32_equals_safetensors(family: str) -> None:
    source, file = original(family), converted(family, "f32")
    assert sorted(file.names()) == sorted(source.names())
    for name in source.names():
        expected, found = source.read(name, torch.float32), file.read(name, torch.float32)
        assert found.shape == expected.shape == file.shape(name), name
        tolerance = 1e-6 if name.endswith(COMPUTED) else 0.0
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_q8_0_is_within_half_a_step(family: str) -> None:
    source, file = original(family), converted(family, "q8_0")
    quantised = 0
    for name in source.names():
        expected, found = source.read(name, torch.float32), file.read(name, torch.float32)
        assert found.shape == expected.shape, name
        if file.kind(name) == "Q8_0":
            quantised += 1
            # A block's step is its largest magnitude / 127, rounded to float16 (2^-11); half a step by rounding.
            step = float(expected.abs().max()) / 127
            assert float((found - expected).abs().max()) <= step * 0.5 + 127 * step * 2**-11 + 1e-6, name
    assert quantised > 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_packed_blocks_dequantise_to_what_read_gives(family: str, kind: str) -> None:
    file = converted(family, kind)
    matrices = [name for name in file.names() if len(file.shape(name)) == 2]
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight") if family == "gpt2" else ()
    for name in matrices:
        turn = name.endswith(transposed) if transposed else False
        packed = file.packed(name, transpose=turn)
        assert packed is not None and file.packed(name, transpose=not turn) is None, name
        values = torch.from_numpy(gguf.quants.dequantize(packed.raw, packed.type))
        expected = file.read(name, torch.float32)
        assert packed.shape == tuple(values.shape)
        assert torch.equal(values, expected.T if turn else expected), name
        assert packed.type.name == file.kind(name)
    for name in set(file.names()) - set(matrices):
        assert file.packed(name) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_slice_equals_the_slice_of_the_whole(family: str) -> None:
    file = converted(family, "q8_0")
    for name in file.names():
        whole = file.read(name, torch.float32)
        assert torch.equal(file.read(name, torch.float32, rows=(1, 3)), whole[1:3]), name
        assert torch.equal(file.read(name, torch.bfloat16, rows=(0, 2)), whole[:2].to(torch.bfloat16)), name


def flat_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config of either style in the flat one that GGUF configs have."""
    rope = dict(config.get("rope_parameters") or {})
    local = None
    if "full_attention" in rope:
        local, rope = rope["sliding_attention"]["rope_theta"], dict(rope["full_attention"])
    flat: dict[str, Any] = {"rope_theta": rope.pop("rope_theta", None)}
    if local is not None:
        flat["rope_local_base_freq"] = local
    flat["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    rope.pop("mrope_section", None)  # all three positions of a text token are the same
    flat["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    return flat


# What needs no counterpart: training settings, defaults that every family has, and what is not part of the model.
IGNORED = {
    "architectures", "transformers_version", "dtype", "use_cache", "initializer_range", "attention_dropout",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "pretraining_tp", "_sliding_window_pattern", "max_window_layers",
    "use_bidirectional_attention", "n_ctx", "reorder_and_upcast_attn", "add_cross_attention", "summary_type",
    "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "output_attentions", "rope_parameters",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_the_config_is_reconstructed(family: str, kind: str) -> None:
    expected, found = original(family).config, converted(family, kind).config
    for key in expected.keys() - IGNORED:
        wanted = expected[key]
        if (family, key) == ("mistral", "model_type"):
            wanted = "llama"  # the converter writes one architecture for both, and they compute the same
        if (family, key) == ("gpt2", "n_inner"):
            wanted = 4 * expected["n_embd"]  # what null means
        if (family, key) == ("gpt2", "pad_token_id"):
            continue  # the stand-in vocabulary has one, GPT2Config none
        if key in ("layer_types", "sliding_window") and key not in found:
            assert wanted is None or set(wanted) == {"full_attention"}, key
            continue
        assert found.get(key, "absent") == wanted, key
    if family == "gpt2":
        return
    wanted_rope = flat_rope(expected)
    found_rope = {"partial_rotary_factor": 1.0, **{key: found[key] for key in wanted_rope if key in found}}
    if family == "llama":
        check_llama3_factors(wanted_rope.pop("rope_scaling"), found_rope.pop("rope_scaling"))
    assert found_rope == wanted_rope


def check_llama3_factors(rule: dict[str, Any], found: dict[str, Any]) -> None:
    """The recorded divisors give the frequencies that transformers computes from the rule's parameters."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert rule["rope_type"] == "llama3" and found["rope_type"] == "factors"
    config = LlamaConfig.from_pretrained(DATA / "llama")
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / torch.tensor(found["factors"]), expected, rtol=1e-6, atol=0)
    assert len(set(found["factors"])) == 3  # untouched, blended, divided


def test_generation_config_and_bytes() -> None:
    file = converted("llama", "q8_0")
    assert file.generation_config == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}
    kinds = file.bytes_by_kind()
    assert list(kinds) == ["Q8_0", "F32"]
    assert sum(count for count, _ in kinds.values()) == len(file.names())
    assert kinds["F32"][1] == sum(file.nbytes(n) for n in file.names() if file.kind(n) == "F32")


def rewritten(tmp_path: Path, old: bytes, new: bytes, family: str = "llama") -> Path:
    """A copy of a fixture with some bytes exchanged."""
    content = (DATA / family / "model-f32.gguf").read_bytes()
    assert content.count(old) >= 1 and len(old) == len(new)
    path = tmp_path / "changed.gguf"
    path.write_bytes(content.replace(old, new))
    return path


def test_an_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'llamb' is not supported; known: llama, .*qwen35"):
        open_checkpoint(rewritten(tmp_path, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamb"))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = rewritten(tmp_path, b"llama.attention.head_count\x04", b"llama.attention.head_cOUnt\x04")
    with pytest.raises(CorruptFile, match=r"'llama\.attention\.head_count' is missing"):
        open_checkpoint(path)


def test_head_counts_that_contradict_the_tensors_are_named(tmp_path: Path) -> None:
    key = b"llama.attention.head_count"
    path = rewritten(tmp_path, key + struct.pack("<II", 4, 4), key + struct.pack("<II", 4, 8))
    with pytest.raises(CorruptFile, match=r"'blk\.0\.attn_q\.bias'.*\[32\]; expected 8 heads of 8"):
        open_checkpoint(path)


def test_an_absurd_number_of_layers_is_named(tmp_path: Path) -> None:
    key = b"llama.block_count"
    path = rewritten(tmp_path, key + struct.pack("<II", 4, 2), key + struct.pack("<II", 4, 1 << 31))
    with pytest.raises(CorruptFile, match="block_count is 2147483648"):
        open_checkpoint(path)


def test_a_missing_embedding_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"'token_embd\.weight' is missing"):
        open_checkpoint(rewritten(tmp_path, b"token_embd.weight", b"token_embd.wEIght"))


def test_every_type_that_gguf_dequantises(tmp_path: Path) -> None:
    """The blocks are random bytes: what counts is that rows, chunks and the target type come out right."""
    rng = np.random.default_rng(0)
    kinds = [kind for kind in gguf.GGML_QUANT_SIZES if dequantises(kind)]
    assert len(kinds) >= 24
    for kind in kinds:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 60, (8, 256 // block * size), dtype=np.uint8)  # small bytes: scales stay finite
        path = tmp_path / f"{kind.name}.gguf"
        write_llama_with_output(path, raw, kind)
        file = open_checkpoint(path)
        expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
        assert file.kind("lm_head.weight") == kind.name
        torch.testing.assert_close(file.read("lm_head.weight", torch.float32), expected, rtol=0, atol=0)
        half = file.read("lm_head.weight", torch.bfloat16, rows=(2, 5))
        torch.testing.assert_close(half, expected[2:5].to(torch.bfloat16), rtol=0, atol=0)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K]
    path = tmp_path / "odd.gguf"
    write_llama_with_output(path, np.zeros((8, 256 // block * size), np.uint8), gguf.GGMLQuantizationType.Q8_K)
    with pytest.raises(UnsupportedModel, match=r"'output\.weight'.*Q8_K"):
        open_checkpoint(path).read("lm_head.weight", torch.float32)


def dequantises(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def write_llama_with_output(path: Path, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 256), np.float32))
    writer.add_tensor("output.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split_fixture(folder: Path) -> list[Path]:
    """The llama fixture in three parts, as llama.cpp's gguf-split writes them."""
    source = GGUFFile(DATA / "llama" / "model-q8_0.gguf")
    names = list(source.tensors)
    paths = []
    for part in range(3):
        path = folder / f"tiny-{part + 1:05d}-of-00003.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if part == 0:
            for key, value in source.metadata.items():
                if key.startswith("llama.") and not key.startswith("llama.vocab"):
                    (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 3)
        for name in names[part::3]:
            tensor = source.tensors[name]
            raw = source.raw(name).reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_a_split_model_opens_from_any_part_or_its_folder(tmp_path: Path) -> None:
    paths = split_fixture(tmp_path)
    whole = converted("llama", "q8_0")
    for path in (*paths, tmp_path):
        file = open_checkpoint(path)
        assert sorted(file.names()) == sorted(whole.names())
        for name in whole.names():
            assert torch.equal(file.read(name, torch.float32), whole.read(name, torch.float32))
    paths[2].unlink()
    with pytest.raises(CorruptFile, match=r"tiny-00003-of-00003\.gguf is missing"):
        open_checkpoint(paths[0])


def test_a_folder_with_several_gguf_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(DATA / "llama" / "model-f32.gguf", tmp_path / name)
    with pytest.raises(ModelNotFound, match=r"2 GGUF models; name one: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"


def test_unquantised_tensors_alias_the_file() -> None:
    file = converted("qwen2", "f32")
    first = file.read("model.embed_tokens.weight", torch.float32)
    again = file.read("model.embed_tokens.weight", torch.float32)
    assert first.data_ptr() == again.data_ptr()
    assert file.read("model.embed_tokens.weight", torch.bfloat16).data_ptr() != first.data_ptr()
