"""Continuous against static batching on a ragged workload, with the real engine.

    python -m benchmarks.batching [--model tiny|gemma3-270m|PATH] [--arrival-rate R] [--json]

Both engines run the same model, seats and token budget; only the scheduling policy differs. Continuous batching (fcfs)
lets a waiting request join as soon as a seat is free. Static batching forms a batch and runs it until its longest request
has finished; nobody joins meanwhile. Requests differ in prompt and output length (both log-uniform), because with equal
lengths there would be nothing to gain. The two run in turn, continuous first, with the same requests in each repetition.

How the figures are counted:
    throughput    output tokens / (last finish - first arrival)
    latency       finish - arrival of a request, queueing included; p99 by linear interpolation over the requests
    TTFT          first output token - arrival, queueing included
    tokens a step output tokens / engine steps: how well the seats are used
"""
from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import machine, models
from ridgeline import LLM, SamplingParams
from ridgeline.errors import EngineError
from ridgeline.types import EngineRequest, RequestMetrics

POLICIES = {"continuous": "fcfs", "static": "static"}


@dataclass(frozen=True)
class Request:
    """arrival: seconds after the start of the run."""

    prompt: list[int]
    output_len: int
    arrival: float


@dataclass(frozen=True)
class Figures:
    """Of one run. Times in seconds."""

    throughput: float
    mean_latency: float
    p99_latency: float
    mean_ttft: float
    tokens_per_step: float
    duration: float


ROWS = (  # field, title, unit, whether more is better
    ("throughput", "throughput", "tokens/s", True),
    ("mean_latency", "mean latency", "s", False),
    ("p99_latency", "p99 latency", "s", False),
    ("mean_ttft", "mean TTFT", "s", False),
    ("tokens_per_step", "tokens a step", "", True),
    ("duration", "duration", "s", False),
)


def make_workload(options: argparse.Namespace, vocab_size: int) -> list[Request]:
    """The same requests for the same seed. Arrivals are a Poisson process, or all at once without a rate."""
    rng = random.Random(options.seed)
    requests, arrival = [], 0.0
    for _ in range(options.requests):
        prompt = [rng.randrange(3, vocab_size) for _ in range(_length(rng, options.prompt_len))]
        requests.append(Request(prompt, _length(rng, options.output_len), arrival))
        arrival += rng.expovariate(options.arrival_rate) if options.arrival_rate else 0.0
    return requests


def _length(rng: random.Random, bounds: Sequence[int]) -> int:
    low, high = bounds
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def run(llm: LLM, workload: Sequence[Request]) -> Figures:
    """Serve the workload in real time. raises EngineError if a request does not give what it was asked for."""
    engine = llm.engine
    waiting, metrics = list(workload), []
    steps, start = engine.stats.steps, time.monotonic()
    while waiting or engine.has_work:
        while waiting and start + waiting[0].arrival <= time.monotonic():
            request = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
            engine.add_request(EngineRequest(f"request-{len(workload) - len(waiting)}", request.prompt, params,
                                             arrival=start + request.arrival))
        if not engine.has_work:
            time.sleep(max(0.0, start + waiting[0].arrival - time.monotonic()))
            continue
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finish_reason is not None and output.metrics is not None:
                metrics.append(output.metrics)
    wanted = sum(request.output_len for request in workload)
    return _figures(metrics, wanted, engine.stats.steps - steps)


def _figures(metrics: Sequence[RequestMetrics], wanted: int, steps: int) -> Figures:
    tokens = sum(m.completion_tokens for m in metrics)
    if tokens != wanted:
        raise EngineError(f"the run gave {tokens} tokens; the workload asks for {wanted}")
    latencies = sorted(m.e2e_s for m in metrics if m.e2e_s is not None)
    duration = max(m.finished or 0.0 for m in metrics) - min(m.arrival for m in metrics)
    return Figures(
        throughput=tokens / duration, mean_latency=statistics.fmean(latencies), p99_latency=quantile(latencies, 0.99),
        mean_ttft=statistics.fmean(m.ttft_s for m in metrics if m.ttft_s is not None), tokens_per_step=tokens / steps,
        duration=duration)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def medians(runs: Sequence[Figures]) -> Figures:
    return Figures(**{name: statistics.median(asdict(r)[name] for r in runs) for name in asdict(runs[0])})


