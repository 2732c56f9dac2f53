"""Quantised folders hold what was asked for, load natively, and error compensation beats rounding to nearest."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError, ModelError, UnsupportedModel
from ridgeline.loading import build, load, open_model
from ridgeline.models.base import CausalLM
from ridgeline.quant.compensate import compensate, encode
from ridgeline.quant.folder import Recipe, Written, pack, quantise_folder
from ridgeline.quant.grid import best_grid, nearest_grid
from ridgeline.weights.checkpoint import Checkpoint, open_checkpoint
from tiny_checkpoint import write_checkpoint

torch.set_num_threads(1)

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "float", **SIZES)


def opened(folder: Path) -> tuple[CausalLM, Checkpoint]:
    config = EngineConfig(dtype="float32", backend="torch")
    found = build(open_model(str(folder), config), config)
    load(found, config)
    return found.model, found.checkpoint


def quantised(folder: Path, out: Path, recipe: Recipe) -> list[Written]:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 320, (60,), generator=generator).tolist() for _ in range(4)]
    return quantise_folder(*opened(folder), out, recipe, sequences)


def uneven(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Heavy tails, as weights have."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) ** 3 / 10


@pytest.mark.parametrize("bits", [4, 8])
def test_a_grid_holds_its_values_to_half_a_step(bits: int) -> None:
    x = uneven(50, 32)
    x[3], x[4] = 0, x[4].abs()
    grid = nearest_grid(x, bits)
    codes = grid.encode(x)
    assert codes.min() >= 0 and codes.max() <= 2 ** bits - 1 and torch.equal(codes, codes.round())
    assert torch.equal(grid.scale, grid.scale.half().float())
    # fp16 rounds the scale by up to 2^-11, which the far end of the range feels 2^bits times.
    assert ((grid.decode(codes) - x).abs() <= grid.scale.abs() * (0.51 if bits == 4 else 0.6) + 2 ** -24).all()
    assert (grid.decode(codes)[3] == 0).all()


@pytest.mark.parametrize("weighted", [True, False])
def test_a_search_never_loses_to_rounding(weighted: bool) -> None:
    x = uneven(400, 32, seed=1)
    weight = torch.rand(32, generator=torch.Generator().manual_seed(2)) + 0.01 if weighted else torch.ones(32)
    errors = []
    for grid in (nearest_grid(x, 4), best_grid(x, 4, weight if weighted else None)):
        errors.append(((grid.decode(grid.encode(x)) - x).square() * weight).sum(1))
    assert (errors[1] <= errors[0]).all()
    assert errors[1].sum() < 0.85 * errors[0].sum()


def test_compensation_lowers_the_error_of_the_outputs() -> None:
    """Correlated inputs: what the layer computes is what counts, not each weight."""
    generator = torch.Generator().manual_seed(3)
    weight = uneven(48, 128)
    x = torch.randn(600, 20, generator=generator) @ torch.randn(20, 128, generator=generator)
    x += 0.3 * torch.randn(600, 128, generator=generator)
    x[:, 5] = 0                                                      # an input that is never there
    errors = []
    for encoded in (encode(weight, 4, 32, search=False), encode(weight, 4, 32), compensate(weight, x.T @ x, 4, 32)):
        assert encoded.codes.dtype == torch.uint8 and encoded.codes.max() <= 15 and encoded.scales.shape == (48, 4)
        errors.append(float((x @ (encoded.values() - weight).T).square().sum()))
    assert errors[1] < errors[0] and errors[2] < 0.5 * errors[1], errors
    assert (compensate(weight, x.T @ x, 4, 32).values()[:, 5] == 0).all()


def test_codes_are_packed_lowest_first() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert pack(codes, 4).tolist() == [[0x76543210, 0xFEDCBA98 - (1 << 32)]]
    assert pack(codes[:, :8], 8).tolist() == [[0x03020100, 0x07060504]]


@pytest.mark.parametrize("method", ["calibrated", "search", "nearest"])
def test_four_bits_with_heads_in_eight(method: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = quantised(source, out, Recipe(4, 32, method))
    assert [(line.what, line.tensors) for line in report] == [
        ("linear layers", 14), ("embeddings and head", 2), ("other tensors, as they were", 5)]
    linear = report[0]
    assert linear.after < linear.before * 4.5 / 32 + 14 * 16 + 1 and linear.values * 4 == linear.before
    _, native = _loaded(out)
    assert {layer.kinds for layer in native.layers if layer.kinds} == {("Q4_0",), ("Q8_0",)}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert [g["weights"]["num_bits"] for g in config["quantization_config"]["config_groups"].values()] == [4, 8]


def _loaded(folder: Path) -> Any:
    config = EngineConfig(threads=1)
    found = build(open_model(str(folder), config), config)
    return found.model, load(found, config)


def test_the_better_rules_are_nearer_to_the_float_model(source: Path, tmp_path: Path) -> None:
    from ridgeline.batch import whole

    ids = torch.randint(0, 320, (200,), generator=torch.Generator().manual_seed(9))

    @torch.inference_mode()
    def logp(folder: Path) -> torch.Tensor:
        model, _ = opened(folder)
        return torch.log_softmax(model.logits(model(whole([len(ids)], ids)).hidden).double(), -1)

    expected, found = logp(source), {}
    for method in ("nearest", "search", "calibrated"):
        quantised(source, tmp_path / method, Recipe(4, 32, method))
        found[method] = float((expected.exp() * (expected - logp(tmp_path / method))).sum(-1).mean())
    assert found["search"] < found["nearest"] and found["calibrated"] < 0.8 * found["nearest"], found


def test_eight_bits(source: Path, tmp_path: Path) -> None:
    quantised(source, tmp_path / "out", Recipe(8))
    _, native = _loaded(tmp_path / "out")
    assert {layer.kinds for layer in native.layers if layer.kinds} == {("Q8_0",)}
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert sorted(before.names()) == sorted(after.names())
    for name in before.names():
        x, y = before.read(name, torch.float32), after.read(name, torch.float32)
        assert ((x - y).abs() <= x.abs().max() / 127).all(), name


def test_embeddings_may_stay(source: Path, tmp_path: Path) -> None:
    quantised(source, tmp_path / "out", Recipe(4, 32, "search", keep_ends=True))
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.kind("lm_head.weight") == checkpoint.kind("model.embed_tokens.weight") == "F32"
    config = checkpoint.config["quantization_config"]
    assert set(config["config_groups"]) == {"group_0"} and set(config["ignore"]) == {"lm_head", "model.embed_tokens"}


def test_what_does_not_divide_into_groups_stays(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "float", **{**SIZES, "intermediate_size": 100})
    quantised(source, tmp_path / "out", Recipe(4, 64, "search"))
    checkpoint = open_checkpoint(tmp_path / "out")
    kinds = {name.split(".")[-2]: checkpoint.kind(name) for name in checkpoint.names() if ".layers." in name}
    assert kinds["up_proj"] == "INT4" and kinds["down_proj"] == "F32"
    assert "model.layers.1.mlp.down_proj" in checkpoint.config["quantization_config"]["ignore"]
    _loaded(tmp_path / "out")


def test_fused_matrices_stay_fused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "float", **SIZES)
    path = source / "model.safetensors"
    tensors = load_file(path)
    for i in range(2):
        at = f"model.layers.{i}"
        tensors[f"{at}.self_attn.qkv_proj.weight"] = torch.cat(
            [tensors.pop(f"{at}.self_attn.{n}_proj.weight") for n in ("q", "k", "v")])
        tensors[f"{at}.mlp.gate_up_proj.weight"] = torch.cat([tensors.pop(f"{at}.mlp.{n}_proj.weight") for n in ("gate", "up")])
    save_file(tensors, path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "phi3", "pad_token_id": 0}))
    quantised(source, tmp_path / "out", Recipe(4, 32, "calibrated"))
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.kind("model.layers.0.self_attn.qkv_proj.weight") == "INT4"
    fused = tensors["model.layers.0.self_attn.qkv_proj.weight"]
    close = checkpoint.read("model.layers.0.self_attn.qkv_proj.weight", torch.float32)
    assert (close - fused).square().mean() < 0.05 * fused.square().mean()
    _, native = _loaded(tmp_path / "out")
    assert native.complete and ("Q4_0",) in {layer.kinds for layer in native.layers}


def test_values_that_are_not_finite_stop_the_calibration(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.input_layernorm.weight"][3] = float("nan")
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"what model.layers.1.self_attn.q_proj reads of the calibration text is not finite"):
        quantised(source, tmp_path / "out", Recipe(4))
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    for target in (out, out / "precious"):
        with pytest.raises(ConfigError, match="exists and is not an empty folder"):
            quantised(source, target, Recipe(4, 32, "search"))
    assert [p.name for p in out.iterdir()] == ["precious"]


@pytest.mark.parametrize(("options", "message"), [
    ({"bits": 3}, "bits is 3; valid: 4, 8"), ({"bits": 4, "group": 48}, "group_size is 48; valid: 32, 64, 128"),
    ({"bits": 4, "method": "magic"}, "method is 'magic'; valid: calibrated, search, nearest"),
])
def test_recipes_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**options)


def test_only_float_checkpoints_are_taken(source: Path, tmp_path: Path) -> None:
    quantised(source, tmp_path / "out", Recipe(8))
    with pytest.raises(UnsupportedModel, match=r"and 15 more are quantised already; quantize needs F32, F16, BF16 weights"):
        quantised(tmp_path / "out", tmp_path / "again", Recipe(4, 32, "search"))
    data = Path(__file__).parents[1] / "data" / "gguf"
    with pytest.raises(UnsupportedModel, match="holds gguf weights; quantize reads a folder of safetensors"):
        quantised(data / "llama" / "model-f32.gguf", tmp_path / "again", Recipe(4, 32, "search"))
    with pytest.raises(UnsupportedModel, match="stored transposed"):
        quantised(data / "gpt2", tmp_path / "again", Recipe(4, 32, "search"))
