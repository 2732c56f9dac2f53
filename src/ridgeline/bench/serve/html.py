"""A run as one HTML file: the verdict, distributions, the course of the run, the load-latency curve, how to do it again."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ridgeline.bench.serve import report
from ridgeline.bench.serve.metrics import METRICS, SYMBOLS, Wanted, in_flight
from ridgeline.bench.serve.record import Record
from ridgeline.report import page
from ridgeline.report.svg import Axis, Plot, distribution

SHOWN = ("ttft", "tpot", "itl", "e2el")
BARS = 120                # requests that a Gantt chart shows apart: 160 units high
CURVES = 6                # loads that one chart tells apart by colour


def html(result: dict[str, Any]) -> str:
    """The whole page."""
    cells = result["cells"]
    several = len(cells) > 1
    parts = [page.heading("Load test", 1), page.paragraph(report.verdict(result), "verdict"),
             page.badges(report.remarks(result)), page.facts(report.facts(result))]
    records = [[Record.of(request) for request in cell["requests"]] for cell in cells]
    goodput = dict(Wanted.of(result["wanted"]).goodput)
    if several:
        parts += [page.heading("Load and latency"), page.charts(_curves(result, goodput)),
                  page.table(report.curve_rows(result))]
    curves = _distributions(cells, records, goodput)
    parts += [page.heading("Latency"), page.charts(curves)] if several else []
    for cell, found in zip(cells, records):
        course = [chart for chart in (_gantt(found), _levels(found)) if chart]
        title = cell["arrivals"]["name"]
        parts += [page.heading(title[0].upper() + title[1:]),
                  page.badges([(badge["grade"], badge["text"]) for badge in cell["badges"]]) if several else "",
                  page.charts(course if several else [*curves, *course]), page.table(report.latency_rows(cell)),
                  page.table([["", "", "formula"], *report.load_rows(cell)])]
    parts += [page.paragraph(SYMBOLS + ".", "soft"), page.heading("Again"), page.code(result["command"]),
              page.paragraph(f"Words of this run: --salt {result['salt']} (a server whose prefix cache still knows them "
                             "answers sooner).", "soft")]
    return page.page("Load test", parts)


def _distributions(cells: Sequence[dict[str, Any]], records: Sequence[Sequence[Record]],
                   goodput: dict[str, float]) -> list[str]:
    """One chart a metric, one line a load: the share of requests (ITL: of tokens) that took at most this long."""
    if len(cells) > CURVES:                # the lightest, the heaviest, and those between at equal steps
        kept = sorted({round(i * (len(cells) - 1) / (CURVES - 1)) for i in range(CURVES)})
        cells, records = [cells[i] for i in kept], [records[i] for i in kept]
    charts = []
    for name in SHOWN:
        metric = METRICS[name]
        values = [[v * 1e3 for r in found if r.ok for v in metric.values(r)] for found in records]
        pooled = [v for side in values for v in side]
        if not pooled:
            continue
        # Time at a log scale where it spans more than a factor of five.
        low, high = min(pooled), max(pooled)
        axis = Axis.over([*pooled, *([goodput[name] * 1e3] if name in goodput else [])], "ms", log=low > 0 and high > 5 * low,
                         zero=True)
        share = f"share of {'tokens' if name == 'itl' else 'requests'}"
        plot = Plot(f"{metric.title}: {metric.formula}", axis, Axis(0, 1, share))
        for i, (cell, side) in enumerate(zip(cells, values)):
            if side:
                plot.line([(min(side), 0.0), *distribution(side)], colour=i, step=True,
                          label=cell["arrivals"]["short"] if len(cells) > 1 else "")
        if name in goodput:
            plot.rule("objective", x=goodput[name] * 1e3)
        charts.append(plot.svg())
    return charts


def _gantt(records: Sequence[Record]) -> str:
    """A row a request in the order they were due: waiting to be sent, waiting for the first token, answering."""
    shown = sorted((r for r in records if r.sent is not None), key=lambda r: r.scheduled)
    step = -(-len(shown) // BARS) if shown else 1
    kept = shown[::step]
    if not kept:
        return ""
    title = "Requests" if step == 1 else f"Every {step}{'nd' if step == 2 else 'rd' if step == 3 else 'th'} request"
    plot = Plot(title, Axis.over([0.0, *(r.ended for r in kept)], "s"), Axis(0, len(shown), "requests, as they were due"))
    for row, record in zip(range(0, len(shown), step), kept):
        assert record.sent is not None
        low, high = row + 0.1 * step, row + 0.9 * step
        first = record.times[0] if record.times else record.ended
        spans = [(record.scheduled, record.sent, 4, "not sent yet"), (record.sent, first, 0, "before the first token")]
        spans.append((first, record.times[-1], 2, "answering") if record.ok else (first, record.ended, 1, "failed"))
        for start, end, colour, label in spans:
            if end - start > 0.002 * (plot.x.highest or 1) or label in ("answering", "failed"):
                plot.bar((start, end), (low, high), colour=colour, label=label, title=f"request {record.index}: {label}, "
                                                                                     f"{(end - start) * 1e3:.1f} ms")
    return plot.svg()


def _levels(records: Sequence[Record]) -> str:
    """How many requests wait for their first token, and how many are being answered, over time."""
    def first(record: Record) -> float | None:
        return record.times[0] if record.times else None

    def last(record: Record) -> float | None:
        return record.times[-1] if record.times else None

    spans: list[tuple[str, Callable[[Record], float | None], Callable[[Record], float | None], int]] = [
        ("waiting for the first token", lambda r: r.scheduled, lambda r: first(r) if r.times else r.ended, 0),
        ("being answered", first, last, 2)]
    lines = [(name, in_flight(records, start, end), colour) for name, start, end, colour in spans]
    points = [point for _, line, _ in lines for point in line]
    if not points:
        return ""
    plot = Plot("Waiting and running, as clients see it", Axis.over([0.0, *(t for t, _ in points)], "s"),
                Axis.over([n for _, n in points], "requests", zero=True))
    for name, line, colour in lines:
        if line:
            plot.line(line, colour=colour, label=name, step=True)
    return plot.svg()


def _curves(result: dict[str, Any], goodput: dict[str, float]) -> list[str]:
    """Latency over load, and throughput over load; saturated loads are hollow, the knee is named."""
    cells = result["cells"]
    loads = [cell["arrivals"].get("rate") or cell["arrivals"]["concurrency"] for cell in cells]
    axis = Axis.over(loads, "requests/s asked for" if cells[0]["arrivals"]["kind"] == "open" else "clients", zero=True)
    knee = (result["knee"] or {}).get("cell")
    charts = []
    for name in ("ttft", "tpot", "e2el"):
        lines = [(f"p{q}", [(load, value * 1e3) for load, cell in zip(loads, cells)
                            if (value := cell["summary"]["latencies"].get(name, {}).get("percentiles", {}).get(q)) is not None])
                 for q in ("50", "90", "99")]
        points = [y for _, line in lines for _, y in line]
        if points:
            latency = Axis.over(points, "ms", log=max(points) > 5 * min(points), zero=True)
            plot = Plot(f"{METRICS[name].title} over load", axis, latency)
            for colour, (label, line) in enumerate(lines):
                if line:
                    _curve(plot, line, cells, loads, colour, label)
            if name in goodput:
                plot.rule("objective", y=goodput[name] * 1e3)
            charts.append(_with_knee(plot, loads, knee))
    speeds = [(load, speed) for load, cell in zip(loads, cells)
              if (speed := cell["summary"]["output_tokens_per_s"]) is not None]
    if speeds:
        plot = Plot("Output tokens/s over load", axis, Axis.over([y for _, y in speeds], "tokens/s", zero=True))
        _curve(plot, speeds, cells, loads, 0, "")
        charts.append(_with_knee(plot, loads, knee))
    return charts


def _curve(plot: Plot, line: list[tuple[float, float]], cells: Sequence[dict[str, Any]], loads: Sequence[float], colour: int,
           label: str) -> None:
    saturated = {load for load, cell in zip(loads, cells) if cell["saturated"]}
    plot.line(line, colour=colour, label=label)
    plot.dots([p for p in line if p[0] not in saturated], colour=colour)
    plot.dots([p for p in line if p[0] in saturated], colour=colour, hollow=True)


def _with_knee(plot: Plot, loads: Sequence[float], knee: int | None) -> str:
    if knee is not None:
        plot.rule("knee", x=loads[knee])
    return plot.svg()