def load(options: argparse.Namespace, policy: str) -> LLM:
    flags = {"dtype": options.dtype, "scheduling_policy": policy, "max_num_seqs": options.max_num_seqs,
             "max_num_batched_tokens": options.max_num_batched_tokens, "threads": options.threads,
             "max_model_len": options.prompt_len[1] + options.output_len[1],
             "enable_prefix_caching": False}         # repetitions must not find the prompts of the one before
    if options.model != "tiny":
        return LLM(options.model, load_format=options.load_format, **flags)
    with tempfile.TemporaryDirectory() as folder:
        return LLM(models.write(models.TINY, Path(folder) / "tiny"), load_format="dummy", **flags)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny (15.7M parameters, made-up weights), or any model name")
    parser.add_argument("--load-format", default="auto", help="dummy: made-up weights for a folder with a config.json")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-len", type=int, nargs=2, default=(8, 128), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(4, 128), metavar=("MIN", "MAX"))
    parser.add_argument("--arrival-rate", type=float, default=0.0, metavar="R", help="requests a second; 0 = all at once")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    before = machine.describe()
    engines = {name: load(options, policy) for name, policy in POLICIES.items()}
    before["torch_threads"] = machine.describe()["torch_threads"]
    workload = make_workload(options, next(iter(engines.values())).engine.vocab_size)
    for llm in engines.values():
        run(llm, workload[:options.max_num_seqs])                    # first calls allocate
    runs: dict[str, list[Figures]] = {name: [] for name in engines}
    for _ in range(options.repetitions):
        for name, llm in engines.items():
            runs[name].append(run(llm, workload))
    result = report(options, before, workload, runs)
    if options.json:
        print(json.dumps(result))
    return 0


def report(options: argparse.Namespace, on: dict[str, object], workload: Sequence[Request],
           runs: dict[str, list[Figures]]) -> dict[str, object]:
    middle = {name: medians(each) for name, each in runs.items()}
    prompts, outputs = ([len(r.prompt) for r in workload], [r.output_len for r in workload])
    arrivals = f"{options.arrival_rate:g} a second (Poisson)" if options.arrival_rate else "all at once"
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(f"machine    {machine.line(on)}")
    console.print(f"model      {options.model}, {options.dtype}; {options.max_num_seqs} seats, "
                  f"{options.max_num_batched_tokens} rows a step")
    console.print(f"workload   {len(workload)} requests, arriving {arrivals}; prompts {min(prompts)} to {max(prompts)} "
                  f"tokens (mean {statistics.fmean(prompts):.0f}), outputs {min(outputs)} to {max(outputs)} (mean "
                  f"{statistics.fmean(outputs):.0f}); seed {options.seed}")
    console.print(f"figures    medians of {options.repetitions} interleaved repetitions [lowest, highest]\n", markup=False)
    table = Table("", *runs, "continuous / static", "better is", box=None, pad_edge=False)
    ratios = {}
    for field, title, unit, more in ROWS:
        values = {name: getattr(figures, field) for name, figures in middle.items()}
        ratios[field] = values["continuous"] / values["static"]
        cells = []
        for name, each in runs.items():
            spread = [getattr(figures, field) for figures in each]
            cells.append(escape(f"{values[name]:.4g} [{min(spread):.4g}, {max(spread):.4g}]"))
        table.add_row(f"{title}{f', {unit}' if unit else ''}", *cells, f"{ratios[field]:.2f}", "more" if more else "less")
    console.print(table)
    if warning := machine.warn_if_busy(on):
        console.print(f"caution    {warning}")
    return {
        "benchmark": "batching", "machine": on, "model": options.model, "dtype": options.dtype,
        "workload": {"requests": len(workload), "arrival_rate": options.arrival_rate, "seed": options.seed,
                     "prompt_len": list(options.prompt_len), "output_len": list(options.output_len),
                     "prompt_tokens": sum(prompts), "output_tokens": sum(outputs),
                     "max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": options.max_num_batched_tokens},
        "repetitions": options.repetitions, "medians": {name: asdict(figures) for name, figures in middle.items()},
        "runs": {name: [asdict(figures) for figures in each] for name, each in runs.items()}, "ratios": ratios,
    }


if __name__ == "__main__":
    raise SystemExit(main())
