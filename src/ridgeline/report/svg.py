"""Charts as SVG text: linear and logarithmic axes, lines, steps, dots, bars, rules.

    plot = Plot("Time to first token", Axis.over(times, "ms", log=True), Axis(0, 1, "share"))
    plot.line([(12.0, 0.0), (15.0, 1.0)], colour=0, label="16 clients")
    html = plot.svg()

Colours are classes (`c0` ... `c5`), so that the page decides on them and dark mode needs no second drawing. A chart is drawn
400 units wide: it is readable at 350 to 600 pixels, and a page lays several side by side.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 28, 42
COLOURS = 6
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """From lowest to highest, both shown; label names the quantity and its unit. A logarithmic axis begins above 0."""

    lowest: float
    highest: float
    label: str = ""
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], label: str = "", *, log: bool = False, zero: bool = False) -> Axis:
        """Wide enough for all finite values (log: those above 0), with ends on ticks or nearly so; zero: begins at 0."""
        found = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        low, high = min(found, default=0.0), max(found, default=1.0)
        if log:
            low, high = (low, high) if high > 0 and low > 0 else (1.0, 10.0)
            # At least a factor of 1.5, so that values that are all alike do not fill the chart with their noise.
            if high < 1.5 * low:
                low, high = low / 1.25, high * 1.25
            return cls(low / 1.05, high * 1.05, label, True)
        low = min(0.0, low) if zero else low
        if high - low <= 1e-9 * max(abs(low), abs(high)):          # all alike, but for rounding
            high = low + (abs(low) or 1.0)
        step = _step(high - low, 5)
        return cls(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, label)

    def place(self, value: float) -> float:
        """0 at the lowest, 1 at the highest; what lies beyond is put on the edge."""
        if self.log:
            value = max(value, self.lowest)
            share = math.log(value / self.lowest) / math.log(self.highest / self.lowest)
        else:
            share = (value - self.lowest) / (self.highest - self.lowest)
        return min(1.0, max(0.0, share))

    def ticks(self, most: int = 6) -> list[float]:
        """Round values, at most about `most`."""
        if not self.log:
            step = _step(self.highest - self.lowest, most - 1)
            first = math.ceil(self.lowest / step - 1e-9)
            return [i * step for i in range(first, math.floor(self.highest / step + 1e-9) + 1)]
        for parts in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            first, last = math.floor(math.log10(self.lowest)), math.ceil(math.log10(self.highest))
            found = [part * 10.0 ** power for power in range(first, last + 1) for part in parts
                     if self.lowest <= part * 10.0 ** power <= self.highest]
            if len(found) <= most:
                break
        return found[::math.ceil(len(found) / most)] if found else [self.lowest, self.highest]


def _step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(part * power for part in (1, 2, 5, 10) if part * power * most >= span * (1 - 1e-9))


def short(value: float) -> str:
    """A number for a tick: 1,500,000 is 1.5M, 0.25 is 0.25."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


