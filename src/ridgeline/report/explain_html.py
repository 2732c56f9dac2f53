"""What `ridgeline explain` found, as one HTML file: verdict, rooflines, waterfalls, sweeps, levers, how to do it again."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.report import explain_rows as rows
from ridgeline.report import page
from ridgeline.report.bars import waterfall
from ridgeline.report.explain_text import NOTE
from ridgeline.report.roofline import Point, roofline
from ridgeline.report.svg import Axis, Plot

LEAST_SHARE = 0.004            # of the wall time, of parts that have a bar of their own
COLOURS = {"queue": 4, "tokenise": 4, "prefill": 0, "sampling": 3, "detokenise": 4, "dispatch": 1, "idle": 4, "no name": 5}
SWEEPS = (("ttft_s", "measured_ttft_s", "TTFT of one prompt alone", "ms", 1e3),
          ("itl_s", "measured_itl_s", "ITL", "ms", 1e3),
          ("tokens_per_s", "measured_tokens_per_s", "Decoding, all sequences", "tokens/s", 1.0),
          ("memory_bytes", "", "Memory: weights and cache", "GB", 1e-9))


def html(result: Mapping[str, Any]) -> str:
    """The whole page."""
    title = f"Explain: {result['model']['name']}"
    parts = [page.heading(title, 1), page.paragraph(result["verdict"], "verdict"), page.badges(rows.badge_pairs(result)),
             page.facts(rows.facts(result)),
             page.heading("Rooflines"), page.charts([_roofline(result, one) for one in result["stages"]]),
             page.table(rows.stage_rows(result), text=())]
    for one in result["stages"]:
        name = f"{one['stage'].capitalize()}, by component"
        parts += [page.heading(name, 3), page.table(rows.component_rows(one), text=(), left=(1,))]
    parts.append(page.paragraph(f"{NOTE} Numbers beside the dots are those of the tables; the area of a dot is its share of "
                                "the time.", "soft"))
    if falls := _waterfalls(result):
        parts += [page.heading("Where the time goes"), page.charts(falls)]
    parts += [page.heading("Where things turn"), page.facts(rows.limit_rows(result))]
    for key in ("batch", "context"):
        fixed = "context" if key == "batch" else "batch"
        parts += [page.heading(f"Over {key}, at {fixed} {result['settings'][fixed]:,}"), page.charts(_sweep(result, key)),
                  page.table(rows.sweep_rows(result, key), text=())]
    parts += [page.heading("Levers"), page.table(rows.advice_rows(result), text=(0, 6, 7)), page.heading("Again"),
              page.code(rows.reproduce(result))]
    return page.page(title, parts)


def _roofline(result: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    hardware = result["hardware"]
    bandwidths = {"memory": hardware["bandwidth"]}
    bandwidths |= {level["name"]: level["bandwidth"] for level in hardware["levels"]
                   if level["threads"] == hardware["threads"] and level["bandwidth"] > hardware["bandwidth"]}
    used = {one["compute"] for one in stage["components"] if one["compute"]} & set(hardware["peaks"])
    points = [Point(index, one["component"], one["intensity"], _speed(one["flops"], one["predicted_s"]),
                    _speed(one["flops"], one["measured_s"]), max(0.0, one["share_of_time"]))
              for index, one in enumerate(stage["components"], 1) if one["flops"]]
    name = (f"Prefill of {stage['tokens']:,} tokens" if stage["stage"] == "prefill" else
            f"Decode, batch {stage['batch']}, context {stage['context']:,}")
    peaks = {name: peak for name, peak in hardware["peaks"].items() if name in used} or dict(hardware["peaks"])
    return roofline(name, points, bandwidths, peaks)


def _speed(flops: int, seconds: float | None) -> float | None:
    return flops / seconds if seconds else None


def _waterfalls(result: Mapping[str, Any]) -> list[str]:
    falls = {"A request": result["waterfall"], **{f"A step of {k}": v for k, v in result["step_waterfalls"].items()}}
    charts = []
    for name, fall in falls.items():
        if fall is None:
            continue
        wall = fall["wall_s"]
        large = [(part, s) for part, s in fall["parts"].items() if s >= LEAST_SHARE * wall]
        small = sum(s for _, s in fall["parts"].items() if s < LEAST_SHARE * wall)
        parts = [*large, *([("smaller parts", small)] if small else []), ("no name", fall["residual_share"] * wall)]
        charts.append(waterfall(name, [(part, s, COLOURS.get(part, 2)) for part, s in parts], wall))
    return charts


def _sweep(result: Mapping[str, Any], key: str) -> list[str]:
    found: Sequence[Mapping[str, Any]] = result["sweeps"][key]
    x = Axis.over([row[key] for row in found], f"{key}, {'sequences' if key == 'batch' else 'tokens'}", log=True)
    charts = []
    for field, measured, title, unit, scale in SWEEPS:
        if field == "ttft_s" and key == "batch":
            continue                                   # of a prompt alone: the same for every batch
        line = [(float(row[key]), row[field] * scale) for row in found if row[field]]
        dots = [(float(row[key]), row[measured] * scale) for row in found if measured and row[measured]]
        if not line:
            continue
        values = [y for _, y in (*line, *dots)]
        plot = Plot(title, x, Axis.over(values, unit, log=max(values) > 5 * min(values), zero=True))
        plot.line(line, colour=1, dashed=True, label="predicted")
        plot.dots(line, colour=1, hollow=True)
        if dots:
            plot.dots(dots, colour=0, label="measured")
        if field == "memory_bytes":
            plot.rule("memory of the machine", y=result["memory"]["available"] * scale)
        for name, value in _turns(result, key, field):
            plot.rule(name, x=value)
        charts.append(plot.svg())
    return charts


def _turns(result: Mapping[str, Any], key: str, field: str) -> list[tuple[str, float]]:
    limits = result["limits"]
    if key == "batch" and field == "tokens_per_s" and limits["batch_stops"]:
        return [("stops helping", float(limits["batch_stops"]))]
    if key == "context" and field == "itl_s" and limits["kv_overtakes_context"]:
        return [("KV = weights", float(limits["kv_overtakes_context"]))]
    return []
