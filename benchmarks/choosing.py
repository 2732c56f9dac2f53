"""What choosing tokens costs: decode steps that differ in their sampling parameters alone.

    python -m benchmarks.choosing [MODEL] [--batch 32] [--rounds 24] [--json]

An engine for each way of sampling decodes the same prompts; they take six steps each in turn. "choosing" is the time from
the hidden rows to the tokens less what the greedy engine's head takes, which any way has to read; its share is of the step.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.engine_overhead import Clock
from ridgeline import LLM, SamplingParams
from ridgeline.analysis.measure import native_engine
from ridgeline.analysis.sample import text

WAYS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0},
    "top_k 64": {"temperature": 1, "top_k": 64},
    "top_k 64, top_p 0.95": {"temperature": 1, "top_k": 64, "top_p": 0.95},
    "top_k 64, presence_penalty 0.5": {"temperature": 1, "top_k": 64, "presence_penalty": 0.5},
    "temperature 1, whole vocabulary": {"temperature": 1},
}
AT_ONCE, PROMPT = 6, 128


class Way:
    """One engine, its requests, and the seconds of its steps, of choosing within them and of the head within that."""

    def __init__(self, model: str, params: dict[str, Any], batch: int, steps: int):
        self.llm = LLM(model, backend="native", max_num_seqs=batch, progress=False, kv_cache_memory_bytes=1 << 29)
        assert self.llm.tokenizer is not None
        ids = self.llm.tokenizer.encode(text())
        for i in range(batch):
            self.llm.frontend.add(ids[16 * i:16 * i + PROMPT], SamplingParams(
                max_tokens=steps + 64, ignore_eos=True, seed=i, **params))
        runner = self.llm.engine.runners["target"]
        self.native = native_engine(runner.model)
        self.steps, self.choosing, self.head = list[float](), list[float](), list[float]()
        while self.llm.stats.generation_tokens < 4 * batch or self.llm.engine.scheduler.waiting:
            self.llm.frontend.step()
        self.clock = Clock(time.perf_counter)
        self.clock.wrap(runner, "_choose", "choosing")

    def run(self) -> None:
        for _ in range(AT_ONCE):
            self.clock.seconds.clear()
            self.native.trace(True)
            start = time.perf_counter()
            self.llm.frontend.step()
            self.steps.append(time.perf_counter() - start)
            self.native.trace(False)
            head = sum(end - begin for _, part, _, begin, end in self.native.take_trace() if part == "head") / 1e9
            self.choosing.append(self.clock.seconds.get("choosing", head))     # most likely tokens alone come with the head
            self.head.append(head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gemma3-270m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    host = machine.describe()
    ways = {name: Way(given.model, params, given.batch, given.rounds * AT_ONCE) for name, params in WAYS.items()}
    for _ in range(given.rounds):
        for way in ways.values():
            way.run()
    head = statistics.median(ways["temperature 0"].head)
    found = []
    for name, way in ways.items():
        step, choosing = statistics.median(way.steps), statistics.median(way.choosing) - head
        found.append({"sampling": name, "step_s": step, "choosing_s": choosing, "share": choosing / step})
    console = Console()
    table = Table("sampling", "step, ms", "choosing, ms", "share")
    for row in found:
        table.add_row(row["sampling"], f"{row['step_s'] * 1e3:.1f}", f"{row['choosing_s'] * 1e3:.2f}", f"{row['share']:.1%}")
    console.print(machine.line(host), highlight=False)
    console.print(table)
    if warning := machine.warn_if_busy(host):
        console.print(f"caution: {warning}", highlight=False)
    if given.json:
        print(json.dumps({"machine": host, "results": found}))


if __name__ == "__main__":
    sys.exit(main())
