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
LEAST_SHARE = 0.0005            # of the time: below it a component has no dot
LETTER, LINE = 5.6, 10.0        # units that a letter takes
PREDICTED, MEASURED, PEAK = 1, 0, 3                           # colours
SLOPES = (2, 5, 4, 3)           # of memory, and of caches from the slowest to the fastest
Box = tuple[float, float, float, float]


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
    shown = [p for p in points if p.intensity > 0 and (p.predicted or p.measured) and p.share >= LEAST_SHARE]
    speeds = [v for p in shown for v in (p.predicted, p.measured) if v]
    highest, memory = max(peaks.values()), min(bandwidths.values())
    x = Axis(min([p.intensity for p in shown], default=1.0) / 2, 2 * max([*(p.intensity for p in shown), highest / memory]),
             "FLOP/byte", log=True)
    y = Axis(min([*speeds, highest / 100]) / 2, 3 * max([*speeds, highest]), "FLOP/s", log=True)
    plot = Plot(title, x, y, height=HEIGHT)
    for colour, (name, bandwidth) in zip(SLOPES, sorted(bandwidths.items(), key=lambda item: item[1])):
        start, end = max(x.lowest, y.lowest / bandwidth), min(x.highest, highest / bandwidth)
        if end > start:
            plot.line([(start, start * bandwidth), (end, end * bandwidth)], colour=colour,
                      label=f"{name} {short(float(f'{bandwidth / 1e9:.3g}'))} GB/s")
    taken = [_around(plot, p.intensity, speed, _radius(p)) for p in shown for speed in (p.predicted, p.measured) if speed]
    for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        _peak(plot, f"{name} {short(float(f'{peak / 1e9:.3g}'))}G", peak, max(bandwidths.values()), taken)
    for kind, colour, hollow in (("predicted", PREDICTED, True), ("measured", MEASURED, False)):
        found = sorted((p for p in shown if getattr(p, kind)), key=lambda p: -p.share)
        plot.dots([(p.intensity, getattr(p, kind)) for p in found], colour=colour, hollow=hollow,
                  label=kind if found else "", sizes=[(_radius(p) / 4) ** 2 for p in found],
                  titles=[f"{p.number} {p.name}, {kind}: {short(getattr(p, kind))}FLOP/s at {p.intensity:.3g} FLOP/byte, "
                          f"{p.share:.1%} of the time" for p in found])
    _numbers(plot, shown, taken)
    return plot.svg()


def _around(plot: Plot, x: float, y: float, radius: float) -> Box:
    cx, cy = plot.at(x, y)
    return cx - radius, cy - radius, cx + radius, cy + radius


def _radius(point: Point) -> float:
    return max(SMALLEST, LARGEST * math.sqrt(point.share))


def _peak(plot: Plot, label: str, peak: float, fastest: float, taken: list[Box]) -> None:
    """A flat line from the fastest slope on, with its name where it hides no dot."""
    start = max(plot.x.lowest, peak / fastest)
    if start >= plot.x.highest or not plot.y.lowest <= peak <= plot.y.highest:
        return
    plot.line([(start, peak), (plot.x.highest, peak)], colour=PEAK, dashed=True)
    (left, cy), (right, _) = plot.at(start, peak), plot.at(plot.x.highest, peak)
    width = LETTER * len(label)
    for part in (1.0, 0.8, 0.6, 0.4, 0.2):
        for dy in (-3.0, 10.0):
            edge = max(left + width, left + part * (right - left))
            box = (edge - width, cy + dy - LINE + 2, edge, cy + dy + 1)
            if _free(box, taken, plot):
                taken.append(box)
                plot.parts.append(f'<text class="note" x="{edge - 1:.1f}" y="{cy + dy:.1f}" text-anchor="end">{label}</text>')
                return


def _numbers(plot: Plot, points: Sequence[Point], taken: list[Box]) -> None:
    """The number of each component on its measured dot (the predicted one, where there is none), or in a free place near it."""
    for point in sorted(points, key=lambda p: -p.share):
        speed = point.measured or point.predicted
        assert speed is not None
        cx, cy = plot.at(point.intensity, speed)
        text, reach = str(point.number), _radius(point) + 3
        width = LETTER * len(text) + 1
        if _radius(point) >= 8:
            plot.parts.append(f'<text class="note" x="{cx:.1f}" y="{cy + 4:.1f}" text-anchor="middle">{text}</text>')
            continue
        right, left, middle = cx + reach, cx - reach - width, cx - width / 2
        above, below, level = cy - reach, cy + reach + 8, cy + 4
        for at, base in ((right, level), (left, level), (middle, above), (middle, below), (right, above), (right, below),
                         (left, above), (left, below), (right + 8, level), (left - 8, level), (middle, above - 10),
                         (middle, below + 10)):
            box = (at, base - LINE + 2, at + width, base + 1)
            if _free(box, taken, plot):
                taken.append(box)
                plot.parts.append(f'<text class="note" x="{at:.1f}" y="{base:.1f}">{text}</text>')
                break


def _free(box: Box, taken: Sequence[Box], plot: Plot) -> bool:
    left, top, right, bottom = box
    inside = left >= LEFT - 2 and right <= WIDTH - RIGHT + 2 and top >= 18 and bottom <= plot.height
    return inside and all(right <= a or left >= c or bottom <= b or top >= d for a, b, c, d in taken)
