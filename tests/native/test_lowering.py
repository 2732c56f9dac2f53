"""Every family and many shapes: the native backend gives the torch backend's logits, and says what it lowered."""
from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from native_kit import PAGE, Paged, lowered, nmse, on_native, on_torch, tokens
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError, CorruptFile, ModelError
from ridgeline.loading import build, load, open_model, survey
from ridgeline.native import _native
from tiny_checkpoint import write_model

torch.set_num_threads(1)

DATA = Path(__file__).parents[1] / "data" / "gguf"
FAMILIES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
EVERY = pytest.mark.parametrize("family", FAMILIES)
# NMSE of logits. Eight-bit rounding in blocks of 32 gives about 2e-5 of a vector's variance each time; a model of two layers
# multiplies some twenty such vectors, and layers amplify.
ACTIVATIONS_INT8, WEIGHTS_INT8, WEIGHTS_INT4 = 5e-3, 1e-2, 0.5

SHAPES: dict[str, dict[str, Any]] = {
    "heads of 8, multi-query": {"head_dim": 8, "num_attention_heads": 6},
    "heads of 16, grouped": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "heads of 20, 33 queries to a key": {"head_dim": 20, "num_attention_heads": 33},
    "heads of 64, one each": {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
    "heads of 256": {"head_dim": 256, "num_attention_heads": 2},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 101, "vocabulary": 333, "head_dim": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "qwen2 biases": {"model_type": "qwen2"},
    "qwen3 norms": {"model_type": "qwen3"},
    "olmo2 norms over all heads, after layers": {"model_type": "olmo2"},
    "sliding window": {"model_type": "mistral", "sliding_window": 6},
    "soft-caps": {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                  "query_pre_attn_scalar": 20, "sliding_window": 6},
    "two rotations": {"model_type": "gemma3_text", "sliding_window": 6, "sliding_window_pattern": 2},
    "partial rotation": {"partial_rotary_factor": 0.25, "head_dim": 24},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                                 "rope_theta": 1e4}},
    "relu": {"hidden_act": "relu"},
    "bfloat16 file": {"stored": torch.bfloat16},
}


def checkpoint(folder: Path, stored: torch.dtype = torch.float32, **config: Any) -> Path:
    write_model(folder, sharpness=1.0, **config)
    if stored != torch.float32:
        path = folder / "model.safetensors"
        save_file({name: t.to(stored) for name, t in load_file(path).items()}, path)
    return folder


def prompts(vocab: int = 64) -> list[list[int]]:
    """Three sequences: several pages and windows, a page and a bit, one token."""
    return [tokens(n, seed, vocab) for seed, n in enumerate((3 * PAGE + 5, PAGE + 1, 1))]


def agree(model: Any, oracle: Any, tolerance: float, vocab: int = 64) -> None:
    for chunk in (1, 7, 1000):
        expected = Paged(oracle).logits(prompts(vocab), chunk)
        assert expected.std() > 0.1
        torch.testing.assert_close(Paged(model).logits(prompts(vocab), chunk), expected, atol=tolerance, rtol=0)


@EVERY
@pytest.mark.parametrize("file", ["", "model-f32.gguf", "model-q8_0.gguf"])
def test_float32_equals_torch(family: str, file: str) -> None:
    path = DATA / family / file
    model, report = on_native(path)
    agree(model, on_torch(path), 1e-4)
    assert report.isa == _native.available()[0] and report.threads == 1
    matrices = {kind for layer in report.layers for kind in layer.kinds}
    assert matrices == {"": {"BF16"}, "model-f32.gguf": {"F32"}, "model-q8_0.gguf": {"Q8_0"}}[file]
    assert report.complete == (family != "qwen3_5_text")


@EVERY
def test_eight_bit_activations_cost_little(family: str) -> None:
    path = DATA / family / "model-q8_0.gguf"
    expected = Paged(on_torch(path)).logits(prompts())
    found = Paged(on_native(path, activation_dtype="int8")[0]).logits(prompts())
    assert 1e-7 < nmse(found, expected) < ACTIVATIONS_INT8         # not zero: they are quantised


