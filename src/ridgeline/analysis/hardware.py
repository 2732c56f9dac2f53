"""What a machine can do, as a prediction needs it: from data sheets for machines one does not have, measured for this one."""
from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ridgeline.errors import ConfigError

# Where a machine has no units for an arithmetic, its operations run in the next wider one.
WIDER = {"int4": "int8", "fp4": "fp8", "int8": "bfloat16", "fp8": "bfloat16", "float16": "bfloat16", "bfloat16": "float32",
         "tf32": "float32", "float32": "float64"}


@dataclass(frozen=True)
class Level:
    """Reads of data that fits one level: capacity in bytes (of all threads together), read by `threads` threads at
    `bandwidth` bytes a second in all. name: "L1", "L2", "L3" or "memory"."""

    name: str
    capacity: int
    threads: int
    bandwidth: float


@dataclass(frozen=True)
class Curve:
    """A measured cost over a size: points (size, cost), sizes ascending. `kernel` names what was measured and on what, as
    "product.Q8_0.int8"; `unit` says what the numbers are."""

    kernel: str
    unit: str
    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """Between two points a straight line in the logarithms of both; beyond the ends the end's value."""
        points = self.points
        if size <= points[0][0]:
            return points[0][1]
        for (a, low), (b, high) in itertools.pairwise(points):
            if size <= b:
                part = math.log(size / a) / math.log(b / a)
                return math.exp(math.log(low) + part * (math.log(high) - math.log(low))) if low > 0 < high else high
        return points[-1][1]


@dataclass(frozen=True)
class Speed:
    """How fast a machine is at a moment, as shares of what it was when it was calibrated: of what waits for memory, and of
    what computes. On a shared machine both move within minutes."""

    memory: float = 1.0
    compute: float = 1.0


@dataclass(frozen=True)
class Hardware:
    """One machine, or one device of it.

    bandwidth: bytes a second that all its cores read from main memory; peaks: operations a second (2 a multiply-add, dense)
    by arithmetic ("int8", "bfloat16", "float32", ...); dispatch_s: from one call to the next; barrier_s: one meeting of all
    threads; link_bandwidth and link_latency_s: to another device, one way, for collectives; price_per_hour in US dollars;
    sources: for each field where its value is from, "measured" or a page; load: the machine's load average before it was
    measured; levels and curves are measured, and empty for a machine from the table.
    """

    name: str
    bandwidth: float
    peaks: Mapping[str, float]
    memory_bytes: int
    device: str = "cpu"                  # cpu | gpu
    threads: int = 1                     # that compute together
    instruction_set: str | None = None   # of the native kernels; None: the torch backend, or not this machine
    dispatch_s: float = 0.0
    barrier_s: float = 0.0
    link_bandwidth: float | None = None
    link_latency_s: float = 0.0
    price_per_hour: float | None = None
    fingerprint: str = ""
    load: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    levels: tuple[Level, ...] = ()
    curves: tuple[Curve, ...] = ()

    @property
    def calibrated(self) -> bool:
        return bool(self.curves)

    def peak(self, compute: str) -> float:
        """Operations a second in this arithmetic, or in the next wider one that the machine has.

        raises ConfigError for an arithmetic that is not known.
        """
        wanted: str | None = compute
        while wanted is not None:
            if wanted in self.peaks:
                return self.peaks[wanted]
            wanted = WIDER.get(wanted)
        raise ConfigError(f"{self.name} has no peak for {compute!r} arithmetic; it has {', '.join(sorted(self.peaks))}")

    def ridge(self, compute: str) -> float:
        """Operations a byte from which on computing takes longer than reading."""
        return self.peak(compute) / self.bandwidth

    def curve(self, kernel: str) -> Curve | None:
        return next((c for c in self.curves if c.kernel == kernel), None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Hardware:
        """raises ConfigError where fields are missing or unknown."""
        try:
            values = {**found, "levels": tuple(Level(**level) for level in found.get("levels", ())),
                      "curves": tuple(Curve(c["kernel"], c["unit"], _points(c["points"])) for c in found.get("curves", ()))}
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            known = ", ".join(f.name for f in fields(cls))
            raise ConfigError(f"this is no description of a machine: {error}; its fields are {known}") from error


def _points(found: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(size), float(cost)) for size, cost in found)


def dumps(hardware: Hardware) -> str:
    return json.dumps(hardware.as_json(), indent=1)
