"""/metrics tells what happened, by the definitions of docs/metrics.md; the dashboard asks for nothing else."""
from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ridgeline import LLM
from ridgeline.engine import EngineStats
from ridgeline.server.metrics import BETWEEN_TOKENS, Metrics
from ridgeline.types import RequestMetrics
from server_kit import Running, until

DOCS = Path(__file__).parents[2] / "docs"


def samples(text: str) -> dict[str, float]:
    """name{labels} -> value, the model's label left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_a_request_is_counted_once_everywhere(folder: Path) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 2}
    with Running(LLM(folder, threads=1, speculative_config=config), model="tiny") as server:
        warm = samples(httpx.get(f"{server.url}/metrics").text)
        body = {"prompt": "The sea is calm. The sea is", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "n": 2,
                "allowed_token_ids": [50]}                     # so that drafts are right
        usage = httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]
        httpx.post(f"{server.url}/v1/completions", json={"prompt": 5})
        until(lambda: not server.server.service.open)
        now = samples(httpx.get(f"{server.url}/metrics").text)
        stats = server.llm.engine.stats

    def added(name: str) -> float:
        return now[f"ridgeline:{name}"] - warm.get(f"ridgeline:{name}", 0)

    assert usage["completion_tokens"] == added("generation_tokens_total") == 60
    assert added("request_success_total{finished_reason=length}") == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
                 "request_generation_tokens", "request_time_per_output_token_seconds"):
        assert added(f"{name}_count") == 2, name
    assert added("request_generation_tokens_sum") == 60
    assert added("request_prompt_tokens_sum") == 2 * usage["prompt_tokens"]
    assert 0 < added("inter_token_latency_seconds_count") <= 58       # tokens of the first step have no gap
    assert added("iteration_tokens_total_sum") > 60
    assert now["ridgeline:iteration_tokens_total_sum"] == stats.target_rows
    assert added("http_requests_total{method=POST,route=/v1/completions,status=200}") == 1
    assert added("http_requests_total{method=POST,route=/v1/completions,status=400}") == 1
    assert now["ridgeline:spec_decode_num_accepted_tokens_total"] == stats.accepted_tokens > 0
    assert now["ridgeline:spec_decode_num_drafts_total"] == stats.drafts > 0
    assert stats.accepted_tokens == sum(stats.accepted_per_pos) == sum(
        value for name, value in now.items() if name.startswith("ridgeline:spec_decode_num_accepted_tokens_per_pos_total"))
    assert now["ridgeline:num_requests_running"] == now["ridgeline:num_requests_waiting"] == 0


def test_histograms_follow_the_definitions() -> None:
    """Two tokens of one step share its time: D/k each, one value a token after the first."""
    metrics = Metrics(EngineStats(), "m")
    metrics.observe(RequestMetrics(arrival=10.0, scheduled=10.5, first_token=11.0, last_token=11.012, finished=11.02,
                                   prompt_tokens=7, completion_tokens=4, token_times=[11.0, 11.004, 11.012, 11.012]), "stop")
    found = samples(metrics.text().decode())
    assert found["ridgeline:inter_token_latency_seconds_count"] == 3
    assert found["ridgeline:inter_token_latency_seconds_sum"] == pytest.approx(0.012)
    assert found["ridgeline:inter_token_latency_seconds_bucket{le=0.003}"] == 0
    assert found["ridgeline:inter_token_latency_seconds_bucket{le=0.005}"] == 3
    for name, value in (("time_to_first_token", 1.0), ("request_queue_time", 0.5), ("request_prefill_time", 0.5),
                        ("request_decode_time", 0.012), ("request_time_per_output_token", 0.004),
                        ("e2e_request_latency", 1.02)):
        assert found[f"ridgeline:{name}_seconds_sum"] == pytest.approx(value), name
    assert sum(edge <= 0.01 for edge in BETWEEN_TOKENS) >= 8


def test_block_diffusion_is_counted() -> None:
    stats = EngineStats(denoising_steps=6, diffusion_blocks=2, diffusion_tokens=7)
    found = samples(Metrics(stats, "m").text().decode())
    assert [found[f"ridgeline:diffusion_num_{name}_total"] for name in ("denoising_steps", "blocks", "committed_tokens")] == [
        6, 2, 7]


def test_the_dashboard_uses_what_exists(http: httpx.Client) -> None:
    http.get("/health")                                      # a first answer to count
    served = {name.partition("{")[0] for name in samples(http.get("/metrics").text)}
    served = {name for name in served if not name.endswith("_created")}        # when counting began
    served.add("ridgeline:spec_decode_num_accepted_tokens_per_pos_total")      # has no sample before a draft was accepted
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"ridgeline:\w+", target["expr"])}
    assert asked and asked <= served, asked - served
    # And nothing that is served is left out, but for what the parts of a histogram repeat.
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served}
    assert bases == {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}


def test_every_metric_is_documented(http: httpx.Client) -> None:
    text = (DOCS / "serving.md").read_text()
    names = {re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0]).removeprefix("ridgeline:")
             for name in samples(http.get("/metrics").text) if "_created" not in name}
    assert [name for name in sorted(names) if f"`{name}" not in text] == []