@EVERY
def test_float_weights_quantised_at_load(family: str) -> None:
    model, report = on_native(DATA / family, activation_dtype="int8", quantization="int8")
    assert {kind for layer in report.layers for kind in layer.kinds} == {"Q8_0"}
    expected = Paged(on_torch(DATA / family)).logits(prompts())
    assert 1e-6 < nmse(Paged(model).logits(prompts()), expected) < WEIGHTS_INT8


@EVERY
def test_linear_layers_in_four_bits(family: str) -> None:
    """Against the same weights in blocks of four bits: linear layers Q4_0, both ends Q8_0; the values are read back."""
    model, report = on_native(DATA / family, activation_dtype="int8", quantization="int4")
    kinds = {layer.name: layer.kinds for layer in report.layers if layer.kinds}
    assert {kinds.pop("model.embed_tokens"), kinds.pop("lm_head")} == {("Q8_0",)}
    assert set(kinds.values()) == {("Q4_0",)}
    expected = Paged(on_torch(DATA / family)).logits(prompts())
    assert 1e-5 < nmse(Paged(model).logits(prompts()), expected) < WEIGHTS_INT4


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_equal_torch(shape: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, **SHAPES[shape])
    model, report = on_native(path, strict_native=True)
    vocab = SHAPES[shape].get("vocabulary", 320)
    agree(model, on_torch(path), 1e-4, vocab)
    expected_kind = "BF16" if "stored" in SHAPES[shape] else "F32"
    assert {kind for layer in report.layers for kind in layer.kinds} == {expected_kind}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_in_eight_bits(shape: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, **SHAPES[shape])
    vocab = SHAPES[shape].get("vocabulary", 320)
    model, _ = on_native(path, strict_native=True, activation_dtype="int8", quantization="int8")
    assert nmse(Paged(model).logits(prompts(vocab)), Paged(on_torch(path)).logits(prompts(vocab))) < WEIGHTS_INT8


