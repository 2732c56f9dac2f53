"""Predicted against measured step times, with a probe of the machine's speed before each repeat.

    python -m benchmarks.predict gemma3-270m qwen3-0.6b.q8_0.gguf --cache-gb 8

Prints a row a step: predicted, measured (median of the repeats), the error, and the parts that are furthest off; then the
median and the worst error over all.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.analysis.calibration import SpeedProbe, calibrate_for
from ridgeline.analysis.cost import count
from ridgeline.analysis.hardware import Speed
from ridgeline.analysis.measure import measure
from ridgeline.analysis.predict import predict, step_seconds
from ridgeline.analysis.read import spec_of
from ridgeline.analysis.work import Rows
from ridgeline.llm import LLM
from ridgeline.loading import activation_dtype, describe

STEPS = {f"prefill {n}": [Rows(0, n, 1)] for n in (128, 512, 2048)} | {
    f"decode {batch} @ {context}": [Rows(context, 1, 1)] * batch for context in (128, 2048) for batch in (1, 8, 32)}


def check(model: str, *, repeats: int, cache_gb: float, recalibrate: bool, steps: list[str]) -> list[dict[str, Any]]:
    llm = LLM(model, max_num_batched_tokens=2048, kv_cache_memory_bytes=int(cache_gb * 2**30), progress=False)
    spec = spec_of(llm.loaded, describe(model, llm.config), llm.config)
    start = time.perf_counter()
    hardware = calibrate_for(llm.loaded, precision=activation_dtype(llm.config), recalibrate=recalibrate)
    print(f"{Path(model).name}: calibrated in {time.perf_counter() - start:.1f} s at {hardware.bandwidth / 1e9:.1f} GB/s",
          flush=True)
    found, probe, speeds = [], SpeedProbe(hardware), list[Speed]()

    def note() -> None:
        speeds.append(probe.now())

    for name in steps:
        speeds.clear()
        measured = measure(llm, STEPS[name], repeats=3 if STEPS[name][0].tokens > 1000 else repeats, before=note)
        note()
        now = Speed(statistics.median(s.memory for s in speeds), statistics.median(s.compute for s in speeds))
        told = predict(count(spec, measured.step), hardware, now=now)
        seconds = step_seconds(told)
        parts: dict[str, list[float]] = {}
        for p in told:
            parts.setdefault(p.work.component, [0.0, 0.0])[0] += p.seconds
        for (_, component), part in measured.seconds.items():
            parts.setdefault(component, [0.0, 0.0])[1] += part
        parts.setdefault("dispatch", [0.0, 0.0])[1] += measured.step_s - measured.pass_s
        row = {"model": Path(model).name, "step": name, "predicted_s": seconds, "measured_s": measured.step_s,
               "error": seconds / measured.step_s - 1, "best_s": measured.best_s, "memory_speed": now.memory,
               "compute_speed": now.compute, "parts": parts}
        found.append(row)
        worst = sorted(parts, key=lambda c: -abs(parts[c][0] - parts[c][1]))[:4]
        told_parts = ", ".join(f"{c} {parts[c][0] * 1e3:.2f}/{parts[c][1] * 1e3:.2f}" for c in worst)
        print(f"  {name:16} {seconds * 1e3:8.2f} {measured.step_s * 1e3:8.2f} ms {100 * row['error']:+6.1f} % "
              f"(best {measured.best_s * 1e3:.2f}; speed {now.memory:.2f} {now.compute:.2f})  {told_parts}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache-gb", type=float, default=8.0)
    parser.add_argument("--recalibrate", action="store_true")
    parser.add_argument("--steps", default=",".join(STEPS), help="comma separated")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = [row for model in given.models for row in check(
        model, repeats=given.repeats, cache_gb=given.cache_gb, recalibrate=given.recalibrate, steps=given.steps.split(","))]
    errors = [abs(row["error"]) for row in found]
    print(f"error: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} % of {len(errors)} steps")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
