"""What one engine step costs besides the model.

    python -m benchmarks.engine_overhead [--batch 1 32] [--steps 400] [--profile N] [--json]

A model of one layer and 16 channels decodes `batch` sequences; every step gives each of them one token, drawn from 20
candidates (most likely tokens come out of the model's own call). Parts are timed by wrappers around the engine's own methods;
a part's time excludes the parts that it calls, so that they add up. The wrappers themselves cost about a microsecond a call;
the last row, a whole step, is measured without them.

    schedule   which sequences run                     cache     reserve, commit, statistics of the cache store
    strategy   generators, commits, ends of sequences  batch     what each row wants, sharing out results
    forward    the batch and the model                 logits    the head
    sampling   processing, choosing, noise             report    outputs and metrics
    engine     the loop itself
"""
from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine, models
from ridgeline import LLM, SamplingParams
from ridgeline.types import EngineRequest

PARTS = ("schedule", "cache", "strategy", "batch", "forward", "logits", "sampling", "report", "engine")
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
WARM_UP = 20
PROMPT = 16


class Clock:
    """Exclusive time by part: a stack of running parts, of which only the innermost accumulates."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._stack:
                self.seconds[self._stack[-1]] += self.now() - self._since
            self._stack.append(part)
            self._since = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[self._stack.pop()] += self.now() - self._since
                self._since = self.now()
        return wrapper

    def wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))


def instrument(llm: LLM, now: Callable[[], float]) -> Clock:
    """Put a clock around the parts of this engine. Instance attributes, so that no other engine is touched."""
    clock, engine = Clock(now), llm.engine
    runner = engine.runners["target"]
    clock.wrap(engine, "step", "engine")
    clock.wrap(engine.scheduler, "schedule", "schedule")
    for name in ("reserve", "commit", "stats"):
        clock.wrap(engine.store, name, "cache")
    clock.wrap(engine, "_advance", "strategy")
    clock.wrap(engine, "_report", "report")
    clock.wrap(runner, "forward", "forward")
    clock.wrap(runner.model, "logits", "logits")
    if runner.model.top_head is not None:            # the native head, which gives candidates instead of logits
        clock.wrap(runner.model.top_head, "top", "logits")
    clock.wrap(runner, "_choose", "sampling")
    clock.wrap(runner, "execute", "batch")
    return clock


def start(llm: LLM, batch: int, steps: int) -> None:
    """Sequences that decode for at least `steps` steps."""
    for i in range(batch):
        params = SamplingParams(top_k=20, seed=i, max_tokens=steps + WARM_UP + 10, ignore_eos=True)
        prompt = [(7 * i + j) % 250 + 3 for j in range(PROMPT)]
        llm.engine.add_request(EngineRequest(f"request-{i}", prompt, params))
    for _ in range(WARM_UP):
        llm.engine.step()


def finish(llm: LLM, batch: int) -> None:
    for i in range(batch):
        llm.engine.abort(f"request-{i}")
    llm.engine.step()


def step_seconds(llm: LLM, batch: int, steps: int, now: Callable[[], float]) -> float:
    """Median over the steps."""
    start(llm, batch, steps)
    times = []
    for _ in range(steps):
        before = now()
        outputs = llm.engine.step()
        times.append(now() - before)
        assert len(outputs) == batch, "every sequence gets a token in every step"
    finish(llm, batch)
    return statistics.median(times)


def part_seconds(llm: LLM, batch: int, steps: int, now: Callable[[], float]) -> dict[str, float]:
    """Median over the steps of each part's exclusive time."""
    clock = instrument(llm, now)
    start(llm, batch, steps)
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(steps):
        clock.seconds.clear()
        llm.engine.step()
        for part in PARTS:
            times[part].append(clock.seconds[part])
    finish(llm, batch)
    return {part: statistics.median(each) for part, each in times.items()}


def profile(llm: LLM, batch: int, steps: int, lines: int, clock: str) -> None:
    start(llm, batch, steps)
    profiler = cProfile.Profile(CLOCKS[clock])
    profiler.enable()
    for _ in range(steps):
        llm.engine.step()
    profiler.disable()
    finish(llm, batch)
    stats = pstats.Stats(profiler, stream=sys.stdout).strip_dirs()
    print(f"profile of {steps} steps, batch {batch}")
    stats.sort_stats("tottime").print_stats(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the tensors are tiny, so 1 by default")
    parser.add_argument("--clock", choices=CLOCKS, default="wall",
                        help="cpu: CPU time of the engine's thread, which other processes disturb less; needs --threads 1")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="also print the N functions that took longest")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    if options.clock == "cpu" and options.threads != 1:
        parser.error(f"--clock cpu counts one thread only; --threads is {options.threads}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    on = machine.describe()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = models.write(models.NEGLIGIBLE, Path(folder) / "negligible")

        def load() -> LLM:
            return LLM(path, load_format="dummy", dtype="float32", threads=options.threads, max_num_seqs=max(options.batch),
                       kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False)

        for batch in options.batch:
            plain, now = load(), CLOCKS[options.clock]
            results[batch] = {"step": step_seconds(plain, batch, options.steps, now),
                              "parts": part_seconds(load(), batch, options.steps, now)}
            if options.profile:
                profile(plain, batch, options.steps, options.profile, options.clock)
    on["torch_threads"] = machine.describe()["torch_threads"]
    report(on, options, results)
    if options.json:
        print(json.dumps({"benchmark": "engine_overhead", "machine": on, "steps": options.steps, "clock": options.clock,
                          "seconds": results}))
    return 0


def report(on: dict[str, Any], options: argparse.Namespace, results: dict[int, dict[str, Any]]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(f"machine    {machine.line(on)}")
    console.print(f"workload   decoding, greedy, one token a sequence and step; prompts of {PROMPT} tokens; "
                  f"medians over {options.steps} steps, {options.clock} time\n")
    table = Table("microseconds", *[f"batch {b}, a step" for b in results], *[f"batch {b}, a token" for b in results],
                  box=None, pad_edge=False)
    rows: dict[str, dict[int, float]] = {part: {b: r["parts"][part] for b, r in results.items()} for part in PARTS}
    rows["sum of parts"] = {b: sum(r["parts"].values()) for b, r in results.items()}
    rows["sum without the model"] = {b: rows["sum of parts"][b] - r["parts"]["forward"] - r["parts"]["logits"]
                                     for b, r in results.items()}
    rows["step, not instrumented"] = {b: r["step"] for b, r in results.items()}
    for title, seconds in rows.items():
        table.add_row(title, *[f"{s * 1e6:.1f}" for s in seconds.values()],
                      *[f"{s * 1e6 / b:.1f}" for b, s in seconds.items()])
    console.print(table)
    if warning := machine.warn_if_busy(on):
        console.print(f"caution    {warning}")


if __name__ == "__main__":
    raise SystemExit(main())
