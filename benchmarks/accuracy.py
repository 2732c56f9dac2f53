"""How far each engine's probabilities are from fp32 arithmetic on the same file's dequantised weights, in one run.

    python -m benchmarks.accuracy [MODEL] [--tokens 770] [--text FILE] [--peer PYTHON] [--json]

MODEL: a GGUF file or a packaged model; --peer: a Python that has llama_cpp. Rows: this engine, the same with an int8 KV cache,
and llama.cpp. Mean and 99th percentile of KL(reference || engine) a token in nats, the share of tokens whose most likely
successor is the reference's, and the mean KL over that of llama.cpp.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from ridgeline import LLM
from ridgeline.hub import resolve
from ridgeline.quality import ROWS, hidden_states, log_probs

PROSE = Path(__file__).parents[1] / "tests" / "data" / "prose.txt"
WAYS: dict[str, dict[str, Any]] = {"ridgeline": {}, "ridgeline, int8 KV": {"kv_cache_dtype": "int8"}}

LogProbs = Callable[[int, int], torch.Tensor]      # of rows [a, b): (rows, vocabulary) in fp64


def of_llm(llm: LLM, ids: list[int]) -> LogProbs:
    hidden = hidden_states(llm, ids)
    return lambda a, b: log_probs(llm, hidden[a:b])


def of_llamacpp(python: str, model: Path, ids: list[int], threads: int, out: Path) -> LogProbs:
    script = Path(__file__).parent / "peers" / "logits_llamacpp.py"
    done = subprocess.run([python, str(script), str(model), str(threads), str(out)], input=json.dumps(ids), text=True,
                          capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    logits = np.memmap(out, dtype=np.float32, mode="r").reshape(len(ids), -1)
    return lambda a, b: torch.log_softmax(torch.from_numpy(np.array(logits[a:b])).double(), -1)


def compare(reference: LogProbs, other: LogProbs, count: int) -> dict[str, float]:
    kl, same = list[torch.Tensor](), 0
    for a in range(0, count, ROWS):
        p, q = reference(a, min(a + ROWS, count)), other(a, min(a + ROWS, count))                    # (rows, V)
        kl.append((p.exp() * (p - q)).sum(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    each = torch.cat(kl).clamp(min=0)
    return {"mean_kl": float(each.mean()), "p99_kl": float(each.quantile(0.99)), "top1": same / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gemma3-270m")
    parser.add_argument("--tokens", type=int, default=770)
    parser.add_argument("--text", type=Path, default=PROSE)
    parser.add_argument("--peer", help="a Python that has llama_cpp")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    def load(**options: Any) -> LLM:
        return LLM(given.model, backend="native", max_model_len=given.tokens + 64, progress=False, **options)

    reference = load(dtype="float32")
    assert reference.tokenizer is not None
    ids = reference.tokenizer.encode(given.text.read_text("utf-8"))[:given.tokens]
    exact, found = of_llm(reference, ids), dict[str, dict[str, float]]()
    for name, options in WAYS.items():
        found[name] = compare(exact, of_llm(load(**options), ids), len(ids))
    if given.peer:
        with tempfile.TemporaryDirectory() as folder:
            threads = len(os.sched_getaffinity(0))
            peer = of_llamacpp(given.peer, resolve(given.model), ids, threads, Path(folder) / "logits")
            found["llama.cpp"] = compare(exact, peer, len(ids))
    base = found.get("llama.cpp", {}).get("mean_kl")
    table = Table("engine", "mean KL", "p99 KL", "top-1", "mean KL / llama.cpp")
    for name, row in found.items():
        table.add_row(name, f"{row['mean_kl']:.5f}", f"{row['p99_kl']:.4f}", f"{row['top1']:.1%}",
                      "" if base is None else f"{row['mean_kl'] / base:.2f}")
    console = Console()
    console.print(f"{machine.line(machine.describe())}\n{given.model}, {len(ids)} tokens", highlight=False)
    console.print(table)
    if given.json:
        print(json.dumps({"model": given.model, "tokens": len(ids), "results": found}))


if __name__ == "__main__":
    sys.exit(main())
