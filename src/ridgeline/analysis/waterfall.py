"""Where the wall time of a step and of a request goes, from stamps: parts that add up, and what is left without a name.

Every part is measured by itself. The residual is the measured wall time less their sum, so it shows what no stamp covers;
nothing is defined to make it vanish.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ridgeline.analysis.stamps import Span
from ridgeline.types import RequestMetrics

# Spans of the engine's functions -> the part that their own time is.
PART_OF = {"schedule": "dispatch", "commit": "dispatch", "place": "dispatch", "execute": "dispatch", "forward": "dispatch",
           "choose": "sampling", "sample": "sampling", "detokenise": "detokenise", "tokenise": "tokenise"}
MOST_RESIDUAL = 0.05           # of the wall time: above it, the waterfall is not to be trusted
KEPT = 0.5                     # of the steps, those in the middle by their time: what interrupts a few is left out


@dataclass(frozen=True)
class Waterfall:
    """parts: name -> seconds, in order; wall_s: measured by itself."""

    parts: Mapping[str, float]
    wall_s: float

    @property
    def residual_s(self) -> float:
        return self.wall_s - sum(self.parts.values())

    @property
    def residual_share(self) -> float:
        return self.residual_s / self.wall_s if self.wall_s else 0.0

    def as_json(self) -> dict[str, Any]:
        return {"parts": dict(self.parts), "wall_s": self.wall_s, "residual_share": self.residual_share}


def of_steps(spans: Sequence[Span], steps: Sequence[int]) -> Waterfall:
    """The mean of some engine steps (their numbers), by component: those whose time is in the middle half."""
    walls = {s.step: s.duration_ns for s in spans if s.name == "engine" and s.step in set(steps)}
    order = sorted(walls, key=lambda step: walls[step])
    cut = int(len(order) * (1 - KEPT) / 2)
    kept = set(order[cut:len(order) - cut])
    parts: dict[str, float] = {}
    for span in spans:
        if span.step in kept and span.name not in ("engine", "step", "detokenise"):
            name = span.name if span.component and span.name != "sample" else PART_OF[span.name]
            parts[name] = parts.get(name, 0.0) + span.own_ns / 1e9 / len(kept)
    wall = sum(walls[step] for step in kept) / 1e9 / len(kept) if kept else 0.0
    return Waterfall(_ordered(parts), wall)


def of_request(spans: Sequence[Span], metrics: RequestMetrics) -> Waterfall:
    """From a request's arrival to the end of the step that finished it. Steps that it shares count whole: it waits for them.

    queue: from its tokenised prompt to when it was first scheduled; prefill: components of the steps up to its first token;
    decode, by component: of those behind; idle: between steps, when nothing ran.
    """
    assert metrics.scheduled is not None and metrics.first_token is not None and metrics.finished is not None
    arrival, scheduled, first = (round(t * 1e9) for t in (metrics.arrival, metrics.scheduled, metrics.first_token))
    own = next((s for s in spans if s.name == "tokenise" and s.start_ns <= arrival + 1000 <= s.end_ns), None)
    ready = arrival if own is None else own.end_ns
    steps = [s for s in spans if s.name == "step"]
    served = [s for s in steps if s.end_ns > scheduled and s.start_ns <= round(metrics.finished * 1e9)]
    numbers = {s.step: s for s in served}
    parts = {"queue": max(0, served[0].start_ns - ready) / 1e9, "tokenise": (ready - arrival) / 1e9, "prefill": 0.0}
    for span in spans:
        step = numbers.get(span.step)
        if step is None or span.name in ("engine", "step"):
            continue
        name = PART_OF.get(span.name, "")
        if not name:
            name = "prefill" if span.start_ns < first else f"decode: {span.name}"
        parts[name] = parts.get(name, 0.0) + span.own_ns / 1e9
    parts["idle"] = sum(max(0, after.start_ns - before.end_ns) for before, after in pairwise(served)) / 1e9
    return Waterfall(_ordered(parts), (served[-1].end_ns - arrival) / 1e9)


ORDER = ("queue", "tokenise", "prefill")
LAST = ("sampling", "detokenise", "dispatch", "idle")


def _ordered(parts: Mapping[str, float]) -> dict[str, float]:
    """What comes first in a request first; components from the longest to the shortest; the rest behind."""
    inner = sorted((n for n in parts if n not in ORDER and n not in LAST), key=lambda n: -parts[n])
    return {name: parts[name] for name in (*ORDER, *inner, *LAST) if name in parts}
