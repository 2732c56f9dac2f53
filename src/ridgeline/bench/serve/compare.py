"""Two results side by side: which differences are more than chance."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.bench.serve import stats
from ridgeline.bench.serve.metrics import METRICS, Wanted, meets
from ridgeline.bench.serve.record import Record
from ridgeline.bench.serve.report import facts
from ridgeline.bench.serve.run import INTERRUPTED
from ridgeline.errors import ConfigError
from ridgeline.report.text import number, table

LEVEL = 0.99              # of the interval that must leave out "no difference"; some ten rows are read at once
LEAST = 10                # requests on either side
SLICES = 20               # of the window that throughput is told of
NONE_SHOWN = "no difference shown"
COMPARED = ("kind", "concurrency", "rate", "burstiness", "ramp_to")


@dataclass(frozen=True)
class Row:
    """statistic: mean or median; better: lower or higher."""

    name: str
    title: str
    statistic: str
    better: str
    unit: str


def compare(a: dict[str, Any], b: dict[str, Any], *, force: bool = False) -> dict[str, Any]:
    """{"differs", "a", "b", "cells": [{"load", "rows": [{"name", "a", "b", "ratio", "interval", "verdict"}]}]}

    raises ConfigError if the workloads differ and `force` is not set, or if no load is in both.
    """
    differs = differences(a, b)
    pairs = _pairs(a["cells"], b["cells"])
    if differs and not force:
        raise ConfigError(f"the workloads differ: {'; '.join(differs)}. --force compares them all the same")
    if not pairs:
        loads = [", ".join(cell["arrivals"]["name"] for cell in side["cells"]) for side in (a, b)]
        raise ConfigError(f"no load was measured in both: A has {loads[0]}; B has {loads[1]}")
    goodput = Wanted.of(a["wanted"]).goodput
    return {"differs": differs, "a": _side(a), "b": _side(b),
            "cells": [{"load": first["arrivals"]["name"], "grades": [first["grade"], second["grade"]],
                       "rows": _rows((first, second), goodput)} for first, second in pairs]}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What was asked differently, or under another load: "name: A's value, B's value"."""
    first, second = _flat(a["workload"]), _flat(b["workload"])
    if len(a["cells"]) == len(b["cells"]) == 1:
        first |= {k: a["cells"][0]["arrivals"].get(k) for k in COMPARED}
        second |= {k: b["cells"][0]["arrivals"].get(k) for k in COMPARED}
    if a["wanted"]["goodput_ms"] != b["wanted"]["goodput_ms"]:
        first["goodput"], second["goodput"] = a["wanted"]["goodput_ms"], b["wanted"]["goodput_ms"]
    return [f"{name} is {first.get(name)!r} in A and {second.get(name)!r} in B"
            for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]


