"""What torch takes on this machine: products, and what a layer and a step cost beside them."""
from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ridgeline.analysis.calibration import PASSES
from ridgeline.analysis.hardware import Curve, Hardware
from ridgeline.analysis.probes import COLS, OUTPUTS, ROWS, product_name
from ridgeline.analysis.work import Rows
from ridgeline.bench.host import cpu_name, memory_bytes
from ridgeline.bench.machine import torch_rates

KINDS = {torch.float32: ("F32", "float32"), torch.bfloat16: ("BF16", "bfloat16"), torch.float16: ("F16", "float16")}
WEIGHTS = 48 << 20                # more than the caches hold
ROUNDS = 3
LAYERS = (2, 6)


def calibrate_torch(dtype: torch.dtype, device: torch.device) -> Hardware:
    """This machine as torch uses it, measured each time and not kept: versions and settings of torch differ. Takes 5 to 15 s.

    Attention and elementwise operations have no measured cost: they take the longer of reading and computing.
    """
    load, threads = os.getloadavg()[0], torch.get_num_threads()
    bandwidth, rate, _ = torch_rates(dtype, device)
    kind, compute = KINDS.get(dtype, ("F32", "float32"))
    peaks = {compute: rate} | ({} if compute == "float32" else {"float32": torch_rates(torch.float32, device)[1]})
    curves = [_product(kind, compute, cols, dtype, device) for cols in COLS] + _steps(dtype, device)
    gpu = device.type == "cuda"
    source = "measured by ridgeline's calibration with torch"
    return Hardware(
        torch.cuda.get_device_name(device) if gpu else cpu_name(), bandwidth, peaks,
        torch.cuda.get_device_properties(device).total_memory if gpu else memory_bytes(), device="gpu" if gpu else "cpu",
        threads=1 if gpu else threads, load=round(load, 2), sources=dict.fromkeys(("bandwidth", "peaks", "curves"), source),
        curves=tuple(curves))


def _product(kind: str, compute: str, cols: int, dtype: torch.dtype, device: torch.device) -> Curve:
    """Seconds a weight, by rows; from weights that no cache holds."""
    count = max(1, WEIGHTS // dtype.itemsize // (OUTPUTS[cols] * cols)) + 1
    weights = [torch.rand(OUTPUTS[cols], cols, device=device).to(dtype) for _ in range(count)]
    points = []
    for rows in ROWS:
        x = torch.rand(rows, cols, device=device).to(dtype)
        best = min(_seconds(lambda: [F.linear(x, w) for w in weights], device) for _ in range(ROUNDS))  # noqa: B023
        points.append((float(rows), best / (count * OUTPUTS[cols] * cols)))
    return Curve(product_name(kind, compute, cols), "s per weight, by rows", tuple(points))


def _seconds(body: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    body()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _steps(dtype: torch.dtype, device: torch.device) -> list[Curve]:
    """"layer": seconds of a layer whose products and attention are next to nothing; "pass", "step": beside the layers."""
    from ridgeline.analysis.measure import measure
    from ridgeline.llm import LLM

    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for layers in LAYERS:
        config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
                  "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
                  "max_position_embeddings": 1024}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            llm = LLM(folder, load_format="dummy", backend="torch", device=str(device), progress=False,
                      skip_tokenizer_init=True, dtype=str(dtype).removeprefix("torch."), kv_cache_memory_bytes=64 << 20)
            for sequences, tokens in PASSES:
                m = measure(llm, [Rows(16 if tokens == 1 else 0, tokens, 1)] * sequences, repeats=5, events=False)
                size, stage = float(sequences if tokens == 1 else tokens), "" if tokens == 1 else "prefill."
                found.setdefault((layers, f"{stage}pass"), []).append((size, m.pass_s))
                found.setdefault((layers, f"{stage}step"), []).append((size, m.step_s - m.pass_s))
    few, many = LAYERS
    curves = []
    for stage in ("", "prefill."):
        short, long = found[few, f"{stage}pass"], found[many, f"{stage}pass"]
        each = [(size, max((b - a) / (many - few), 1e-9)) for (size, a), (_, b) in zip(short, long)]
        unit = "s, by sequences or tokens"
        curves += [Curve(f"{stage}layer", unit, tuple(each)), Curve(f"{stage}pass", unit, tuple(
            (size, max(a - few * layer, 1e-9)) for (size, a), (_, layer) in zip(short, each)))]
        both = zip(found[few, f"{stage}step"], found[many, f"{stage}step"])
        curves.append(Curve(f"{stage}step", unit, tuple((a[0], statistics.fmean((a[1], b[1]))) for a, b in both)))
    return curves
