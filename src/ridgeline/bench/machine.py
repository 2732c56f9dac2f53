"""The machine that figures are measured on, and what it can do: read bandwidth and matrix products, measured here and now."""
from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

import ridgeline
from ridgeline.bench.host import cores, cpu_name
from ridgeline.config import EngineConfig
from ridgeline.loading import activation_dtype

if TYPE_CHECKING:
    from ridgeline.native.lower import Report

READ_BYTES = 256 << 20         # more than the caches of a machine hold
ROWS, COLS = 96, 2048          # a product that fits the caches and keeps every core busy
ROUNDS = 4                     # bandwidth and products in turn; the best counts, since other programs only ever slow them
WINDOW_S = 0.15                # of products in a round
FLOAT_KINDS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes read a second; peak: operations a second of the products that `peak_of` names (2 a multiply-add)."""

    cpu: str
    cores: int
    threads: int
    instruction_set: str | None       # of the native kernels; None: the torch backend
    bandwidth: float
    peak: float
    peak_of: str
    torch: str
    python: str
    ridgeline: str
    load: float                       # one-minute load average before the run

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["bandwidth_bytes_per_s"] = found.pop("bandwidth")
        found["peak_ops_per_s"] = found.pop("peak")
        return found

    def line(self) -> str:
        isa = f", {self.instruction_set}" if self.instruction_set else ""
        return (f"{self.cpu}, {self.threads} threads on {self.cores} cores{isa}; reads {self.bandwidth / 1e9:.1f} GB/s, "
                f"computes {self.peak / 1e9:.0f} GOPS ({self.peak_of}), both measured before the run")


def measure(report: Report | None, dtype: torch.dtype, config: EngineConfig, *, rounds: int = ROUNDS) -> Machine:
    """Measure this machine as a model uses it: with its threads, and with the kind of product most of its weights need.

    report: of the native backend, None where torch runs the model; dtype: of torch's weights.
    """
    load, device = os.getloadavg()[0], torch.device(config.device)
    if report is not None:
        threads, isa = report.threads, report.isa
        bandwidth, peak, peak_of = _native(report, activation_dtype(config), rounds)
    else:
        threads, isa = torch.get_num_threads(), None
        bandwidth, peak, peak_of = torch_rates(dtype, device, rounds)
    return Machine(cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device), cores(),
                   threads, isa, bandwidth, peak, peak_of, torch.__version__, platform.python_version(),
                   ridgeline.__version__, round(load, 2))


def _native(report: Report, precision: str, rounds: int) -> tuple[float, float, str]:
    from ridgeline.native import _native

    sizes: dict[str, int] = {}
    for layer in report.layers:
        for kind in layer.kinds:
            sizes[kind] = sizes.get(kind, 0) + layer.nbytes
    most = max(sizes, key=lambda kind: sizes[kind], default="F32")
    engine = _native.Engine(report.isa, report.threads)
    values = torch.empty(COLS, COLS).normal_(generator=torch.Generator().manual_seed(0))
    quantised = most not in FLOAT_KINDS
    stored = values.to(torch.bfloat16 if most == "BF16" else torch.float16 if most == "F16" else torch.float32)
    rows = stored.view(torch.uint8).numpy().reshape(COLS, -1)
    matrix = engine.pack("F32" if quantised else most, rows, COLS, quantised)
    linear = _native.Linear(matrix, [], precision)
    bandwidth = rate = 0.0
    for _ in range(rounds):
        bandwidth = max(bandwidth, engine.read_bandwidth(READ_BYTES))
        rate = max(rate, native_rate(engine, linear))
    # The kernels' rule: quantised weights compute in int8 or exactly, bfloat16 ones in bfloat16 or exactly.
    name = "float32"
    if quantised and precision == "int8":
        name = "int8"
    elif most == "BF16" and precision != "float32":
        name = "bfloat16"
    return bandwidth, rate, f"{name}, {ROWS} x {COLS} x {COLS}"


def native_rate(engine: Any, linear: Any) -> float:
    """Operations a second of products of ROWS rows with a native linear layer of COLS x COLS."""
    x, out = torch.rand(ROWS, COLS) - 0.5, torch.empty(ROWS, COLS)
    return _best_rate(lambda: engine.linear(linear, x.data_ptr(), ROWS, out.data_ptr()), torch.device("cpu"))


def torch_rates(dtype: torch.dtype, device: torch.device, rounds: int = ROUNDS) -> tuple[float, float, str]:
    """Bytes read and operations of products a second, and which products these are."""
    buffer = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    # A sum reads everything once; integers, since the order of an fp32 sum costs torch time.
    x = torch.ones(ROWS, COLS, dtype=dtype, device=device)
    w = torch.ones(COLS, COLS, dtype=dtype, device=device)
    read = rate = 0.0
    for _ in range(rounds):
        read = max(read, *(_once(buffer.sum, device) for _ in range(4)))
        rate = max(rate, _best_rate(lambda: torch.matmul(x, w.T), device))
    return READ_BYTES * read, rate, f"{str(dtype).removeprefix('torch.')}, {ROWS} x {COLS} x {COLS}"


def _best_rate(product: Callable[[], object], device: torch.device) -> float:
    """Operations a second of the best product in WINDOW_S."""
    end, best = time.perf_counter() + WINDOW_S, 0.0
    while time.perf_counter() < end or not best:
        best = max(best, _once(product, device))
    return 2 * ROWS * COLS * COLS * best


def _once(function: Callable[[], object], device: torch.device) -> float:
    """Calls a second, from one call."""
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1 / (time.perf_counter() - start)
