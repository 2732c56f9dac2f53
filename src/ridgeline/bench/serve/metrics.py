"""Numbers of a cell, each with the formula that it is shown with."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.bench.serve import stats
from ridgeline.bench.serve.arrivals import CLOSED
from ridgeline.bench.serve.record import CHUNKS, Record
from ridgeline.bench.serve.run import INTERRUPTED, Cell
from ridgeline.errors import ConfigError

ATTAINED = 0.9            # share of requests within their objectives that a load must reach to count as carried
STEADY_SHARE = 0.2        # of the run that the steady window must last to be told


@dataclass(frozen=True)
class Metric:
    """values: of one request that was answered: none, one, or (over tokens) many."""

    name: str
    title: str
    formula: str
    values: Callable[[Record], Sequence[float]]


def _tpot(record: Record) -> Sequence[float]:
    return () if record.tpot is None else (record.tpot,)


METRICS = {metric.name: metric for metric in (
    Metric("ttft", "TTFT", "t1 - t_sched", lambda r: (r.ttft,)),
    Metric("sttft", "service TTFT", "t1 - t_send", lambda r: (r.service_ttft,)),
    Metric("tpot", "TPOT", "(tN - t1) / (n - n1)", _tpot),
    Metric("itl", "ITL", "gap D / k for each of a chunk's k tokens", Record.token_gaps),
    Metric("icl", "chunk gap", "gap between chunks", Record.chunk_gaps),
    Metric("e2el", "E2E", "tN - t_sched", lambda r: (r.e2el,)),
)}
DEFAULT_METRICS = ("ttft", "sttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "sttft", "tpot", "e2el")
SYMBOLS = ("t_sched: due (closed loop: its client was free); t_send: sent; t1, tN: first and last chunk with a token, in any "
           "channel; n, n1: tokens, and those of the first chunk")


@dataclass(frozen=True)
class Wanted:
    """names: of METRICS; percentiles: 0 to 100; goodput: objective -> seconds."""

    names: tuple[str, ...] = DEFAULT_METRICS
    percentiles: tuple[float, ...] = (50, 90, 95, 99)
    goodput: tuple[tuple[str, float], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"metrics": list(self.names), "percentiles": list(self.percentiles),
                "goodput_ms": {name: limit * 1e3 for name, limit in self.goodput}}

    @classmethod
    def of(cls, found: dict[str, Any]) -> Wanted:
        return cls(tuple(found["metrics"]), tuple(found["percentiles"]),
                   tuple((name, limit / 1e3) for name, limit in found["goodput_ms"].items()))


def parse_goodput(parts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """`ttft:500 tpot:50`, milliseconds -> ((name, seconds), ...). raises ConfigError."""
    found = {}
    for part in parts:
        name, _, limit = part.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if name not in OBJECTIVES or not value > 0:
            raise ConfigError(f"--goodput names {part!r}; it must be NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)} "
                              "and a limit above 0")
        found[name] = value / 1e3
    return tuple(found.items())


def meets(record: Record, goodput: Sequence[tuple[str, float]]) -> bool:
    """Whether a request is within every objective. One that failed is not; a TPOT that does not exist is met."""
    return record.ok and all(value <= limit for name, limit in goodput for value in METRICS[name].values(record))


def summarise(cell: Cell, wanted: Wanted) -> dict[str, Any]:
    """All numbers of a cell, times in seconds; what cannot be told is None."""
    counted = [r for r in cell.records if r.error_kind != INTERRUPTED]
    good = [r for r in counted if r.ok]
    errors: dict[str, int] = {}
    for record in counted:
        if record.error_kind is not None:
            errors[record.error_kind] = errors.get(record.error_kind, 0) + 1
    start = min((r.scheduled for r in counted), default=0.0)
    # An error after the last token is part of the run: goodput counts it as a request that was not served.
    end = max((r.times[-1] for r in good), default=None)
    duration = end - start if end is not None and end > start else None
    tokens, prompts = sum(r.completion_tokens for r in good), [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    window = steady(cell, good)
    found: dict[str, Any] = {
        "completed": len(good), "failed": len(counted) - len(good), "errors": errors,
        "first_error": next((r.error for r in counted if r.error), None),
        "interrupted": len(cell.records) - len(counted), "not_sent": cell.requested - len(cell.records),
        "duration_s": duration, "output_tokens": tokens,
        "prompt_tokens": sum(prompts) if len(prompts) == len(good) and good else None,
        "requests_per_s": _per(len(good), duration), "output_tokens_per_s": _per(tokens, duration),
        "total_tokens_per_s": _per(tokens + sum(prompts), duration) if len(prompts) == len(good) else None,
        "steady_window_s": None if window is None else list(window),
        "steady_output_tokens_per_s": None if window is None else _within(good, *window) / (window[1] - window[0]),
        "peak_concurrency": max((n for _, n in in_flight(cell.records)), default=0),
        "mean_concurrency": _per(sum(r.ended - (r.sent or r.ended) for r in counted), duration),
        "prefix_hit_rate": hit_rate(cell, good),
        "tokens_counted": "usage" if good and all(r.counted != CHUNKS for r in good) else "chunks",
        "latencies": {name: _latency(METRICS[name], good, wanted.percentiles) for name in wanted.names},
        "client": _client(cell),
    }
    if wanted.goodput:
        within = sum(meets(r, wanted.goodput) for r in counted)
        found["goodput_requests_per_s"] = _per(within, duration)
        found["attainment"] = within / len(counted) if counted else None
        found["attainment_by_objective"] = {
            name: sum(meets(r, [(name, limit)]) for r in counted) / max(1, len(counted)) for name, limit in wanted.goodput}
    return found


def _per(amount: float, duration: float | None) -> float | None:
    return amount / duration if duration else None


def _latency(metric: Metric, good: Sequence[Record], percentiles: Sequence[float]) -> dict[str, Any]:
    pairs = [(value, r.index) for r in good for value in metric.values(r)]
    values, groups = [v for v, _ in pairs], [g for _, g in pairs]
    return {
        "count": len(values), "mean": sum(values) / len(values) if values else None,
        "mean_interval": stats.interval(values, "mean", groups), "median_interval": stats.interval(values, "median", groups),
        "percentiles": {f"{q:g}": stats.percentile(values, q) for q in percentiles},
        "lowest": min(values, default=None), "highest": max(values, default=None)}


def _client(cell: Cell) -> dict[str, float | None]:
    """How late this program itself was; the worst stands for a percentile that too few samples tell of."""
    late = [r.lateness for r in cell.records]

    def p99(values: Sequence[float]) -> float | None:
        return stats.percentile(values, 99) if stats.enough(99, len(values)) else max(values, default=None)

    return {"send_lateness_p99_s": p99(late), "wakeup_lateness_p99_s": p99(cell.wakeups),
            "wakeup_lateness_max_s": max(cell.wakeups, default=None)}


def hit_rate(cell: Cell, good: Sequence[Record]) -> float | None:
    """Share of prompt tokens that came from the server's prefix cache: by the usage of each answer, else by its counters."""
    cached = [(r.cached_tokens, r.prompt_tokens) for r in good if r.cached_tokens is not None and r.prompt_tokens]
    if cached and len(cached) == len(good):
        return sum(c for c, _ in cached) / sum(p for _, p in cached)
    if cell.hits is not None and cell.hits[1] > 0:
        return cell.hits[0] / cell.hits[1]
    return None


