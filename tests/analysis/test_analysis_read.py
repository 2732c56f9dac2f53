"""The spec of a loaded model: matrices as they are stored, and what of it runs natively."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from traced import config

from ridgeline.analysis.cost import count
from ridgeline.analysis.read import plan_of, spec_of
from ridgeline.analysis.spec import Spec
from ridgeline.analysis.work import Rows, decode, totals
from ridgeline.config import EngineConfig
from ridgeline.errors import UnsupportedModel
from ridgeline.llm import LLM
from ridgeline.loading import describe

WIDE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def loaded(folder: Path, name: str = "llama", fields: dict[str, object] | None = None, **options: object) -> tuple[LLM, Spec]:
    folder.joinpath("config.json").write_text(json.dumps({**config(name), **WIDE, **(fields or {})}))
    options = {"load_format": "dummy", "max_model_len": 64, **options}
    resolved = EngineConfig.of({**options, "progress": False})
    shapes = describe(str(folder), resolved)
    llm = LLM(str(folder), **options)
    return llm, spec_of(llm.loaded, shapes, resolved)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_matrices_are_counted_as_they_are_packed(tmp_path, tied, quantization):
    llm, spec = loaded(tmp_path, fields={"tie_word_embeddings": tied}, backend="native", quantization=quantization)
    report = llm.loaded.report
    assert sum(m.nbytes for m in spec.matrices) + spec.embed.nbytes + (0 if tied else spec.head.nbytes) == report.nbytes
    assert spec.weight_bytes == report.nbytes + 4 * 7 * 64              # norms in fp32
    layers = {None: "bf16", "int8": "q8_0", "int4": "q4_0"}[quantization]
    assert {m.kind for m in spec.matrices} == {layers} and spec.kernels == "native"
    assert spec.head.kind == ("bf16" if quantization is None else "q8_0")
    assert spec.parameters == sum(p.numel() for p in describe(str(tmp_path), EngineConfig.of({
        "load_format": "dummy", "progress": False})).model.parameters())
    linear = [w for w in count(spec, [Rows(0, 5, 1)]) if w.kind == "linear"]
    assert {w.compute for w in linear} == ({"bfloat16"} if quantization is None else {"int8"})
    whole = sum(w.weight_bytes for w in linear)
    if spec.head_split:                                                 # for one row read by halves
        assert whole < sum(m.nbytes for m in (*spec.matrices, spec.head))
        linear = [w for w in count(spec, decode(5, batch=5)) if w.kind == "linear"]
    assert sum(w.weight_bytes for w in linear) == sum(m.nbytes for m in (*spec.matrices, spec.head))


def test_exact_activations_compute_in_float(tmp_path):
    _, spec = loaded(tmp_path, backend="native", quantization="int8", activation_dtype="float32")
    assert {w.compute for w in count(spec, [Rows(0, 5, 1)])} == {"float32"}


def test_a_model_on_torch_is_kept_in_its_dtype(tmp_path):
    llm, spec = loaded(tmp_path, backend="torch", dtype="bfloat16")
    assert spec.weight_bytes == sum(p.numel() * p.element_size() for p in llm.loaded.model.parameters())
    assert (spec.kernels, spec.stream, spec.precision, spec.kv_dtype) == ("torch", 2, "bfloat16", "bfloat16")


def test_layers_that_are_left_to_torch_are_counted_as_torch_runs_them(tmp_path):
    llm, spec = loaded(tmp_path, "qwen3.5", backend="native", dtype="bfloat16")
    assert {(layer.mix.native, layer.feed.native) for layer in spec.layers} == {(False, True)}
    assert {m.kind for layer in spec.layers for m in layer.mix.inner.matrices} == {"f32"}
    assert {m.kind for layer in spec.layers for m in layer.feed.inner.matrices} == {"bf16"}
    works = count(spec, [Rows(0, 5, 1)])
    assert all(not w.shape for w in works if w.layer is not None and not w.component.startswith("mlp."))
    assert spec.kv_bytes_per_token() == llm.loaded.layout.kv_bytes_per_token()
    assert spec.state_bytes() == llm.loaded.layout.state_bytes()


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float32", "int8"])
def test_the_cache_is_counted_in_its_dtype(tmp_path, kv_cache_dtype):
    llm, spec = loaded(tmp_path, backend="native", kv_cache_dtype=kv_cache_dtype)
    each = llm.loaded.layout.kv_bytes_per_token()
    works = count(spec, [Rows(9, 1, 1)])
    assert totals(works).kv_bytes == each * (10 + 1)
    assert {w.compute for w in works if w.kind == "attention"} == ({"float32"} if kv_cache_dtype == "float32" else {"bfloat16"})


def test_a_plan_has_the_shape_of_what_is_loaded(tmp_path):
    _, spec = loaded(tmp_path, backend="native", quantization="int8")
    planned = plan_of({**config("llama"), **WIDE}, quantization="int8")
    assert [(m.rows, m.cols, m.kind) for m in planned.matrices] == [(m.rows, m.cols, m.kind) for m in spec.matrices]
    assert planned.parameters == spec.parameters and planned.weight_bytes == pytest.approx(spec.weight_bytes, rel=0.05)


def test_a_drafter_over_hidden_rows_has_no_cost_of_its_own():
    with pytest.raises(UnsupportedModel, match="the cost of a hidden_drafter is not known"):
        plan_of({**config("llama"), "model_type": "hidden_drafter"})