@pytest.mark.parametrize("length", [20, 200])
def test_longrope_short_and_long_factors(length: int) -> None:
    """The checkpoint's factors change at 32 positions; an engine keeps the set of its max_model_len."""
    path = DATA / "phi3"
    prompt = [tokens(18)]
    model, oracle = on_native(path, max_model_len=length)[0], on_torch(path, max_model_len=length)
    torch.testing.assert_close(Paged(model).logits(prompt), Paged(oracle).logits(prompt), atol=1e-4, rtol=0)
    other = on_torch(path, max_model_len=220 - length)
    assert (Paged(other).logits(prompt) - Paged(oracle).logits(prompt)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_cache_types(dtype: torch.dtype, tmp_path: Path) -> None:
    """Keys and values rounded alike; a rounding that falls the other way moves logits by a step of the type, no more."""
    path = checkpoint(tmp_path, num_attention_heads=6, num_key_value_heads=2)
    found = Paged(on_native(path)[0], dtype)
    expected = Paged(on_torch(path), torch.float32).logits(prompts(320))
    assert nmse(found.logits(prompts(320)), expected) < (3e-4 if dtype == torch.bfloat16 else 3e-6)


@pytest.mark.parametrize("options", [{"num_attention_heads": 6, "num_key_value_heads": 2}, {"head_dim": 64},
                                     {"head_dim": 20, "num_attention_heads": 33}], ids=str)
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_int8_cache_as_torch_reads_it(options: dict[str, Any], activations: str, tmp_path: Path) -> None:
    """Exact arithmetic on the same rounded keys and values; a value on the edge between two steps may fall either way."""
    path = checkpoint(tmp_path, **options)
    found = Paged(on_native(path, activation_dtype=activations)[0], torch.int8).logits(prompts(320))
    same = Paged(on_torch(path), torch.int8).logits(prompts(320))
    exact = Paged(on_torch(path), torch.float32).logits(prompts(320))
    assert 1e-7 < nmse(same, exact) < 1e-3
    assert nmse(found, same) < (1e-5 if activations == "float32" else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_the_cache_holds_what_torch_would_write(family: str, dtype: torch.dtype) -> None:
    rows = []
    for model in (on_native(DATA / family)[0], on_torch(DATA / family)):
        paged = Paged(model, dtype)
        paged.prefill({"a": prompts()[0]}, 7)
        rows.append([t.float() for layer in range(len(model.model.layers)) for t in paged.view.kv(layer)])
    # One step of the type's rounding apart at most, values being below 16 in the first layers of these models.
    step = {torch.float32: 1e-4, torch.bfloat16: 2 ** -8, torch.float16: 2 ** -11}[dtype]
    for found, expected in zip(*rows):
        assert expected.abs().sum() > 0
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, atol=step, rtol=0)
        else:                            # later layers read rounded keys, so a few steps
            assert nmse(found, expected) < step ** 2


def test_a_hybrid_keeps_its_own_mixers_and_gets_native_mlps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model, report = on_native(DATA / "qwen3_5_text")
    reasons = {layer.name: layer.reason for layer in report.layers}
    assert not report.complete
    for index, block in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        assert reasons[f"{prefix}.mlp"] is None
        assert block.mix is None and block.feed is not None
        names = {n for n in (f"{prefix}.linear_attn", f"{prefix}.self_attn") if n in reasons}
        assert len(names) == 1
        reason = str(reasons[names.pop()])
        assert reason in ("no native GatedDeltaNet", "no native GatedAttention")
    assert reasons["model.norm"] is None and reasons["lm_head"] is None
    assert "not native: no native GatedDeltaNet (model.layers.0.linear_attn" in caplog.text


def test_strict_native_is_an_error_where_a_layer_is_declined() -> None:
    with pytest.raises(ConfigError, match=r"strict_native: \d of \d+ layers are not native: no native GatedDeltaNet"):
        on_native(DATA / "qwen3_5_text", strict_native=True)


def test_a_complete_model_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, report = on_native(DATA / "llama", strict_native=True)
    assert report.complete and not caplog.records
    assert all(layer.nbytes > 0 for layer in report.layers if layer.kinds and layer.name != "lm_head")


def test_a_type_without_kernels_is_declined_visibly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One matrix of a llama file in a type that is dequantised only: that MLP stays with torch, the rest does not."""
    path = tmp_path / "model.gguf"
    rewrite(DATA / "llama" / "model-f32.gguf", path, "blk.1.ffn_up.weight", gguf.GGMLQuantizationType.MXFP4)
    with caplog.at_level(logging.WARNING):
        model, report = on_native(path)
    declined = [(layer.name, layer.reason) for layer in report.declined]
    assert declined == [("model.layers.1.mlp", "no native kernel for weights of type MXFP4")]
    assert "model.layers.1.mlp" in caplog.text and "MXFP4" in caplog.text
    agree(model, on_torch(path), 1e-4)
    with pytest.raises(ConfigError, match="MXFP4"):
        on_native(path, strict_native=True)


def rewrite(source: Path, target: Path, name: str, kind: gguf.GGMLQuantizationType) -> None:
    """A copy of a GGUF file with one tensor quantised."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        data: np.ndarray = tensor.data
        if tensor.name == name:
            writer.add_tensor(tensor.name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("options", "reason"), [
    ({"block_size": 4}, "block_size is 4; native attention needs a multiple of 8"),
    ({"kv_cache_dtype": "float64"}, "no native kernel for a KV cache of float64"),
])
def test_a_cache_without_kernels_declines_attention(options: dict[str, Any], reason: str) -> None:
    _, report = on_native(DATA / "llama", **options)
    assert {layer.reason for layer in report.declined} == {reason}
    assert all(layer.name.endswith("self_attn") for layer in report.declined)


def test_an_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no instruction set sse9; available: .*scalar"):
        lowered(DATA / "llama", isa="sse9")


def test_a_cpu_with_plain_kernels_alone_is_told_and_serves(monkeypatch, caplog) -> None:
    """The variable leaves what a CPU without AVX2 has: the same tokens, and a warning that says why it takes longer."""
    def answer() -> list[int]:
        llm = LLM(DATA / "llama", dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 20)
        return llm.generate([tokens(9)], SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids

    expected = answer()
    assert "plain kernels" not in caplog.text
    monkeypatch.setenv("RIDGELINE_ISA", "scalar")
    assert answer() == expected
    assert "neither AVX2 nor AVX-512" in caplog.text and "plain kernels are correct and many times slower" in caplog.text
    monkeypatch.setenv("RIDGELINE_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"no instruction set sse9; available: .*scalar"):
        answer()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight",
                                  "model.layers.1.self_attn.o_proj.weight", "lm_head.weight"])
def test_damaged_checkpoints_are_named(name: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({n: t for n, t in whole.items() if n != name}, path)
    with pytest.raises(ModelError, match=f"missing: {name}"):
        on_native(tmp_path)
    save_file({n: t[:-1].contiguous() if n == name else t for n, t in whole.items()}, path)
    with pytest.raises(CorruptFile, match=name):
        on_native(tmp_path)


@pytest.mark.parametrize("present", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_under_either_name(present: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    matrix = whole.pop("model.embed_tokens.weight")
    save_file({**whole, present: matrix}, path)
    with caplog.at_level(logging.WARNING):
        agree(on_native(tmp_path)[0], on_torch(tmp_path), 1e-4, 320)
        save_file({**whole, "model.embed_tokens.weight": matrix, "lm_head.weight": matrix.clone()}, path)
        on_native(tmp_path)
    assert not caplog.records                    # the second copy is no tensor that nobody uses


def test_made_up_weights_need_only_a_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model, report = on_native(tmp_path, load_format="dummy")
    assert report.complete
    # The native backend keeps matrices in bfloat16, as most checkpoints do.
    assert nmse(Paged(model).logits(prompts(320)), Paged(on_torch(tmp_path, load_format="dummy")).logits(prompts(320))) < 1e-4


@EVERY
@pytest.mark.parametrize("file", ["", "model-q8_0.gguf"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_survey_says_what_lowering_does(family: str, file: str, quantization: str | None) -> None:
    """From the headers alone, as `ridgeline info` tells it."""
    path, config = DATA / family / file, EngineConfig(threads=1, quantization=quantization)
    found = build(open_model(str(path), config), config)
    before = [type(module) for module in found.model.modules()]
    expected = survey(found, config)
    assert not isinstance(expected, str)
    assert [type(module) for module in found.model.modules()] == before
    report = load(found, config)
    assert report is not None
    assert (report.isa, report.threads, report.parameters) == (expected.isa, expected.threads, expected.parameters)
    assert [(x.name, x.kinds, x.reason) for x in report.layers] == [(x.name, x.kinds, x.reason) for x in expected.layers]
    assert 0 < expected.nbytes <= report.nbytes


def test_the_report_stays_with_the_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    llm = LLM(tmp_path, threads=1, num_pages=8)
    assert llm.loaded.report is not None and llm.loaded.report.complete
    assert LLM(tmp_path, threads=1, num_pages=8, backend="torch").loaded.report is None


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"dtype": "float64", "quantization": "int8", "backend": "auto"},
                                     {"dtype": "float64", "strict_native": True, "backend": "auto"}])
def test_what_cannot_run_natively_is_an_error_where_it_was_asked_for(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="computes in float32, and dtype is 'float64'"):
        on_native(DATA / "llama", **options)


def test_float64_runs_on_torch_and_says_so() -> None:
    config = EngineConfig(dtype="float64")
    assert "float64" in str(survey(build(open_model(str(DATA / "llama"), config), config), config))


def test_progress_ends_with_everything(tmp_path: Path) -> None:
    write_model(tmp_path)
    config, told = EngineConfig(backend="native"), []
    load(build(open_model(str(tmp_path), config), config), config, lambda name, done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    total = json.loads((tmp_path / "config.json").read_text())["vocab_size"] * 32
    assert total < told[-1][0] <= told[-1][1]
