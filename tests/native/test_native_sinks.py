"""Sinks on the native backend: torch's logits whatever the cache, the mask, the shape of the heads and the threads."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_kit import PAGE, Paged, lowered, nmse, on_native, on_torch, tokens
from safetensors.torch import load_file

from ridgeline.config import EngineConfig
from ridgeline.decoding.base import Run
from ridgeline.loading import build, load, open_model, survey
from ridgeline.native import _native
from sinks_family import write_with_sinks

torch.set_num_threads(1)

SHAPES: dict[str, dict[str, Any]] = {
    "9 heads, 3 to a key": {"num_attention_heads": 9, "num_key_value_heads": 3},
    "5 heads of 20, multi-query": {"num_attention_heads": 5, "head_dim": 20},
    "3 heads, one each": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "33 heads of 6": {"num_attention_heads": 33, "head_dim": 6},
    "8 heads of 64, sliding, biases": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 6,
                                       "attention_bias": True},
    "sliding, soft-cap": {"num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 6,
                          "attn_logit_softcapping": 2.0},
}
EVERY = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(shape: str) -> Path:
        if shape not in made:
            made[shape] = write_with_sinks(tmp_path_factory.mktemp("sinks"), max_position_embeddings=1024, **SHAPES[shape])
        return made[shape]

    return make


def prompts() -> list[list[int]]:
    return [tokens(n, seed, 320) for seed, n in enumerate((3 * PAGE + 5, PAGE + 1, 1))]


@EVERY
@pytest.mark.parametrize("isa", _native.available())
def test_float32_equals_torch(shape: str, isa: str, folder: Any) -> None:
    model = lowered(folder(shape), isa=isa, precision="float32", strict=True)
    oracle = on_torch(folder(shape))
    for chunk in (1, 7, 1000):
        expected = Paged(oracle).logits(prompts(), chunk)
        assert expected.std() > 0.1
        torch.testing.assert_close(Paged(model).logits(prompts(), chunk), expected, atol=1e-5, rtol=0)


@EVERY
@pytest.mark.parametrize("threads", [1, 5])
def test_masks_of_every_kind_equal_torch(shape: str, threads: int, folder: Any) -> None:
    """Trees, denoising blocks and bidirectional runs beside plain ones; 5 threads share out the heads of a key."""
    found = []
    nodes = tokens(90, 7, 320)
    wide = [-1, *((i - 1) // 2 for i in range(1, 90))]
    for net in (on_native(folder(shape), threads=threads, strict_native=True)[0], on_torch(folder(shape))):
        paged = Paged(net)
        prompt = tokens(2 * PAGE - 3, 6, 320)
        paged.prefill({"tree": prompt, "block": prompt, "all": prompt[:9], "plain": prompt}, 9)
        runs = {"tree": Run("target", nodes, parents=wide), "plain": Run("target", nodes[:5]),
                "block": Run("target", nodes[:24], see="block", align=8, write=False),
                "all": Run("target", nodes[:33], see="all")}
        found.append(torch.cat(list(paged.run(runs).values())))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


@EVERY
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_decoding_behind_a_long_context_equals_torch(shape: str, threads: int, folder: Any) -> None:
    """A few rows, whose keys and query heads are shared out between threads and whose parts are combined."""
    context, steps = tokens(600, 3, 320), tokens(3, 4, 320)
    found = []
    for net in (on_native(folder(shape), threads=threads)[0], on_torch(folder(shape))):
        paged = Paged(net)
        paged.prefill({"a": context, "b": context[:40]}, 300)
        alone = [paged.run({"a": Run("target", [token])})["a"] for token in steps]
        found.append(torch.cat([*alone, *paged.run({n: Run("target", steps[:1]) for n in "ab"}).values()]))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


@EVERY
@pytest.mark.parametrize(("kv", "most"), [(torch.bfloat16, 3e-4), (torch.float16, 3e-6), (torch.int8, 3e-5)], ids=str)
def test_short_caches(shape: str, kv: torch.dtype, most: float, folder: Any) -> None:
    """Against torch on a cache of the same type, where a value between two steps may fall either way. int8 keys are rotated;
    the sinks, which are scores already, are not."""
    expected = Paged(on_torch(folder(shape)), kv).logits(prompts(), 7)
    found = Paged(on_native(folder(shape), strict_native=True)[0], kv).logits(prompts(), 7)
    exact = Paged(on_torch(folder(shape))).logits(prompts(), 7)
    assert nmse(found, expected) < most
    assert 1e-9 < nmse(found, exact) < 1e-3


def test_sinks_move_what_comes_out(folder: Any, tmp_path: Path) -> None:
    """Far below every score they change nothing, far above they leave nothing of the values."""
    shape = SHAPES["9 heads, 3 to a key"]
    paths = {name: write_with_sinks(tmp_path / name, sinks=value, **shape)
             for name, value in {"low": -1e30, "zero": 0.0, "high": 1e4}.items()}
    logits = {name: Paged(on_native(path)[0]).logits(prompts()) for name, path in paths.items()}
    for name, path in paths.items():
        torch.testing.assert_close(logits[name], Paged(on_torch(path)).logits(prompts()), atol=1e-5, rtol=0)
    assert nmse(logits["zero"], logits["low"]) > 1e-3
    prompt = tokens(30, 2, 320)
    last, alone = (Paged(on_native(paths["high"])[0]).logits([part])[-1] for part in (prompt, prompt[-1:]))
    assert (last == alone).all()                    # no token sees another one


def test_eight_bit_weights_and_the_survey_take_sinks(folder: Any) -> None:
    path = folder("9 heads, 3 to a key")
    config = EngineConfig(threads=1, quantization="int8", strict_native=True)
    found = build(open_model(str(path), config), config)
    expected = survey(found, config)
    assert not isinstance(expected, str)
    report = load(found, config)
    assert report is not None and report.complete and expected.complete
    assert report.tensors == expected.tensors == set(load_file(path / "model.safetensors"))
    eight = on_native(path, activation_dtype="int8", quantization="int8")[0]
    assert 1e-6 < nmse(Paged(eight).logits(prompts()), Paged(on_torch(path)).logits(prompts())) < 1e-2


def test_made_up_weights_have_sinks(tmp_path: Path) -> None:
    path = write_with_sinks(tmp_path, **SHAPES["9 heads, 3 to a key"])
    (path / "model.safetensors").unlink()
    found, expected = (Paged(make(path, load_format="dummy")).logits(prompts())
                       for make in (lambda *a, **k: on_native(*a, **k)[0], on_torch))
    assert nmse(found, expected) < 1e-4


def test_a_sink_for_each_query_head(folder: Any) -> None:
    matrix = _native.Engine("", 1).pack("F32", np.zeros((32, 128), np.uint8), 32)
    square, none = _native.Linear(matrix, [], "float32"), _native.Norm()
    with pytest.raises(ValueError, match="attention: 3 sinks for 2 query heads"):
        _native.AttentionBlock(none, none, none, none, False, square, square, square, square, 16, 1.0, 0.0, 0, 8, [0.0] * 3)
