"""What bounds a serving engine at this moment, from the shapes of its passes and a few coefficients of its model.

A pass of one sequence takes 5 us to account for, one of 32 takes 43: multiplications with what was summed up over the layers
when the model was loaded. Only the target's passes count. Definitions: docs/metrics.md.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.analysis.read import spec_of
from ridgeline.analysis.spec import Attention, Spec
from ridgeline.bench import machine
from ridgeline.bench.measure import wanted_rows
from ridgeline.errors import UnsupportedModel
from ridgeline.llm import LLM
from ridgeline.loading import build
from ridgeline.runner import Slice
from ridgeline.types import TARGET

STAGES, KINDS = ("prefill", "decode"), ("compute", "memory", "kv", "overhead")
DECAY = 0.98                   # of what earlier passes of a stage count, for each later one: some fifty passes
_log = logging.getLogger("ridgeline.analysis")
_machines: dict[tuple[object, ...], tuple[float, float]] = {}


@dataclass(frozen=True)
class Window:
    """Attention layers of one window together: operations of a (query, key) pair, bytes of a key and its value."""

    most: int | None
    pair_flops: int
    token_bytes: int


@dataclass(frozen=True)
class Coefficients:
    row_flops: int                 # of a row in the products of all layers
    head_flops: int                # of a row that goes through the head
    layer_bytes: int
    head_bytes: int
    windows: tuple[Window, ...]

    @classmethod
    def of(cls, spec: Spec) -> Coefficients:
        groups: dict[int | None, list[Attention]] = {}
        for a in spec.attention_layers():
            groups.setdefault(a.window, []).append(a)
        windows = tuple(
            Window(most, sum(4 * a.heads * a.head_dim for a in found), sum(a.kv_bytes(spec.kv_dtype) for a in found))
            for most, found in groups.items())
        return cls(2 * sum(m.parameters for m in spec.matrices), 2 * spec.head.parameters, sum(m.nbytes for m in spec.matrices),
                   spec.head.nbytes, windows)

    def work(self, rows: Sequence[tuple[int, int]], wanted: int) -> tuple[int, int, int, int]:
        """rows: (cached tokens, new tokens) of each sequence. Returns operations, bytes of weights, of keys and values read and
        written."""
        tokens = sum(count for _, count in rows)
        flops = self.row_flops * tokens + self.head_flops * wanted
        read = written = 0
        for window in self.windows:
            pairs = keys = 0
            for start, count in rows:
                end, most = start + count, window.most
                if most is None or end <= most:
                    keys += end
                    pairs += end if count == 1 else count * start + count * (count + 1) // 2
                else:
                    growing = max(0, most - start)
                    keys += min(end, most + count - 1)
                    pairs += growing * start + growing * (growing + 1) // 2 + (count - growing) * most
            flops += window.pair_flops * pairs
            read += window.token_bytes * keys
            written += window.token_bytes * tokens
        return flops, self.layer_bytes + (self.head_bytes if wanted else 0), read, written


class Meter:
    """bandwidth, peak: of the machine, bytes and operations a second."""

    def __init__(self, coefficients: Coefficients, bandwidth: float, peak: float):
        self.coefficients, self.bandwidth, self.peak = coefficients, bandwidth, peak
        self.flops = self.read_bytes = self.write_bytes = 0
        self._seconds = {stage: dict.fromkeys(KINDS, 0.0) for stage in STAGES}

    def passed(self, role: str, slices: Sequence[Slice], seconds: float) -> None:
        """After each pass, in the engine's thread."""
        if role != TARGET:
            return
        rows = [(s.placement.start, s.count) for s in slices]
        flops, weights, read, written = self.coefficients.work(rows, sum(wanted_rows(s) for s in slices))
        self.flops += flops
        self.read_bytes += weights + read
        self.write_bytes += written
        prefill = any(s.placement.start < s.seq.prompt_len for s in slices)
        computing, reading = flops / self.peak, (weights + read) / self.bandwidth
        found = self._seconds[STAGES[0] if prefill else STAGES[1]]
        for kind in KINDS:
            found[kind] *= DECAY
        roof = min(seconds, max(computing, reading))
        found["compute" if computing >= reading else "kv" if read > weights else "memory"] += roof
        found["overhead"] += seconds - roof

    def shares(self) -> dict[str, dict[str, float]]:
        """Of each stage that ran, the share of its recent time that each kind of limit explains; overhead: above the roof."""
        shown = {}
        for stage, found in self._seconds.items():
            total = sum(found.values())
            if total > 0:
                shown[stage] = {kind: value / total for kind, value in found.items()}
        return shown

    def bottlenecks(self) -> Mapping[str, str]:
        return {stage: max(found, key=lambda kind: found[kind]) for stage, found in self.shares().items()}


def watch(llm: LLM) -> Meter | None:
    """Account for the passes of this engine from now on; None where the cost of the model is not known."""
    try:
        spec = spec_of(llm.loaded, build(llm.loaded, llm.config, llm.config.max_model_len), llm.config)
    except UnsupportedModel as error:
        _log.info("no estimate of FLOPs, bytes and bottleneck: %s", error)
        return None
    meter = Meter(Coefficients.of(spec), *_limits(llm))
    llm.engine.on_pass = meter.passed
    return meter


def _limits(llm: LLM) -> tuple[float, float]:
    """Read bandwidth and peak of this machine, measured once for each kind of engine, in a quarter of a second."""
    report, config = llm.loaded.report, llm.config
    kinds = None if report is None else (report.isa, report.threads, tuple(sorted({k for x in report.layers for k in x.kinds})))
    key = (kinds, llm.loaded.dtype, config.device, config.activation_dtype, config.dtype)
    if key not in _machines:
        found = machine.measure(report, llm.loaded.dtype, config, rounds=1)
        _machines[key] = found.bandwidth, found.peak
    return _machines[key]
