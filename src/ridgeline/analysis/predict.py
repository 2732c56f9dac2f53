"""How long the works of a pass take on a machine.

On a calibrated machine each kind of work has a measured cost: of a product by its stored type, its rows and its columns, of
attention by the head's size, the heads that share keys, the context or the queries a key, of what lies between by its
elements. A step costs something beside its kernels, too. All of it was measured on sizes of its own; nothing is fitted to the
model that is predicted. On a machine from the table a work takes the longer of its reading and its computing.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ridgeline.analysis.hardware import Curve, Hardware, Speed
from ridgeline.analysis.probes import COLS, HEADS, attention_name, product_name
from ridgeline.analysis.spec import KV_ITEMSIZE, KV_SCALE_BYTES
from ridgeline.analysis.work import Work
from ridgeline.errors import ConfigError

COMPUTE, MEMORY, KV, OVERHEAD = "compute", "memory", "kv", "overhead"
SPREAD_QUERIES = 1.5           # queries a key up to which rows of a batch are decoding ones
# Which measured cost an elementwise component has; `True`: with a norm in it.
ELEMENTWISE = {"norm": ("input", "norm"), "residual": ("residual", "residual_norm"), "heads": ("heads", "heads_norm"),
               "final_norm": ("norm", "norm")}
DISPATCH = "dispatch"


class Predicted(NamedTuple):
    """bound: what the work waits for, "compute", "memory" (weights and activations), "kv" (keys and values) or "overhead"."""

    work: Work
    seconds: float
    bound: str


def predict(works: Iterable[Work], hardware: Hardware, *, now: Speed | None = None) -> list[Predicted]:
    """Seconds of each work, in order, and on a calibrated machine last what the step costs beside them, (None, "dispatch").

    now: how fast the machine is at this moment (`ridgeline.analysis.calibration.SpeedProbe`); None: as when it was calibrated.
    """
    found = list(works)
    model = _Model(hardware, Speed() if now is None else now)
    out = [model.of(work) for work in found]
    overhead = model.step(found)
    return out if overhead is None else [*out, overhead]


def step_seconds(predicted: Iterable[Predicted]) -> float:
    return sum(p.seconds for p in predicted)


def key_bytes(dtype: str, d: int) -> int:
    """Of one key or value of a head, the scale of int8 included."""
    return d * KV_ITEMSIZE[dtype] + KV_SCALE_BYTES.get(dtype, 0)


def _by_rows(curve: Curve, rows: int) -> float:
    """With more rows than were measured computing binds, so that time grows as they do."""
    return curve.at(rows) * max(1.0, rows / curve.points[-1][0])


class _Model:
    def __init__(self, hardware: Hardware, now: Speed):
        self.hardware, self.now = hardware, now
        self.curves = {c.kernel: c for c in hardware.curves}

    def of(self, work: Work) -> Predicted:
        seconds: float | None = None
        if work.kind == "collective":
            return Predicted(work, self.collective(work), OVERHEAD)
        if work.rows:
            how = {"linear": self.linear, "attention": self.attention, "elementwise": self.elementwise}.get(work.kind)
            seconds = None if how is None else how(work)
        roof, bound = self.roof(work)
        if seconds is None:
            return Predicted(work, roof, bound)
        return Predicted(work, seconds, bound if roof > seconds / 4 or not self.hardware.calibrated else OVERHEAD)

    def roof(self, work: Work) -> tuple[float, str]:
        """The longer of reading from main memory and computing, and which of them it is."""
        computing = work.flops / self.hardware.peak(work.compute) / self.now.compute if work.flops else 0.0
        reading = work.bytes / self.hardware.bandwidth / self.now.memory
        if computing >= reading:
            return computing, COMPUTE
        return reading, KV if work.kv_bytes > work.weight_bytes + work.activation_bytes + work.state_bytes else MEMORY

    def collective(self, work: Work) -> float:
        """What a device sends over its link, and the latency of messages that wait for each other."""
        link = self.hardware.link_bandwidth
        if link is None:
            raise ConfigError(f"{self.hardware.name} has no link to another device; tensor parallelism needs one")
        return work.activation_bytes / link + work.shape[1] * self.hardware.link_latency_s

    def linear(self, work: Work) -> float | None:
        """The product, and where they belong to the component the activation behind it or the preparation of its input."""
        per_weight, alone = self.per_weight(work, work.rows), self.per_weight(work, 1)
        if per_weight is None or alone is None:
            return None
        # One row waits for memory all the time, many hardly: of what neither hides the larger part shows.
        seconds = self.stretched(work.flops / (2 * work.rows) * per_weight, min(1.0, alone / per_weight) ** 2)
        _, inputs, activated = work.shape
        if activated:
            seconds += self.elements("activation", work.rows, activated) or 0.0
        elif work.component.endswith(("out", "head")):
            seconds += self.elements("input", work.rows, inputs) or 0.0
        return seconds

    def stretched(self, seconds: float, waiting: float) -> float:
        """As long as it takes at the speed of this moment. waiting: for memory, share of the seconds."""
        return seconds * (waiting / self.now.memory + (1 - waiting) / self.now.compute)

    def per_weight(self, work: Work, rows: int) -> float | None:
        kind, split = work.weight_type.upper(), False
        if work.component == "head" and product_name(kind, work.compute, COLS[0], True) in self.curves:
            split = True
        curves = [self.curves.get(product_name(kind, work.compute, cols, split)) for cols in COLS]
        if curves[0] is None or curves[1] is None or len(work.shape) < 3:
            return None
        # What a row of a tile costs beside its columns is spread over these: linear in 1 / columns.
        a, b = (1 / cols for cols in COLS)
        at = (1 / max(work.shape[1], 1) - b) / (a - b)
        low, high = (_by_rows(curve, rows) for curve in curves if curve is not None)
        return max(high + at * (low - high), 0.5 * high)

    def attention(self, work: Work) -> float | None:
        if len(work.shape) < 3 or not work.kv_bytes:
            return None
        heads, kv_heads, d = work.shape
        pairs, keys = work.useful / (4 * heads * d), work.kv_bytes / (2 * kv_heads * key_bytes(work.kv_type, d))
        size, group = min(HEADS, key=lambda h: (abs(h[0] - d) / d, abs(h[1] - heads / kv_heads)))
        if pairs / keys <= SPREAD_QUERIES:
            curve = self.curves.get(attention_name("decode", work.kv_type, size, group))
            if curve is None:
                return None
            start = self.curves.get(attention_name("start", work.kv_type, size, group))
            seconds = curve.at(keys / work.rows) * keys * kv_heads * d / size + (0.0 if start is None else start.at(1))
            return self.stretched(seconds, min(1.0, work.kv_bytes / self.hardware.bandwidth / seconds))
        curve = self.curves.get(attention_name("prefill", work.kv_type, size, group))
        return None if curve is None else self.stretched(curve.at(pairs / keys) * pairs * heads * d / size, 0.0)

    def elementwise(self, work: Work) -> float | None:
        names = ELEMENTWISE.get(work.component.rpartition(".")[2])
        if work.component == "sample" and self.hardware.calibrated:
            return 0.0                                     # the head finds the best tokens; "dispatch" has the rest
        if names is None or len(work.shape) != 2:
            return None
        width, norm = work.shape
        seconds = self.elements(names[norm], work.rows, width, work.kv_type)
        return None if seconds is None else seconds + self.hardware.barrier_s

    def elements(self, name: str, rows: int, width: int, kv_type: str = "") -> float | None:
        curve = self.curves.get(f"elementwise.{name}" + (f".{kv_type}" if kv_type else ""))
        if curve is None:
            return None
        threads = self.hardware.threads
        # Rows are shared out, but for those of heads and of activations, which are cut along their columns.
        busy = min(threads, rows) if name in ("norm", "residual", "residual_norm", "input") else threads
        return self.stretched(curve.at(rows * width) * rows * width / busy, 0.0)

    def step(self, works: list[Work]) -> Predicted | None:
        """What the engine and Python add to a pass: building the batch, calls, choosing, scheduling, committing."""
        curves = {name: self.curves.get(name) for name in ("pass", "step", "prefill.pass", "prefill.step")}
        rows = max((w.rows for w in works if w.component == "embed"), default=0)
        sequences = max((w.rows for w in works if w.component == "head"), default=0)
        if not rows or None in curves.values():
            return None

        def at(name: str, size: float) -> float:
            curve = curves[name]
            assert isinstance(curve, Curve)
            return curve.at(size)

        seconds = sum(at(name, max(sequences, 1)) for name in ("pass", "step"))
        if rows > 2 * max(sequences, 1):
            seconds += sum(at(f"prefill.{name}", rows) - at(name, 1) for name in ("pass", "step"))
        layer = self.curves.get("layer" if rows <= 2 * max(sequences, 1) else "prefill.layer")
        if layer is not None:                              # on torch each operation of a layer is a call
            seconds += len({w.layer for w in works} - {None}) * layer.at(max(sequences, 1) if layer.kernel == "layer" else rows)
        return Predicted(Work(None, DISPATCH, "overhead", rows, 0), self.stretched(max(seconds, 0.0), 0.0), OVERHEAD)
