"""The server's estimate of FLOPs, bytes and bottleneck: coefficients say what the count of every component says."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from explain_kit import spec
from ridgeline import LLM
from ridgeline.analysis.cost import count
from ridgeline.analysis.live import Coefficients, Meter, watch
from ridgeline.analysis.work import Rows, totals
from ridgeline.sampling_params import SamplingParams
from server_kit import Running
from tiny_checkpoint import write_checkpoint


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows", [[(0, 7)], [(300, 1)], [(0, 120), (64, 90), (500, 1)], [(99, 1), (100, 1), (98, 3)]])
def test_coefficients_agree_with_the_count(rows: list[tuple[int, int]], window: int | None) -> None:
    found = spec(**({"model_type": "mistral", "sliding_window": window} if window else {}))
    flops, weights, read, written = Coefficients.of(found).work(rows, len(rows))
    works = count(found, [Rows(start, tokens, 1) for start, tokens in rows])
    products = [w for w in works if w.kind in ("linear", "attention")]
    assert flops == sum(w.useful for w in products)
    assert weights == sum(w.weight_bytes for w in products)
    assert read == sum(w.kv_bytes for w in works if w.component == "attention.core")
    assert written == totals(works).kv_bytes - read


def fake(start: int, tokens: int, prompt: int) -> Any:
    from ridgeline.decoding.base import Sample

    return SimpleNamespace(placement=SimpleNamespace(start=start), count=tokens, last=True,
                           seq=SimpleNamespace(prompt_len=prompt), run=SimpleNamespace(want=(Sample(),)))


def test_the_bottleneck_by_stage() -> None:
    meter = Meter(Coefficients(10, 0, 1000, 0, ()), bandwidth=1000.0, peak=100.0)
    meter.passed("target", [fake(0, 20, 20)], 2.5)                # 200 operations: 2 s; reading 1 s
    meter.passed("target", [fake(20, 1, 20)], 1.25)               # 0.1 s; reading 1 s
    meter.passed("draft", [fake(20, 1, 20)], 9.0)
    shares = meter.shares()
    assert shares["prefill"] == pytest.approx({"compute": 0.8, "overhead": 0.2, "memory": 0, "kv": 0})
    assert shares["decode"] == pytest.approx({"memory": 0.8, "overhead": 0.2, "compute": 0, "kv": 0})
    assert meter.bottlenecks() == {"prefill": "compute", "decode": "memory"}
    assert (meter.flops, meter.read_bytes) == (210, 2000)
    for _ in range(300):
        meter.passed("target", [fake(20, 1, 20)], 10.0)           # slower than the roof by far: overhead takes over
    assert meter.bottlenecks()["decode"] == "overhead" and meter.shares()["decode"]["overhead"] == pytest.approx(0.9, abs=0.01)


def test_an_engine_is_watched(tmp_path) -> None:
    llm = LLM(write_checkpoint(tmp_path), threads=1)
    meter = watch(llm)
    assert meter is not None and not meter.shares()
    out = llm.generate(["The sea is"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
    prompt = len(out.prompt_token_ids)
    expected = [meter.coefficients.work([(0, prompt)], 1)] + [meter.coefficients.work([(prompt + i, 1)], 1) for i in range(4)]
    assert meter.flops == sum(e[0] for e in expected) and meter.write_bytes == sum(e[3] for e in expected)
    assert set(meter.bottlenecks()) == {"prefill", "decode"}
    assert all(sum(kinds.values()) == pytest.approx(1) for kinds in meter.shares().values())


def test_the_server_tells(tmp_path) -> None:
    with Running(LLM(write_checkpoint(tmp_path), threads=1), model="tiny") as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "The sea", "max_tokens": 8, "ignore_eos": True})
        text = httpx.get(f"{server.url}/metrics").text
        stats = httpx.get(f"{server.url}/stats").json()
    for name in ("estimated_flops_total", "estimated_read_bytes_total", "estimated_write_bytes_total"):
        value = next(line for line in text.splitlines() if line.startswith(f"ridgeline:{name}{{"))
        assert float(value.split()[-1]) > 0
    assert 'ridgeline:bottleneck{kind="memory",model_name="tiny",stage="decode"}' in text
    assert set(stats["bottleneck"]) == {"prefill", "decode"}
    assert sum(stats["bottleneck"]["decode"].values()) == pytest.approx(1)
