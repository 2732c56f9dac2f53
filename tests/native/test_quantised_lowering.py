"""Codes of AWQ, GPTQ and compressed-tensors run natively without another rounding."""
from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from native_kit import PAGE, Paged, nmse, on_native, on_torch, tokens

from quantised_cases import CASES
from quantised_checkpoint import write_quantised
from ridgeline.config import EngineConfig
from ridgeline.loading import build, load, open_model, survey
from ridgeline.native import _native

torch.set_num_threads(1)

ISA = pytest.mark.parametrize("isa", _native.available())
GROUPED = {"INT4_G32": (4, 32), "INT4_G64": (4, 64), "INT4_G128": (4, 128), "INT8_G32": (8, 32), "INT8_G128": (8, 128)}
KIND = pytest.mark.parametrize("kind", [*GROUPED, "Q4_0", "Q8_0"])


def prompts() -> list[list[int]]:
    return [tokens(n, seed, 320) for seed, n in enumerate((3 * PAGE + 5, PAGE + 1, 1))]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _, plain = write_quantised(tmp_path, case)
    expected = Paged(on_torch(plain)).logits(prompts())
    assert expected.std() > 0.1
    torch.testing.assert_close(Paged(on_torch(tmp_path)).logits(prompts()), expected, atol=0, rtol=0)
    model, report = on_native(tmp_path, strict_native=True)
    torch.testing.assert_close(Paged(model).logits(prompts()), expected, atol=1e-4, rtol=0)
    kinds = {kind for layer in report.layers for kind in layer.kinds if layer.name != "lm_head" or case.heads}
    # A matrix no wider than its group has one scale a row.
    assert case.kind in kinds and kinds <= {case.kind, f"INT{case.matrix['bits']}_G128", *(() if case.heads else ("F32",))}
    eight, _ = on_native(tmp_path, activation_dtype="int8")
    assert (0 if case.kind == "F32" else 1e-7) < nmse(Paged(eight).logits(prompts()), expected) < 5e-3


@pytest.mark.parametrize("name", CASES)
def test_the_survey_of_codes_says_what_lowering_does(name: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, CASES[name])
    config = EngineConfig(threads=1)
    found = build(open_model(str(tmp_path), config), config)
    expected = survey(found, config)
    report = load(found, config)
    assert report is not None and not isinstance(expected, str)
    assert [(x.name, x.kinds, x.reason) for x in report.layers] == [(x.name, x.kinds, x.reason) for x in expected.layers]
    assert report.notes == expected.notes and report.parameters == expected.parameters
    assert 0 < expected.nbytes <= report.nbytes


@pytest.mark.parametrize(("name", "reason"), [
    ("gptq, in the order of activations", "14 matrices dequantised to float32, its columns are quantised in the order of"),
    ("gptq, groups of 16", "dequantised to float32, groups of 16 columns, where kernels have multiples of 32"),
])
def test_what_has_no_packed_form_is_told(name: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_quantised(tmp_path, CASES[name])
    with caplog.at_level(logging.WARNING):
        _, report = on_native(tmp_path)
    assert reason in report.notes[0] and reason in caplog.text


def grouped(kind: str, rows: int, cols: int, group: int, seed: int = 0) -> tuple[tuple, torch.Tensor]:
    """Codes, scales and zeros as the engine takes them, and their values: (rows, cols) fp32."""
    bits = GROUPED.get(kind, (4 if kind == "Q4_0" else 8, 32))[0]
    random = torch.Generator().manual_seed(seed)
    count, middle = -(-cols // group), 1 << bits - 1
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=random, dtype=torch.uint8)
    scales = torch.randn(rows, count, generator=random) / 100
    zeros = torch.randint(-middle, middle, (rows, count), generator=random, dtype=torch.int8)
    if kind not in GROUPED:
        scales, zeros = scales.half().float(), zeros * 0
    at = torch.arange(cols) // group
    values = scales[:, at] * (codes.int() - middle - zeros[:, at].int()).float()
    return (codes.numpy(), scales.numpy(), zeros.numpy(), group), values


def multiply(engine: _native.Engine, packed: _native.Matrix, x: torch.Tensor, precision: str) -> torch.Tensor:
    """x: (M, cols) -> (M, rows). The row behind the result must stay as it was."""
    out = torch.full((len(x) + 1, packed.rows), 7.0)
    engine.linear(_native.Linear(packed, [], precision), x.data_ptr(), len(x), out.data_ptr())
    assert (out[-1] == 7).all()
    return out[:-1]


@ISA
@KIND
def test_products_of_codes(kind: str, isa: str) -> None:
    engine = _native.Engine(isa, 2)
    own = GROUPED.get(kind, (0, 32))[1]
    for rows, cols, group in ((1, own, own), (17, 5 * own, own), (130, 1000, 2 * own), (48, 333, 333), (33, 44, 44)):
        parts, values = grouped(kind, rows, cols, group, rows)
        packed = engine.allocate_codes(kind, rows, cols)
        for low, high in ((16, rows), (0, min(16, rows))):
            if low < high:
                engine.fill_codes(packed, *(p[low:high] for p in parts[:3]), group, low)
        ids, out = torch.arange(rows), torch.empty(rows, cols)
        engine.lookup(packed, ids.data_ptr(), rows, out.data_ptr())
        assert torch.equal(out, values)
        x = torch.randn(13, cols, generator=torch.Generator().manual_seed(rows))
        exact = x.double() @ values.double().T
        whole = multiply(engine, packed, x, "float32")
        assert ((whole - exact).abs() <= 2e-6 * (x.abs() @ values.abs().T + 1)).all(), (rows, cols)
        eight = multiply(engine, packed, x, "int8")
        assert nmse(eight, exact.float()) < 1e-3
        for m in range(1, 13):
            assert torch.equal(multiply(engine, packed, x[:m], "float32"), whole[:m]), m
            assert torch.equal(multiply(engine, packed, x[:m], "int8"), eight[:m]), m


@KIND
def test_instruction_sets_agree_on_codes(kind: str) -> None:
    parts, values = grouped(kind, 33, 300, 300)
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    found = []
    for isa in _native.available():
        engine = _native.Engine(isa, 1)
        packed = engine.allocate_codes(kind, 33, 300)
        engine.fill_codes(packed, *parts, 0)
        out = torch.empty(5, 33)
        engine.linear(_native.Linear(packed, [], "int8"), x.data_ptr(), 5, out.data_ptr())
        found.append(out)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-4 * float(values.abs().max()) * 30, rtol=1e-4)


def test_codes_that_do_not_fit_are_refused() -> None:
    engine = _native.Engine("", 1)
    (codes, scales, zeros, _), _ = grouped("INT4_G64", 16, 256, 64)
    packed = engine.allocate_codes("INT4_G64", 16, 256)
    for bad in ((codes[:, :-1].copy(), scales, zeros, 64), (codes, scales[:, :-1].copy(), zeros, 64),
                (codes, scales, zeros, 96), (codes, scales, zeros[:8], 64), (codes, scales, zeros, 0)):
        with pytest.raises(ValueError, match="do not fit a matrix of 256 columns"):
            engine.fill_codes(packed, *bad, 0)
    with pytest.raises(ValueError, match="whole tiles"):
        engine.fill_codes(packed, codes, scales, zeros, 64, 8)
    with pytest.raises(ValueError, match="INT3_G64 has no native kernel"):
        engine.allocate_codes("INT3_G64", 16, 256)
    with pytest.raises(ValueError, match="no matrix of 0 x 256 codes"):
        engine.allocate_codes("INT4_G64", 0, 256)
