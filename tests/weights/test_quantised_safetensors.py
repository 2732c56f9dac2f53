"""AWQ, GPTQ and compressed-tensors checkpoints are read exactly, and what cannot be read is named."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantised_cases import CASES
from quantised_checkpoint import compressed_config, weights_config, write_quantised
from ridgeline.errors import CorruptFile, ModelError, UnsupportedModel
from ridgeline.weights.checkpoint import open_checkpoint

torch.set_num_threads(1)

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    values, plain = write_quantised(tmp_path, CASES[name])
    checkpoint, reference = open_checkpoint(tmp_path), open_checkpoint(plain)
    assert sorted(checkpoint.names()) == sorted(reference.names())
    assert len(values) >= 7
    for tensor, expected in values.items():
        assert checkpoint.shape(tensor) == tuple(expected.shape)
        assert checkpoint.kind(tensor) == f"INT{CASES[name].matrix['bits']}"
        assert checkpoint.packed(tensor) is None
        assert 0 < checkpoint.nbytes(tensor) < expected.numel() * 2.5
        assert torch.equal(checkpoint.read(tensor, torch.float32), expected)
        assert torch.equal(checkpoint.read(tensor, torch.bfloat16), expected.bfloat16())
        for low, high in ((0, 3), (5, 12), (len(expected) - 2, len(expected))):
            assert torch.equal(checkpoint.read(tensor, torch.float32, rows=(low, high)), expected[low:high])
    other = next(n for n in reference.names() if n not in values)
    assert checkpoint.form(other) is None and checkpoint.codes(other) is None
    assert torch.equal(checkpoint.read(other, torch.float32), reference.read(other, torch.float32))


def edit(folder: Path, **changes: Any) -> None:
    """Changes fields of quantization_config: "a__b" is field b of a."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        at = config["quantization_config"]
        for part in outer:
            at = at[part]
        at[last] = value
    path.write_text(json.dumps(config))


