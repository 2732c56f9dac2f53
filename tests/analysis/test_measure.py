"""Steps of a loaded model: their shape, their components, and what measuring leaves behind."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.analysis.cost import count
from ridgeline.analysis.measure import DISPATCH, measure, native_engine, traced
from ridgeline.analysis.read import spec_of
from ridgeline.analysis.work import Rows
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.loading import describe
from ridgeline.sampling_params import SamplingParams

LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "gemma": {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}}


def loaded(folder: Path, family: str = "llama", **options: Any) -> LLM:
    (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
    return LLM(str(folder), **{"load_format": "dummy", "backend": "native", "threads": 1, "num_pages": 96, "progress": False,
                               **options})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_measured_components_are_those_of_the_cost(tmp_path, family, backend):
    llm = loaded(tmp_path, family, backend=backend)
    found = measure(llm, [Rows(20, 1, 1)] * 3, repeats=3)
    spec = spec_of(llm.loaded, describe(str(tmp_path), llm.config), llm.config)
    parts = {w.key for w in count(spec, found.step)} - {(None, "sample")}
    measured = set(found.seconds) - {DISPATCH}
    # On torch a component without a module of its own is part of its neighbour.
    missing = parts - measured if backend == "native" else {k for k in parts - measured if k[1] != "attention.heads"}
    assert measured <= parts and not missing
    assert all(seconds >= 0 for seconds in found.seconds.values()) and 0 < found.pass_s <= found.step_s


def test_a_pass_is_the_sum_of_its_parts(tmp_path):
    llm = loaded(tmp_path)
    with traced(llm) as passes:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert [p.step for p in passes[:2]] == [[Rows(0, 3, 1), Rows(0, 2, 1)], [Rows(3, 1, 1), Rows(2, 1, 1)]]
    for p in passes:
        assert sum(p.seconds().values()) == pytest.approx(p.wall_s)
        stamps = [stamp for *_, start, end in p.events for stamp in (start, end)]
        assert stamps == sorted(stamps) and p.start_ns <= stamps[0] and stamps[-1] <= p.end_ns


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_nothing_is_left_when_tracing_ends(tmp_path, backend):
    llm = loaded(tmp_path, backend=backend)
    model = llm.loaded.model
    with traced(llm):
        pass
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    engine = native_engine(model)
    assert (engine is None) == (backend == "torch") and (engine is None or engine.take_trace() == [])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert "execute" not in vars(llm.engine.runners["target"])


@pytest.mark.parametrize("step", [
    [Rows(0, 9, 1)], [Rows(0, 40, 0)], [Rows(64, 1, 1)] * 5, [Rows(10, 1, 1), Rows(30, 1, 1)], [Rows(32, 20, 1)],
    [Rows(50, 1, 1), Rows(16, 8, 1), Rows(0, 5, 1)]])
def test_steps_have_the_shape_that_was_asked_for(tmp_path, step):
    """Decoding rows go on from step to step, so the median one is a few tokens further; others start at whole pages."""
    llm = loaded(tmp_path)
    found = measure(llm, step, repeats=2)
    assert sorted(r.tokens for r in found.step) == sorted(r.tokens for r in step)
    for wanted, row in zip(*(sorted(rows, key=lambda r: (r.tokens, r.start)) for rows in (step, found.step))):
        assert row.start == wanted.start if wanted.tokens > 1 else wanted.start <= row.start <= wanted.start + 24
    stats = llm.engine.store.stats().roles["target"]
    assert stats.pages_used == 0 and stats.pages_cached == 0 and not llm.engine.has_work


def test_the_cache_is_filled_with_numbers(tmp_path):
    """What was never written is one page of zeros, which no read of it would miss."""
    llm = loaded(tmp_path)
    measure(llm, [Rows(64, 1, 1)], repeats=1)
    k, _ = llm.engine.runners["target"].view.kv(0)
    written = k.float().abs().sum((1, 2, 3)) > 0
    assert written.sum() >= 4 and k.isfinite().all()


@pytest.mark.parametrize("step, told", [
    ([Rows(0, 600, 1)], "600 rows does not fit max_num_batched_tokens=512"),
    ([Rows(1, 1, 1)] * 65, "65 sequences does not fit max_num_seqs=64"),
    ([Rows(900, 1, 1)] * 3, "needs 171 pages; the cache has 96")])
def test_steps_that_do_not_fit(tmp_path, step, told):
    with pytest.raises(ConfigError, match=told):
        measure(loaded(tmp_path), step)


def test_int8_keys_are_filled_too(tmp_path):
    llm = loaded(tmp_path, kv_cache_dtype="int8")
    assert torch.int8 == llm.engine.runners["target"].view.kv(0)[0].dtype
    assert measure(llm, [Rows(40, 1, 1)] * 2, repeats=1).seconds[0, "attention.core"] > 0


def test_every_row_of_a_large_step_decodes(tmp_path):
    """Filling the cache beside sequences that decode takes pieces of the prompts; none may finish meanwhile."""
    llm = loaded(tmp_path, num_pages=512, max_num_batched_tokens=512, max_mixed_prefill_tokens=16)
    found = measure(llm, [Rows(400, 1, 1)] * 6, repeats=2)
    assert len(found.step) == 6 and all(r.tokens == 1 and 400 <= r.start < 420 for r in found.step)
    mixed = measure(llm, [Rows(0, 100, 1), *[Rows(200, 1, 1)] * 2], repeats=2)
    assert sorted(r.tokens for r in mixed.step) == [1, 1, 100]
    assert llm.engine.scheduler.max_mixed == 16
