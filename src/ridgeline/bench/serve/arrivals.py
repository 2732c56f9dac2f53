"""When requests are sent: a closed loop of clients, or an open loop on deadlines that no answer can move."""
from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ridgeline.errors import ConfigError

CLOSED, OPEN, TRACE = "closed", "open", "trace"


@dataclass(frozen=True)
class Arrivals:
    """kind: CLOSED (concurrency clients, each with one request at a time), OPEN (rate requests a second) or TRACE.

    burstiness: shape of the gamma distribution of gaps: 1 is Poisson, below 1 burstier, inf constant gaps.
    ramp_to: the rate grows linearly from rate to this. concurrency with OPEN or TRACE: a cap; waiting for it counts.
    stagger: seconds over which the clients of a closed loop start; None: about one request's time, from the warm-up.
    """

    kind: str
    rate: float | None = None
    burstiness: float = 1.0
    ramp_to: float | None = None
    concurrency: int | None = None
    stagger: float | None = None

    @property
    def short(self) -> str:
        if self.kind == CLOSED:
            return f"{self.concurrency} client{'s' if self.concurrency != 1 else ''}"
        if self.kind == TRACE:
            return "trace times"
        ramp = f" to {self.ramp_to:.4g}" if self.ramp_to is not None else ""
        return f"{self.rate:.4g}{ramp} requests/s"

    @property
    def name(self) -> str:
        shape = {1.0: ", Poisson", math.inf: ", constant"}.get(self.burstiness, f", gamma {self.burstiness:g}")
        cap = f", at most {self.concurrency} at once" if self.concurrency else ""
        return self.short + (shape if self.kind == OPEN else "") + (cap if self.kind != CLOSED else "")

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.kind, "name": self.name, "short": self.short, "concurrency": self.concurrency}
        if self.kind == CLOSED:
            return {**found, "stagger_s": self.stagger}
        burstiness = "constant" if math.isinf(self.burstiness) else self.burstiness
        return {**found, "rate": self.rate, "burstiness": burstiness, "ramp_to": self.ramp_to}

    @property
    def load(self) -> float:
        """The place on the axis of a load-latency curve: clients, or requests a second."""
        return float((self.concurrency if self.kind == CLOSED else self.rate) or 0)

    def deadlines(self, count: int, seed: int) -> list[float]:
        """Seconds after the start at which each of `count` requests is due: (count,), rising. OPEN only.

        Gaps are drawn, scaled to a mean of exactly 1 (60 Poisson arrivals would else miss their rate by 13 %), and mapped to
        times by the inverse of the expected number of arrivals up to t: `rate t`, or with a ramp over T seconds
        `rate t + (ramp_to - rate) t^2 / 2T`, with T such that `count` are expected in it.
        """
        assert self.kind == OPEN and self.rate is not None
        draw, constant = random.Random(f"{seed}/arrivals"), math.isinf(self.burstiness)
        gaps = [1.0 if constant else draw.gammavariate(self.burstiness, 1 / self.burstiness) for _ in range(count - 1)]
        scale = len(gaps) / total if (total := sum(gaps)) > 0 else 1.0
        return [self._time(expected * scale, count) for expected in accumulate(gaps, initial=0.0)]

    def _time(self, expected: float, count: int) -> float:
        assert self.rate is not None
        if self.ramp_to is None or self.ramp_to == self.rate:
            return expected / self.rate
        span = 2 * count / (self.rate + self.ramp_to)
        curve = (self.ramp_to - self.rate) / (2 * span)
        return (math.sqrt(self.rate * self.rate + 4 * curve * expected) - self.rate) / (2 * curve)


def parse_ramp(text: str) -> tuple[float, float]:
    """FROM:TO in requests a second. raises ConfigError."""
    first, _, last = text.partition(":")
    try:
        found = float(first), float(last)
    except ValueError:
        found = 0.0, 0.0
    if not all(math.isfinite(rate) and rate > 0 for rate in found):
        raise ConfigError(f"--ramp is {text!r}; it must be FROM:TO, two rates above 0 in requests a second, as 1:8")
    return found
