"""The roofline of one stage: attainable operations a second over operations a byte, and where each component stands.

Both axes are logarithmic. A slope is a bandwidth (memory, and caches where they were measured), a flat line a peak of one
arithmetic. Each component has a hollow dot where it was predicted and a solid one where it was measured; the area is its
share of the stage's time. Dots carry the numbers of the table beside the chart. Source: Williams, Waterman and Patterson,
"Roofline" (CACM 52(4), 2009); with caches: Ilic, Pratas and Sousa (IEEE CAL 13(1), 2014).
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.report.svg import LEFT, RIGHT, WIDTH, Axis, Plot, short

HEIGHT = 300
LARGEST = 14.0                  # radius of a component that takes all of the time
SMALLEST = 2.2
LETTER, LINE = 6.2, 11.0        # units that a letter takes
PREDICTED, MEASURED, MEMORY, CACHE, PEAK = 1, 0, 2, 5, 3      # colours


@dataclass(frozen=True)
class Point:
    """A component: its number in the table, operations a byte, operations a second (None where unknown), share of the time."""

    number: int
    name: str
    intensity: float
    predicted: float | None
    measured: float | None
    share: float


def roofline(title: str, points: Sequence[Point], bandwidths: Mapping[str, float], peaks: Mapping[str, float]) -> str:
    """bandwidths: name -> bytes a second, main memory among them; peaks: arithmetic -> operations a second."""
    shown = [p for p in points if p.intensity > 0 and (p.predicted or p.measured)]
    speeds = [v for p in shown for v in (p.predicted, p.measured) if v]
    highest, memory = max(peaks.values()), min(bandwidths.values())
    ridge = highest / memory
    x = _decades([*(p.intensity for p in shown), ridge], "FLOP/byte")
    y = _decades([*speeds, highest, memory * x.lowest * 4], "FLOP/s")
    plot = Plot(title, x, y, height=HEIGHT)
    taken: list[tuple[float, float, float, float]] = []
    for name, bandwidth in sorted(bandwidths.items(), key=lambda item: item[1]):
        _slope(plot, f"{name} {short(bandwidth / 1e9)} GB/s", bandwidth, highest, MEMORY if bandwidth == memory else CACHE, taken)
    for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        _peak(plot, f"{name} {short(peak / 1e9)} G/s", peak, max(bandwidths.values()), taken)
    for kind, colour, hollow in (("predicted", PREDICTED, True), ("measured", MEASURED, False)):
        found = sorted((p for p in shown if getattr(p, kind)), key=lambda p: -p.share)
        plot.dots([(p.intensity, getattr(p, kind)) for p in found], colour=colour, hollow=hollow,
                  label=kind if found else "", sizes=[(_radius(p) / 4) ** 2 for p in found],
                  titles=[f"{p.number} {p.name}, {kind}: {short(getattr(p, kind))}FLOP/s at {p.intensity:.3g} FLOP/byte, "
                          f"{p.share:.1%} of the time" for p in found])
    _numbers(plot, shown, taken)
    return plot.svg()


def _radius(point: Point) -> float:
    return max(SMALLEST, LARGEST * math.sqrt(point.share))


def _decades(values: Sequence[float], label: str) -> Axis:
    """From half of the lowest value to twice the highest."""
    return Axis(min(values) / 2, max(values) * 2, label, log=True)


def _slope(plot: Plot, label: str, bandwidth: float, highest: float, colour: int,
           taken: list[tuple[float, float, float, float]]) -> None:
    """From where it enters the chart to the highest peak."""
    start, end = max(plot.x.lowest, plot.y.lowest / bandwidth), min(plot.x.highest, highest / bandwidth)
    if end <= start:
        return
    plot.line([(start, start * bandwidth), (end, end * bandwidth)], colour=colour)
    (ax, ay), (bx, by) = plot.at(start, start * bandwidth), plot.at(end, end * bandwidth)
    for part in (0.08, 0.3, 0.55):                 # along the line, above it
        cx, cy = ax + part * (bx - ax), ay + part * (by - ay) - 4
        if _free(box := (cx - LETTER * len(label) * 0.1, cy - LINE, cx + LETTER * len(label), cy + 1), taken, plot):
            taken.append(box)
            angle = math.degrees(math.atan2(by - ay, bx - ax))
            plot.parts.append(f'<text class="note" x="{cx:.1f}" y="{cy:.1f}" transform="rotate({angle:.1f} {cx:.1f} {cy:.1f})">'
                              f"{label}</text>")
            return


def _peak(plot: Plot, label: str, peak: float, fastest: float, taken: list[tuple[float, float, float, float]]) -> None:
    start = max(plot.x.lowest, peak / fastest)
    if start >= plot.x.highest or not plot.y.lowest <= peak <= plot.y.highest:
        return
    plot.line([(start, peak), (plot.x.highest, peak)], colour=PEAK, dashed=True)
    right, cy = plot.at(plot.x.highest, peak)
    for dy in (-4.0, 10.0):
        box = (right - LETTER * len(label), cy + dy - LINE + 2, right, cy + dy + 1)
        if _free(box, taken, plot):
            taken.append(box)
            plot.parts.append(f'<text class="note" x="{right - 2:.1f}" y="{cy + dy:.1f}" text-anchor="end">{label}</text>')
            return


def _numbers(plot: Plot, points: Sequence[Point], taken: list[tuple[float, float, float, float]]) -> None:
    """The number of each component beside its measured dot (predicted, where it was not measured), where there is room."""
    for point in sorted(points, key=lambda p: -p.share):
        speed = point.measured or point.predicted
        assert speed is not None
        cx, cy = plot.at(point.intensity, speed)
        text, reach = str(point.number), _radius(point) + 3
        width = LETTER * len(text)
        if _radius(point) >= 8:
            places = [(cx - width / 2, cy + 4)]
        else:
            places = [(cx + reach, cy + 4), (cx - reach - width, cy + 4), (cx - width / 2, cy - reach), (cx - width / 2, cy + reach + 8),
                      (cx + reach, cy - reach), (cx + reach, cy + reach + 8), (cx - reach - width, cy - reach),
                      (cx - reach - width, cy + reach + 8), (cx + 2.2 * reach, cy + 4), (cx - 2.2 * reach - width, cy + 4)]
        for left, base in places:
            box = (left, base - LINE + 2, left + width, base + 1)
            if _free(box, taken, plot):
                taken.append(box)
                plot.parts.append(f'<text class="note" x="{left:.1f}" y="{base:.1f}">{text}</text>')
                break


def _free(box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]], plot: Plot) -> bool:
    left, top, right, bottom = box
    inside = left >= LEFT - 2 and right <= WIDTH - RIGHT + 2 and top >= 18 and bottom <= plot.height
    return inside and all(right <= a or left >= c or bottom <= b or top >= d for a, b, c, d in taken)
