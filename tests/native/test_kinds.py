"""Every weight type with kernels: packed without loss, multiplied as its dequantised values are, damaged shapes refused."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ridgeline.native import _native

torch.set_num_threads(1)

KINDS = _native.types()
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Where a block of a type that the package cannot quantise has its fp16 fields; random bytes there could be infinite.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
EVERY = pytest.mark.parametrize("kind", KINDS)
QUANTISED = pytest.mark.parametrize("kind", [k for k in KINDS if k not in FLOATS])
ISA = pytest.mark.parametrize("isa", _native.available())
# Activations in blocks of 32 with a step of largest / 127: about 2.3e-5 of the variance of normal values, see csrc/pack.h.
NMSE_INT8 = 1e-4


def matrix(kind: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Rows in the bytes of this type, and their values: (rows, cols) fp32."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, cols), dtype=np.float32)
    if kind in FLOATS:
        stored = torch.from_numpy(values).to(FLOATS[kind])
        return stored.view(torch.uint8).numpy().reshape(rows, -1), stored.float()
    qtype = GGMLQuantizationType[kind]
    if kind in HALVES:
        block, size = GGML_QUANT_SIZES[qtype]
        raw = random.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
        for at in HALVES[kind]:
            scale = random.uniform(0.001, 0.02, (rows, cols // block, 1)).astype(np.float16)
            raw[:, :, at:at + 2] = scale.view(np.uint8)
        raw = raw.reshape(rows, -1)
    else:
        raw = gguf.quants.quantize(values, qtype)
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, qtype).astype(np.float32))


def columns(kind: str) -> list[int]:
    if kind in FLOATS:
        return [1, 3, 64, 1023]
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    return [block, 3 * block, 1024]


def multiply(engine: _native.Engine, packed: _native.Matrix, x: torch.Tensor, precision: str,
             bias: list[float] | None = None) -> torch.Tensor:
    """x: (M, cols) -> (M, rows). The rows behind the result must stay as they were."""
    out = torch.full((len(x) + 1, packed.rows), 7.0)
    engine.linear(_native.Linear(packed, bias or [], precision), x.data_ptr(), len(x), out.data_ptr())
    assert (out[-1] == 7).all()
    return out[:-1]


def test_the_types_are_those_of_common_files() -> None:
    assert set(KINDS) == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
                          "F16", "BF16", "F32"}


@EVERY
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 130])
def test_packing_loses_nothing(kind: str, rows: int) -> None:
    engine = _native.Engine("", 2)
    for cols in columns(kind):
        raw, values = matrix(kind, rows, cols, seed=rows)
        packed = engine.pack(kind, raw, cols)
        assert (packed.rows, packed.cols) == (rows, cols)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        ids = torch.cat([order, order[:1]])
        out = torch.empty(len(ids), cols)
        engine.lookup(packed, ids.data_ptr(), len(ids), out.data_ptr())
        assert torch.equal(out, values[ids])


@EVERY
@ISA
def test_products_equal_those_of_the_dequantised_weights(kind: str, isa: str) -> None:
    engine = _native.Engine(isa, 1)
    for rows in (1, 15, 17, 48):
        for cols in columns(kind):
            raw, values = matrix(kind, rows, cols, seed=cols)
            packed = engine.pack(kind, raw, cols)
            x = torch.randn(13, cols, generator=torch.Generator().manual_seed(rows))
            bias = torch.randn(rows, generator=torch.Generator().manual_seed(3))
            expected = (x.double() @ values.double().T + bias.double()).float()
            # Rounding of a sum of fp32 products grows with the sum of their magnitudes.
            allowed = 2e-6 * (x.abs() @ values.abs().T + 1)
            whole = multiply(engine, packed, x, "float32", bias.tolist())
            assert ((whole - expected).abs() <= allowed).all(), (rows, cols)
            for m in range(1, 13):
                assert torch.equal(multiply(engine, packed, x[:m], "float32", bias.tolist()), whole[:m]), (rows, cols, m)


@QUANTISED
@ISA
def test_eight_bit_products_are_close(kind: str, isa: str) -> None:
    engine = _native.Engine(isa, 1)
    cols = 1024
    raw, values = matrix(kind, 130, cols)
    packed = engine.pack(kind, raw, cols)
    x = torch.randn(97, cols, generator=torch.Generator().manual_seed(1))
    whole = multiply(engine, packed, x, "int8")
    expected = x.double() @ values.double().T
    error = ((whole - expected).square().mean() / expected.square().mean()).item()
    assert 1e-7 < error < NMSE_INT8
    for m in (*range(1, 14), 31, 33, 64):
        assert torch.equal(multiply(engine, packed, x[:m], "int8"), whole[:m]), f"{m} rows"
    for row in (0, 50, 96):
        assert torch.equal(multiply(engine, packed, x[row:row + 1], "int8"), whole[row:row + 1]), f"row {row} alone"
    for threads in (2, 3, 5):
        assert torch.equal(multiply(_native.Engine(isa, threads), packed, x, "int8"), whole), f"{threads} threads"


@ISA
def test_bfloat16_products_round_activations_only(isa: str) -> None:
    engine = _native.Engine(isa, 2)
    for rows, cols in ((17, 1023), (130, 640)):
        raw, values = matrix("BF16", rows, cols)
        packed = engine.pack("BF16", raw, cols)
        x = torch.randn(97, cols, generator=torch.Generator().manual_seed(1))
        whole = multiply(engine, packed, x, "bfloat16")
        rounded = x.bfloat16().float()
        assert ((whole - rounded @ values.T).abs() <= 4e-6 * (rounded.abs() @ values.abs().T + 1)).all()
        for m in range(1, 14):
            assert torch.equal(multiply(engine, packed, x[:m].contiguous(), "bfloat16"), whole[:m]), f"{m} rows"


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("cols", [1, 33, 1023])
def test_quantising_at_load_keeps_half_a_step(kind: str, cols: int) -> None:
    engine = _native.Engine("", 2)
    raw, values = matrix(kind, 17, cols)
    values[0] = 0
    raw[0] = 0
    packed = engine.pack(kind, raw, cols, True)
    ids, out = torch.arange(17), torch.empty(17, cols)
    engine.lookup(packed, ids.data_ptr(), 17, out.data_ptr())
    padded = torch.nn.functional.pad(values, (0, -cols % 32)).unflatten(1, (-1, 32))      # (17, blocks, 32)
    top = padded.abs().amax(-1).repeat_interleave(32, 1)[:, :cols]
    # Half of a step, and the scale is rounded to fp16: 127 steps of 2^-11 of it at the most.
    assert ((out - values).abs() <= top / 127 * 0.5 + top * 2 ** -11 + 1e-6).all()
    assert (out[0] == 0).all()


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("cols", [1, 33, 1023])
def test_four_bits_at_load_beat_rounding_to_nearest(kind: str, cols: int) -> None:
    engine = _native.Engine("", 2)
    raw, values = matrix(kind, 83, cols)
    raw, values = raw.copy(), values.clone()
    values[0], raw[0] = 0, 0
    packed = engine.pack(kind, raw, cols, True, False, "Q4_0")
    ids, out = torch.arange(83), torch.empty(83, cols)
    engine.lookup(packed, ids.data_ptr(), 83, out.data_ptr())
    padded = torch.nn.functional.pad(values, (0, -cols % 32)).unflatten(1, (-1, 32))      # (83, blocks, 32)
    scale = padded.abs().amax(-1, keepdim=True) / 7.5
    nearest = (padded / scale.clamp(min=1e-30)).round().clamp(-8, 7) * scale
    error = torch.nn.functional.pad((out - values).square(), (0, -cols % 32)).unflatten(1, (-1, 32)).sum(-1)
    # Scales are rounded to fp16, which the oracle's are not.
    assert (error <= (nearest - padded).square().sum(-1) * 1.01 + 1e-6).all()
    assert error.sum() < 0.9 * (nearest - padded).square().sum() or cols == 1
    assert (out[0] == 0).all()


def test_four_bits_of_extreme_values() -> None:
    engine = _native.Engine("", 1)
    values = torch.zeros(8, 32)
    values[0, 3], values[1, 4], values[2, 5], values[3, 6] = float("nan"), float("inf"), 1e-30, -2e5
    values[4], values[5], values[6, 0] = 3.0, -2.0, 1e6
    packed = engine.pack("F32", values.view(torch.uint8).numpy(), 32, True, False, "Q4_0")
    ids, out = torch.arange(8), torch.empty(8, 32)
    engine.lookup(packed, ids.data_ptr(), 8, out.data_ptr())
    assert out[:2].isnan().all(), "what is not finite shows in every product"
    assert (out[2] == 0).all() and (out[7] == 0).all()
    assert out[3, 6] == pytest.approx(-2e5, rel=1e-3)
    assert (out[4] - 3).abs().max() < 2e-3 and (out[5] + 2).abs().max() < 2e-3
    assert not out[6, 0].isfinite(), "beyond fp16"


def test_only_known_targets_take_float_weights() -> None:
    engine = _native.Engine("", 1)
    with pytest.raises(ValueError, match="float weights cannot be quantised to Q4_K here"):
        engine.allocate("F32", 16, 256, True, False, "Q4_K")
    with pytest.raises(ValueError, match="Q8_0 weights are quantised already"):
        engine.allocate("Q8_0", 16, 256, True, False, "Q4_0")


@EVERY
def test_a_matrix_is_filled_in_parts(kind: str) -> None:
    engine = _native.Engine("", 2)
    cols = columns(kind)[-1]
    raw, values = matrix(kind, 83, cols)
    packed = engine.allocate(kind, 83, cols)
    for first, last in ((48, 83), (0, 16), (16, 48)):
        engine.fill(packed, kind, raw[first:last], first)
    ids, out = torch.arange(83), torch.empty(83, cols)
    engine.lookup(packed, ids.data_ptr(), 83, out.data_ptr())
    assert torch.equal(out, values)
    for first, rows in ((0, 17), (8, 16), (80, 16), (-16, 16), (96, 0)):
        with pytest.raises(ValueError, match="are not whole tiles of a matrix of 83 rows"):
            engine.fill(packed, kind, raw[:rows], first)


@pytest.mark.parametrize(("kind", "other"), [("Q8_0", "Q4_0"), ("F32", "Q8_0"), ("F32", "BF16"), ("Q4_1", "F32")])
def test_a_matrix_takes_one_type(kind: str, other: str) -> None:
    engine = _native.Engine("", 1)
    packed = engine.allocate(kind, 16, 64)
    with pytest.raises(ValueError, match=f"cannot take {other} weights"):
        engine.fill(packed, other, matrix(other, 16, 64)[0], 0)


@pytest.mark.parametrize("isa", [isa for isa in _native.available() if _native.Engine(isa, 1).prunes])
@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_the_most_likely_row_without_all_products(isa: str, kind: str) -> None:
    """A head in two planes of nibbles: the same values, the same products, and the argmax of these, the first on ties."""
    engine = _native.Engine(isa, 3)
    for rows, cols in ((1, 32), (17, 64), (1000, 640), (4099, 256)):
        raw, _ = matrix(kind, rows, cols)
        plain, split = (engine.pack(kind, raw, cols, kind != "Q8_0", planes) for planes in (False, True))
        assert split.split and not plain.split and split.nbytes == plain.nbytes
        ids, out, again = torch.arange(rows), torch.empty(rows, cols), torch.empty(rows, cols)
        engine.lookup(plain, ids.data_ptr(), rows, out.data_ptr())
        engine.lookup(split, ids.data_ptr(), rows, again.data_ptr())
        assert torch.equal(out, again)
        x = torch.randn(5, cols, generator=torch.Generator().manual_seed(1))
        x[2], x[3] = 0, out[rows // 2] / out[rows // 2].norm()       # every score equal; one row far ahead
        scores = multiply(engine, plain, x, "int8")
        assert torch.equal(multiply(engine, split, x, "int8"), scores)
        # torch.argmax says nothing of ties
        expected = [row.index(max(row)) for row in scores.tolist()]
        linear = _native.Linear(split, [], "int8")
        for m in range(1, 5):
            tokens = torch.full((m + 1,), -5)
            scored = engine.greedy(linear, x.data_ptr(), m, tokens.data_ptr())
            assert tokens.tolist() == [*expected[:m], -5] and scored > 0
        one = torch.zeros(1, dtype=torch.int64)
        scored = engine.greedy(linear, x[3:].data_ptr(), 1, one.data_ptr())
        assert scored <= max(16 * 4, rows // 4), "a clear winner needs few exact scores"
        x[0, cols // 2] = float("nan")
        tokens = torch.zeros(2, dtype=torch.int64)
        engine.greedy(linear, x.data_ptr(), 2, tokens.data_ptr())
        assert tokens.tolist() == [-1, expected[1]]
        for m in (0, 5):
            with pytest.raises(ValueError, match="greedy takes 1 to 4 rows"):
                engine.greedy(linear, x.data_ptr(), m, tokens.data_ptr())
    with pytest.raises(ValueError, match="needs a split head"):
        engine.greedy(_native.Linear(plain, [], "int8"), x.data_ptr(), 1, tokens.data_ptr())
    with pytest.raises(ValueError, match="up to 16384 columns can be split"):
        engine.allocate("Q8_0", 1, 16416, False, True)
    with pytest.raises(ValueError, match="can be split"):
        engine.allocate("Q4_0", 1, 64, False, True)


@EVERY
def test_damaged_shapes_are_refused(kind: str) -> None:
    engine = _native.Engine("", 1)
    cols = columns(kind)[-1]
    raw, _ = matrix(kind, 3, cols)
    for bytes_, wrong in ((raw[:, :-1], cols), (raw, cols + 1), (raw, cols // 2), (raw, 0), (raw, -cols)):
        with pytest.raises(ValueError, match=f"{kind} weights"):
            engine.pack(kind, np.ascontiguousarray(bytes_), wrong)
    if kind not in FLOATS:
        with pytest.raises(ValueError, match=f"{kind} weights"):
            engine.pack(kind, raw, cols + 16)


def test_quantised_types_are_not_quantised_again() -> None:
    raw, _ = matrix("Q4_0", 3, 64)
    with pytest.raises(ValueError, match="Q4_0"):
        _native.Engine("", 1).pack("Q4_0", raw, 64, True)


def test_what_does_not_fit_is_refused() -> None:
    engine = _native.Engine("", 1)
    with pytest.raises(ValueError, match="IQ1_S have no native kernel"):
        engine.pack("IQ1_S", np.zeros((1, 50), np.uint8), 256)
    with pytest.raises(ValueError, match="no instruction set mmx"):
        _native.Engine("mmx", 1)
    make = {rows: engine.pack("F32", matrix("F32", rows, 32)[0], 32) for rows in (32, 48)}
    square, tall = (_native.Linear(make[rows], [], "int8") for rows in (32, 48))
    with pytest.raises(ValueError, match="a bias has one value for each row"):
        _native.Linear(make[32], [0.0] * 31, "int8")
    with pytest.raises(ValueError, match="activation dtype int4"):
        _native.Linear(make[32], [], "int4")
    none = _native.Norm()
    with pytest.raises(ValueError, match="MLP"):
        _native.MlpBlock(none, none, square, tall, square, "silu")
    with pytest.raises(ValueError, match="activation mish"):
        _native.MlpBlock(none, none, square, square, square, "mish")
    with pytest.raises(ValueError, match="attention"):
        _native.AttentionBlock(none, none, none, none, False, square, square, tall, square, 16, 1.0, 0.0, 0, 8)
    with pytest.raises(ValueError, match="attention"):
        _native.AttentionBlock(none, none, none, none, False, square, square, square, square, 16, 1.0, 0.0, 0, 9)
    out = torch.empty(1, 32)
    for wrong in (-1, 32):
        ids = torch.tensor([wrong])
        with pytest.raises(ValueError, match=f"token id {wrong} is out of range"):
            engine.lookup(make[32], ids.data_ptr(), 1, out.data_ptr())


def test_memory_is_that_of_the_file() -> None:
    """A packed matrix is the file's bits in another order, and little else."""
    for kind in KINDS:
        raw, _ = matrix(kind, 64, 1024)
        packed = _native.Engine("", 1).pack(kind, raw, 1024)
        assert raw.size <= packed.nbytes <= 1.06 * raw.size, (kind, packed.nbytes / raw.size)