class Plot:
    """A chart that is drawn part by part; later parts lie above earlier ones."""

    def __init__(self, title: str, x: Axis, y: Axis, *, height: int = HEIGHT):
        self.title, self.x, self.y, self.height = title, x, y, height
        self.parts: list[str] = []
        self.legend: list[tuple[int, str]] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Values -> units of the drawing."""
        bottom = self.height - BOTTOM
        return LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT), bottom - self.y.place(y) * (bottom - TOP)

    def line(self, points: Points, *, colour: int = 0, label: str = "", step: bool = False, dashed: bool = False) -> None:
        """step: a value holds until the next point."""
        places = [self.at(x, y) for x, y in points]
        if step:
            places = [place for before, now in zip([places[0], *places], places) for place in ((now[0], before[1]), now)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(places))
        extra = " dashed" if dashed else ""
        self.parts.append(f'<polyline class="line c{colour % COLOURS}{extra}" points="{path}"/>')
        self._name(colour, label)

    def dots(self, points: Points, *, colour: int = 0, label: str = "", hollow: bool = False, sizes: Sequence[float] = (),
             titles: Sequence[str] = ()) -> None:
        """sizes: areas, 1 for the usual dot; titles: what a pointer that rests on each dot shows."""
        for i, (x, y) in enumerate(points):
            cx, cy = self.at(x, y)
            radius = 4 * math.sqrt(sizes[i]) if sizes else 4
            title = f"<title>{escape(titles[i])}</title>" if titles else ""
            kind = "hollow" if hollow else "dot"
            self.parts.append(f'<circle class="{kind} c{colour % COLOURS}" cx="{cx:.1f}" cy="{cy:.1f}" r="{radius:.1f}">'
                              f"{title}</circle>")
        self._name(colour, label)

    def bar(self, x: tuple[float, float], y: tuple[float, float], *, colour: int = 0, label: str = "", title: str = "") -> None:
        """A rectangle from x[0] to x[1] and y[0] to y[1]."""
        (left, bottom), (right, top) = self.at(x[0], y[0]), self.at(x[1], y[1])
        left, right, top, bottom = min(left, right), max(left, right), min(top, bottom), max(top, bottom)
        hint = f"<title>{escape(title)}</title>" if title else ""
        width, height = max(0.4, right - left), max(0.4, bottom - top)
        self.parts.append(f'<rect class="bar c{colour % COLOURS}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                          f'height="{height:.1f}">{hint}</rect>')
        self._name(colour, label)

    def rule(self, label: str, *, x: float | None = None, y: float | None = None) -> None:
        """A dashed line at a value, named at its upper or right end; one beyond the axes is left out."""
        axis, value = (self.x, x) if x is not None else (self.y, y)
        assert value is not None
        if not axis.lowest <= value <= axis.highest:
            return
        if x is not None:
            (cx, top), (_, bottom) = self.at(x, self.y.highest), self.at(x, self.y.lowest)
            end = cx > WIDTH * 0.6
            self.parts.append(f'<path class="rule" d="M{cx:.1f} {top:.1f}V{bottom:.1f}"/>'
                              f'<text class="note" x="{cx + (-4 if end else 4):.1f}" y="{top + 10:.1f}"{_END if end else ""}>'
                              f"{escape(label)}</text>")
            return
        (left, cy), (right, _) = self.at(self.x.lowest, value), self.at(self.x.highest, value)
        above = cy > TOP + 14
        self.parts.append(f'<path class="rule" d="M{left:.1f} {cy:.1f}H{right:.1f}"/><text class="note" x="{right - 2:.1f}" '
                          f'y="{cy + (-4 if above else 12):.1f}"{_END}>{escape(label)}</text>')

    def _name(self, colour: int, label: str) -> None:
        if label and (colour, label) not in self.legend:
            self.legend.append((colour, label))

    def svg(self) -> str:
        """The whole chart, an XML element; legend entries stand below it, in rows that fit."""
        rows = _legend_rows(self.legend)
        height = self.height + 16 * len(rows)
        keys = [f'<rect class="bar c{colour % COLOURS}" x="{x}" y="{self.height + 16 * r}" width="10" height="10"/>'
                f'<text x="{x + 14}" y="{self.height + 16 * r + 9}">{escape(label)}</text>'
                for r, row in enumerate(rows) for x, colour, label in row]
        return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(self.title)}">'
                f'<text class="title" x="{LEFT - 44}" y="15">{escape(self.title)}</text>'
                f"{self._frame()}{''.join(self.parts)}{''.join(keys)}</svg>")

    def _frame(self) -> str:
        found = []
        for value in self.y.ticks():
            (left, cy), (right, _) = self.at(self.x.lowest, value), self.at(self.x.highest, value)
            found.append(f'<path class="grid" d="M{left:.1f} {cy:.1f}H{right:.1f}"/>'
                         f'<text x="{left - 5:.1f}" y="{cy + 4:.1f}"{_END}>{short(value)}</text>')
        for value in self.x.ticks():
            cx, bottom = self.at(value, self.y.lowest)
            found.append(f'<path class="grid" d="M{cx:.1f} {TOP}V{bottom + 4:.1f}"/>'
                         f'<text x="{cx:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{short(value)}</text>')
        middle, bottom = TOP + (self.height - BOTTOM - TOP) / 2, self.height - BOTTOM
        found.append(f'<text class="label" x="{LEFT + (WIDTH - LEFT - RIGHT) / 2:.0f}" y="{bottom + 31}" text-anchor="middle">'
                     f'{escape(self.x.label)}</text>')
        found.append(f'<text class="label" x="12" y="{middle:.0f}" text-anchor="middle" '
                     f'transform="rotate(-90 12 {middle:.0f})">{escape(self.y.label)}</text>')
        return "".join(found)


_END = ' text-anchor="end"'


def _legend_rows(legend: Sequence[tuple[int, str]]) -> list[list[tuple[int, int, str]]]:
    """[[(x, colour, label)]]: as many in a row as fit; a letter is about 6 units wide."""
    rows: list[list[tuple[int, int, str]]] = []
    x = WIDTH
    for colour, label in legend:
        width = 14 + 6 * len(label) + 14
        if not rows or (x + width > WIDTH and x > LEFT):
            rows.append([])
            x = LEFT
        rows[-1].append((x, colour, label))
        x += width
    return rows


def _thinned(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without points that the drawing cannot show: those within a third of a unit of the last one kept."""
    if not places:
        return []
    kept = [places[0]]
    for place in places[1:-1]:
        if abs(place[0] - kept[-1][0]) + abs(place[1] - kept[-1][1]) > 0.33:
            kept.append(place)
    return [*kept, *places[-1:]] if len(places) > 1 else kept


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the cumulative distribution: (value, share of values up to it), at most 400 of them."""
    found, count = sorted(values), len(values)
    keep = max(1, count // 400)
    return [(value, (i + 1) / count) for i, value in enumerate(found) if i % keep == 0 or i == count - 1]