def _flat(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in workload.items():
        found |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _pairs(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Cells under the same load; two runs of one load each are a pair in any case."""
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    loads = {tuple(cell["arrivals"].get(k) for k in COMPARED): cell for cell in second}
    keyed = [(cell, tuple(cell["arrivals"].get(k) for k in COMPARED)) for cell in first]
    return [(cell, loads[key]) for cell, key in keyed if key in loads]


def _side(result: dict[str, Any]) -> dict[str, str]:
    return dict(facts(result))


def _records(cell: dict[str, Any]) -> list[Record]:
    found = [Record.of(request) for request in cell["requests"]]
    return sorted((r for r in found if r.error_kind != INTERRUPTED), key=lambda r: r.scheduled)


def _rows(cells: Sequence[dict[str, Any]], goodput: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    a, b = map(_records, cells)
    rows = []
    for name in ("ttft", "sttft", "tpot", "itl", "e2el"):
        metric = METRICS[name]
        sides = [[(value * 1e3, i) for i, r in enumerate(side) if r.ok for value in metric.values(r)] for side in (a, b)]
        for statistic in ("median", "mean"):
            rows.append(_ratio(Row(f"{statistic}_{name}_ms", f"{statistic} {metric.title}", statistic, "lower", "ms"), *sides))
    rows.append(_ratio(Row("output_tokens_per_s", "output tokens/s", "mean", "higher", ""),
                       *(_throughput(cell, side) for cell, side in zip(cells, (a, b)))))
    shares: list[tuple[str, str, str, Callable[[Record], bool]]] = [("failed", "failed", "lower", lambda r: not r.ok)]
    if goodput:
        shares.append(("attainment", "attainment", "higher", lambda r: meets(r, goodput)))
    for name, title, better, test in shares:
        rows.append(_share(Row(name, title, "mean", better, "%"), [[100.0 * test(r) for r in side] for side in (a, b)]))
    return rows


Valued = Sequence[tuple[float, int]]


def _replicates(row: Row, sides: Sequence[Valued]) -> list[stats.Floats] | None:
    """Of both sides, independent of each other; None where one has too few requests."""
    found = []
    for seed, side in enumerate(sides, 1):
        requests = len({group for _, group in side})
        if requests < LEAST:
            return None
        # Neighbours share batches and queues: blocks of about sqrt(n) keep that in the resamples.
        drawn = stats.replicates([v for v, _ in side], row.statistic, [g for _, g in side], seed=seed,
                                 block=round(requests ** 0.5))
        assert drawn is not None
        found.append(drawn)
    return found


def _value(row: Row, side: Valued) -> float | None:
    import numpy as np

    values = [v for v, _ in side]
    return None if not values else float(np.median(values) if row.statistic == "median" else np.mean(values))


def _ratio(row: Row, *sides: Valued) -> dict[str, Any]:
    """B / A with its interval."""
    values, drawn = [_value(row, side) for side in sides], _replicates(row, sides)
    found = _row(row, "ratio", values)
    if values[0] and values[1] is not None:
        found["ratio"] = values[1] / values[0]
    if drawn is not None and drawn[0].min() > 0:
        low, high = stats.middle(drawn[1] / drawn[0], LEVEL)
        found |= {"interval": [low, high], "verdict": _verdict(row, low - 1, high - 1)}
    return found


def _share(row: Row, sides: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Percentages, B - A with its interval: a ratio would divide by none."""
    valued = [[(value, i) for i, value in enumerate(side)] for side in sides]
    values, drawn = [_value(row, side) for side in valued], _replicates(row, valued)
    found = _row(row, "difference", values)
    if drawn is not None:
        low, high = stats.middle(drawn[1] - drawn[0], LEVEL)
        found |= {"interval": [low, high], "verdict": _verdict(row, low, high)}
    return found


def _row(row: Row, kind: str, values: Sequence[float | None]) -> dict[str, Any]:
    return {"name": row.name, "title": row.title, "unit": row.unit, "a": values[0], "b": values[1], "kind": kind, "ratio": None,
            "interval": None, "verdict": f"fewer than {LEAST} samples on a side"}


def _throughput(cell: dict[str, Any], records: Sequence[Record]) -> Valued:
    """Output tokens/s in each of SLICES equal slices of the steady window, or of the whole run where there is none."""
    good = [r for r in records if r.ok]
    if not good:
        return []
    window = cell["summary"]["steady_window_s"] or (min(r.scheduled for r in good), max(r.times[-1] for r in good))
    width = (window[1] - window[0]) / SLICES
    if width <= 0:
        return []
    counts = [0] * SLICES
    for record in good:
        for time, tokens in zip(record.times, record.tokens):
            if window[0] < time <= window[1]:
                counts[min(SLICES - 1, int((time - window[0]) / width))] += tokens
    return [(count / width, i) for i, count in enumerate(counts)]


def _verdict(row: Row, low: float, high: float) -> str:
    if low <= 0 <= high:
        return NONE_SHOWN
    way = "lower" if high < 0 else "higher"
    return f"B is {way}: {'better' if way == row.better else 'worse'}"


def text(found: dict[str, Any]) -> str:
    """For a person at a terminal."""
    parts = [f"{name}  {found[key]['server']}; {found[key]['workload']}" for name, key in (("A", "a"), ("B", "b"))]
    if found["differs"]:
        parts.append("caution: the workloads differ: " + "; ".join(found["differs"]))
    blocks = ["\n".join(parts)]
    for cell in found["cells"]:
        rows = [["", "A", "B", "B / A", "99 % interval", ""]]
        for row in cell["rows"]:
            ratio = row["kind"] == "ratio"
            interval = " to ".join(f"{v:.3f}" if ratio else f"{v:+.1f} %" for v in row["interval"] or ()) or "-"
            unit = f" {row['unit']}" if row["unit"] else ""
            rows.append([row["title"], *(f"{number(row[side])}{unit}" for side in "ab"),
                         "-" if row["ratio"] is None else f"{row['ratio']:.3f}", interval, row["verdict"]])
        grades = "".join(f"\ncaution: {name} is graded {grade}: see its report" for name, grade in zip("AB", cell["grades"])
                         if grade == "invalid")
        blocks.append(f"{cell['load']}\n{table(rows)}{grades}")
    blocks.append(f"Interval: of B / A (shares: of B - A) by a block bootstrap over requests (tokens/s: over {SLICES} slices "
                  "of the steady window\nor the run), each run by itself. It knows nothing of what changes from run to run.")
    return "\n\n".join(blocks)
