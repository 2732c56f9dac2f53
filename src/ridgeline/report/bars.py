"""A waterfall as SVG: each part begins where the one above it ended, so that all of them reach the whole."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ridgeline.report.svg import COLOURS, WIDTH
from ridgeline.report.text import digits

ROW, TOP, NAMES, VALUES = 17, 30, 156, 84
LEAST = 0.8                      # units of the shortest bar


def waterfall(title: str, parts: Sequence[tuple[str, float, int]], whole: float, *, whole_name: str = "wall time") -> str:
    """parts: (name, seconds, colour) in order; negative ones (a residual) go back to the left. whole: seconds."""
    room = WIDTH - NAMES - VALUES
    total = max(whole, sum(max(0.0, s) for _, s, _ in parts)) or 1.0
    rows, at = [], 0.0
    for index, (name, seconds, colour) in enumerate([*parts, (whole_name, whole, -1)]):
        start = 0.0 if colour < 0 else at if seconds >= 0 else at + seconds
        left, width = NAMES + room * max(0.0, start) / total, max(LEAST, room * abs(seconds) / total)
        base = TOP + ROW * index
        kind = f"bar c{colour % COLOURS}" if colour >= 0 else "whole"
        fill = "" if colour >= 0 else ' fill="currentColor" opacity="0.35"'
        part = f" {seconds / whole:.1%}" if whole and colour >= 0 else ""
        rows.append(f'<text x="{NAMES - 6}" y="{base + 11}" text-anchor="end">{escape(name)}</text>'
                    f'<rect class="{kind}"{fill} x="{left:.1f}" y="{base + 2}" width="{width:.1f}" height="{ROW - 5}">'
                    f"<title>{escape(name)}: {seconds * 1e3:.3f} ms</title></rect>"
                    f'<text x="{WIDTH - 4}" y="{base + 11}" text-anchor="end">{digits(seconds * 1e3)} ms{part}</text>')
        at += seconds if colour >= 0 else 0.0
    height = TOP + ROW * (len(parts) + 1) + 4
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
            f'<text class="title" x="8" y="15">{escape(title)}</text>{"".join(rows)}</svg>')
