"""The benchmarks run from the command line, say what they measured, and count what they say they count."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What it printed, and the JSON object in the last line."""
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", "--json", *arguments], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text, _, last = done.stdout.rstrip().rpartition("\n")
    return text, json.loads(last)


def test_batching(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "max_position_embeddings": 64}))
    text, result = run("batching", "--model", str(tmp_path), "--load-format", "dummy", "--requests", "12",
                       "--prompt-len", "4", "8", "--output-len", "2", "24", "--max-num-seqs", "4", "--repetitions", "1",
                       "--threads", "1")
    for word in ("machine", "workload   12 requests, arriving all at once", "throughput", "p99 latency", "mean TTFT"):
        assert word in text
    continuous, static = result["medians"]["continuous"], result["medians"]["static"]
    # Steps are no matter of time: a continuous batch keeps its seats filled, a static one waits for its longest request.
    assert 1.1 * static["tokens_per_step"] < continuous["tokens_per_step"] <= 4
    for name, run_figures in (("continuous", continuous), ("static", static)):
        assert run_figures["throughput"] * run_figures["duration"] == pytest.approx(result["workload"]["output_tokens"]), name
        assert 0 < run_figures["mean_ttft"] < run_figures["mean_latency"] < run_figures["p99_latency"], name
        assert run_figures["p99_latency"] <= run_figures["duration"], name
    assert result["ratios"]["throughput"] == continuous["throughput"] / static["throughput"]


def test_engine_overhead() -> None:
    text, result = run("engine_overhead", "--batch", "1", "3", "--steps", "20")
    assert "sum without the model" in text and "batch 3, a token" in text
    for batch in ("1", "3"):
        seconds = result["seconds"][batch]
        assert all(value > 0 for value in seconds["parts"].values()), seconds
        assert seconds["step"] > 0


def test_choosing() -> None:
    _, result = run("choosing", "gemma3-270m", "--batch", "2", "--rounds", "1")
    ways = {row["sampling"]: row for row in result["results"]}
    assert "top_k 64" in ways and all(row["step_s"] > 0 for row in ways.values())
    # All of 262,144 probabilities cost more than the best few.
    assert ways["temperature 1, whole vocabulary"]["choosing_s"] > ways["temperature 0"]["choosing_s"]


def test_accuracy() -> None:
    text, result = run("accuracy", "--tokens", "48")
    assert "int8 KV" in text
    for row in result["results"].values():
        assert 0 < row["mean_kl"] < 0.02 and row["mean_kl"] < row["p99_kl"] and row["top1"] > 0.8