def in_flight(records: Sequence[Record], first: Callable[[Record], float | None] = lambda r: r.sent,
              last: Callable[[Record], float | None] = lambda r: r.ended) -> list[tuple[float, int]]:
    """[(time, how many from then on)] of the spans first(r) to last(r); records without either are left out."""
    events: list[tuple[float, int]] = []
    for record in records:
        start, end = first(record), last(record)
        if start is not None and end is not None and end >= start:
            events += [(start, 1), (end, -1)]
    found, now = [], 0
    for time, change in sorted(events):
        now += change
        found.append((time, now))
    return found


def steady(cell: Cell, good: Sequence[Record]) -> tuple[float, float] | None:
    """The window in which the load is what was asked for; None if it is too short a part of the run.

    Closed loop: from the last client's first request to the first client's last answer. Open loop: from one median request
    after the first arrival to the last arrival.
    """
    if len(good) < 2:
        return None
    if cell.arrivals.kind == CLOSED:
        levels = in_flight(cell.records)
        full = max(n for _, n in levels)
        start = next(time for time, n in levels if n == full)
        end = next(time for time, n in reversed(levels) if n >= full - 1)
        # A client is without a request for the moment between two: the last time all were busy is the end.
        busy = [time for time, n in levels if n == full]
        end = min(end, next((time for time, n in levels if time > busy[-1] and n < full), end))
    else:
        lengths = sorted(r.e2el for r in good)
        start = min(r.scheduled for r in good) + lengths[len(lengths) // 2]
        end = max(r.scheduled for r in good)
    whole = max(r.times[-1] for r in good) - min(r.scheduled for r in good)
    return (start, end) if whole > 0 and end - start >= STEADY_SHARE * whole else None


def _within(good: Sequence[Record], start: float, end: float) -> int:
    return sum(tokens for r in good for time, tokens in zip(r.times, r.tokens) if start < time <= end)


def served_share(records: Sequence[Record]) -> float | None:
    """Rate of answers / rate of arrivals, each from its first to its last: below 1 where a queue grows. Open loop only."""
    good = [r for r in records if r.ok]
    if len(good) < 3:
        return None
    due, ended = sorted(r.scheduled for r in good), sorted(r.times[-1] for r in good)
    arrivals, answers = due[-1] - due[0], ended[-1] - ended[0]
    return min(1.0, arrivals / answers) if answers > 0 else 1.0