WEIGHTS = "config_groups__group_0__weights"


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("awq, groups of 32", {"bits": 3}, "bits is 3; supported: 4"),
    ("awq, groups of 32", {"version": "gemv"}, "version is 'gemv'; supported: 'gemm'"),
    ("awq, groups of 32", {"quant_method": "fp8"}, "quant_method is 'fp8'; supported: awq, gptq, compressed-tensors"),
    ("gptq, groups of 32", {"bits": 2}, "bits is 2; supported: 4 and 8"),
    ("gptq, groups of 32", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: 'gptq' and 'gptq_v2'"),
    ("gptq, groups of 32", {"is_marlin_format": True}, "is_marlin_format is True; supported: False"),
    ("gptq, groups of 32", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic is .*; supported: one rule for all layers"),
    ("compressed, int8", {"format": "float-quantized"}, "format is 'float-quantized'; supported: 'pack-quantized' and 'int-"),
    ("compressed, int8", {f"{WEIGHTS}__type": "float"}, "group_0.weights.type is 'float'; supported: 'int'"),
    ("compressed, int8", {f"{WEIGHTS}__num_bits": 6}, "group_0.weights.num_bits is 6; supported: 4 and 8"),
    ("compressed, int8", {f"{WEIGHTS}__strategy": "block"}, "group_0.weights.strategy is 'block'; supported: 'group' and"),
    ("compressed, int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24-bitmask'"),
])
def test_what_cannot_be_read_names_the_field(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, CASES[case])
    edit(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=f"quantization_config.*{message}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("awq, groups of 32", {"group_size": 0}, "group_size is 0; it must be a number of columns or -1"),
    ("gptq, groups of 32", {"group_size": "32"}, "group_size is '32'; it must be"),
    ("compressed, groups of 32", {"config_groups": {}}, "config_groups is {}; it must be an object with groups"),
    ("compressed, groups of 32", {"config_groups__group_0__weights": None}, "group_0.weights is None; it must be an object"),
    ("compressed, groups of 32", {"ignore": ["lm_head", f"re:.*{UP.split('.')[-1]}"]},
     f"'{UP}.weight_scale' is there, but no config_group has the target"),
    ("compressed, groups of 32", {"format": "int-quantized"}, "has a weight_packed, and its format is 'int-quantized'"),
])
def test_impossible_configurations(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, CASES[case])
    edit(tmp_path, **changes)
    with pytest.raises(CorruptFile, match=re.escape(message)):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": 4}')
    with pytest.raises(CorruptFile, match="quantization_config is 4; it must be an object"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("case", "suffixes"), [
    ("awq, groups of 32", ("qweight", "qzeros", "scales")),
    ("gptq, groups of 32", ("qweight", "qzeros", "scales", "g_idx")),
    ("compressed, 8 bits, asymmetric", ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")),
    ("compressed, int8, asymmetric", ("weight", "weight_scale", "weight_zero_point")),
])
def test_damaged_tensors_are_named(case: str, suffixes: tuple[str, ...], tmp_path: Path) -> None:
    write_quantised(tmp_path, CASES[case])
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for suffix in suffixes:
        name = f"{UP}.{suffix}"
        assert name in whole
        # Without its codes a matrix is simply not there, which the loader says; without anything else it is damaged.
        if suffix not in ("qweight", "weight_packed", "g_idx", "weight_scale"):
            save_file({n: t for n, t in whole.items() if n != name}, path)
            with pytest.raises(CorruptFile, match=f"tensor '{name}' is missing"):
                open_checkpoint(tmp_path)
        for damaged in (whole[name][:-1].contiguous(), whole[name].double()):
            save_file({n: damaged if n == name else t for n, t in whole.items()}, path)
            told = r"(is \[.*; expected|says .* do not hold|has 63 input features)"
            with pytest.raises(CorruptFile, match=rf"tensor '{UP}\.\w+' {told}"):
                open_checkpoint(tmp_path)
    if "qweight" in suffixes:
        save_file({**whole, f"{UP}.weight": torch.ones(160, 64)}, path)
        with pytest.raises(CorruptFile, match=f"holds both '{UP}.qweight' and '{UP}.weight'"):
            open_checkpoint(tmp_path)


def test_values_that_headers_do_not_show(tmp_path: Path) -> None:
    write_quantised(tmp_path, CASES["gptq, in the order of activations"])
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    order = whole[f"{UP}.g_idx"].clone()
    order[3] = 9
    save_file({**whole, f"{UP}.g_idx": order}, path)
    with pytest.raises(CorruptFile, match=f"tensor '{UP}.g_idx' names groups 0 to 9; there are 2"):
        open_checkpoint(tmp_path).read(f"{UP}.weight", torch.float32)


def test_modules_that_are_not_converted_stay_plain(tmp_path: Path) -> None:
    _values, plain = write_quantised(tmp_path, CASES["awq, groups of 32"])
    path = tmp_path / "model.safetensors"
    kept = load_file(plain / "model.safetensors")[f"{UP}.weight"]
    save_file({**{n: t for n, t in load_file(path).items() if not n.startswith(UP)}, f"{UP}.weight": kept}, path)
    edit(tmp_path, modules_to_not_convert=["up_proj"])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.kind(f"{UP}.weight") == "F32" and checkpoint.form(f"{UP}.weight") is None
    assert torch.equal(checkpoint.read(f"{UP}.weight", torch.float32), kept)
    assert checkpoint.kind(f"{UP.replace('up', 'down')}.weight") == "INT4"


def test_quantised_activations_are_noted_and_not_used(tmp_path: Path) -> None:
    case = CASES["compressed, int8"]
    case.config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    try:
        values, _ = write_quantised(tmp_path, case)
    finally:
        case.config["config_groups"]["group_0"]["input_activations"] = None
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), f"{UP}.input_scale": torch.ones(1)}, path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ["config_groups.group_0 asks for quantised activations; only its weights are read as the file "
                                "has them"]
    assert f"{UP}.input_scale" not in checkpoint.names()
    assert torch.equal(checkpoint.read(f"{UP}.weight", torch.float32), values[f"{UP}.weight"])


def test_schemes_are_found_by_name_then_pattern_then_class(tmp_path: Path) -> None:
    """Two groups of one file: 8 bits for what is named, 4 for all other linear layers."""
    from functools import partial

    from quantised_checkpoint import compressed, random_matrix

    four, eight = weights_config(4, 32, True), weights_config(8, 32, True)
    config = compressed_config(four)
    config["config_groups"]["group_1"] = {"targets": [r"re:.*\.mlp\..*", "model.layers.1.self_attn.o_proj"], "weights": eight}
    values, _plain = write_quantised(tmp_path, CASES["compressed, groups of 32"])
    edit(tmp_path, config_groups=config["config_groups"])
    path, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(3)
    stored = load_file(path)
    for name in [n for n in values if ".mlp." in n or "1.self_attn.o_proj" in n]:
        matrix = random_matrix(values[name], generator, bits=8, group=32, symmetric=True)
        values[name] = matrix.values()
        stored.update(partial(compressed)(name.removesuffix(".weight"), matrix))
    save_file(stored, path)
    checkpoint = open_checkpoint(tmp_path)
    for name, expected in values.items():
        assert torch.equal(checkpoint.read(name, torch.float32), expected), name
    assert {checkpoint.kind(n) for n in values} == {"INT4", "INT8"}


def test_quantised_gpt2_is_refused(tmp_path: Path) -> None:
    write_quantised(tmp_path, CASES["gptq, groups of 32"])
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"gpt2"'))
    with pytest.raises(ModelError, match="quantised gpt2 is not supported"):
        open_checkpoint(tmp_path)
