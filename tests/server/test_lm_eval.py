"""EleutherAI's harness scores a text over HTTP as `ridgeline perplexity` scores it in the engine."""
from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import LLM, hub
from ridgeline.errors import ModelNotFound
from ridgeline.quality import measure
from server_kit import Running

ROOT = Path(__file__).parents[2]
PROSE = ROOT / "tests" / "data" / "prose.txt"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval (pip install 'lm-eval[api]')")
def test_local_completions_agrees_with_perplexity(tmp_path: Path) -> None:
    """Both score each token of the text behind the beginning-of-text token: the log-probabilities add up to the same."""
    try:
        hub.resolve("gemma3-270m")
    except ModelNotFound as missing:
        pytest.skip(f"needs the packaged model: {missing}")
    llm = LLM("gemma3-270m", threads=1, max_model_len=2048, progress=False)
    quality = measure(llm, PROSE.read_text(encoding="utf-8"), context=2048)
    with Running(llm, model="gemma3-270m") as server:
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args",
             f"model=gemma3-270m,base_url={server.url}/v1/completions,tokenizer_backend=remote,max_length=2048",
             "--tasks", "ridgeline_prose", "--include_path", "tests/data/lm_eval", "--output_path", str(tmp_path / "result")],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
            env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next((tmp_path / "result").rglob("results_*.json")).read_text())["results"]["ridgeline_prose"]
    theirs = math.log(found["byte_perplexity,none"]) * PROSE.stat().st_size
    ours = math.log(quality.perplexity) * quality.tokens
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert found["bits_per_byte,none"] == pytest.approx(ours / PROSE.stat().st_size / math.log(2), rel=1e-5)
