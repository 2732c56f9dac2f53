"""The reports of `ridgeline explain`: one page without links, the same as markdown and text, and a trace."""
from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from browser_kit import CHROMIUM, Browser
from explain_kit import findings, measured
from ridgeline.report.bars import waterfall
from ridgeline.report.explain_html import html
from ridgeline.report.explain_text import markdown, text
from ridgeline.report.perfetto import Span, trace
from ridgeline.report.roofline import Point, roofline

SVG = re.compile(r"<svg.*?</svg>", re.S)
# Pairs of texts of one chart whose boxes overlap by more than a unit, rotated axis labels left out.
OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].filter(t => !t.getAttribute('transform'))
    .map(t => [t.getBBox(), t.textContent]);
  const found = [];
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [a, s] = boxes[i], [b, t] = boxes[j];
    const w = Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x);
    const h = Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y);
    if (w > 1 && h > 3.5) found.push(svg.getAttribute('aria-label') + ': ' + s + ' | ' + t);
  }
  return found; })"""


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return {**measured(findings().result), "command": "ridgeline explain 'test <model>' --batch 2"}


def charts(content: str) -> dict[str, ET.Element]:
    return {root.attrib["aria-label"]: root for root in map(ET.fromstring, SVG.findall(content))}


def test_the_page_is_whole_and_links_nowhere(result: dict[str, Any]) -> None:
    content = html(result)
    assert not re.search(r"<(script|link|img|iframe)|url\(|https?://", content)
    assert "test <model>" not in content and "test &lt;model&gt;" in content
    found = charts(content)
    assert {"Prefill of 512 tokens", "Decode, batch 2, context 512", "A request", "A step of prefill", "A step of decode",
            "ITL", "TTFT of one prompt alone", "Decoding, all sequences", "Memory: weights and cache"} <= set(found)
    kinds = {dot.attrib["class"].split()[0] for dot in found["Decode, batch 2, context 512"].iter("circle")}
    assert kinds == {"hollow", "dot"}
    for part in ("attention.core", "KV cache int8", "does not pay", "ridgeline explain &#x27;test &lt;model&gt;&#x27;"):
        assert part in content


def test_markdown_and_text_say_the_same(result: dict[str, Any]) -> None:
    for content in (markdown(result), text(result)):
        squeezed = " ".join(content.split())
        for told in (*result["verdict"].split(";"), "attention.core", "waterfall of a request", "batch 2 -> 16"):
            assert told.strip() in squeezed
    assert all(line.count("|") == 9 for line in markdown(result).split("## Levers")[1].splitlines() if line.startswith("|"))
    assert max(map(len, text(result, 100).splitlines())) <= 140


def test_a_plan_is_a_page_too() -> None:
    found = findings()
    content = html({**found.result, "command": "x"})
    assert "A request" not in charts(content) and "nothing was measured" in content
    assert "wall time" not in text(found.result)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian's package chromium)")
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overlaps_or_leaves_the_window(result: dict[str, Any], width: int, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(html(result))
    browser = Browser()
    try:
        browser.open((tmp_path / "report.html").as_uri(), width)
        browser.until("document.querySelectorAll('svg').length > 8")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(OVERLAPS) == []
        assert not browser.errors
    finally:
        browser.close()


def test_area_is_share_of_time_and_dots_stand_on_the_roof() -> None:
    points = [Point(1, "half", 0.5, 50e9, 25e9, 0.5), Point(2, "eighth", 100.0, 1e12, None, 0.125),
              Point(3, "none", 1.0, 1e9, 1e9, 0)]
    root = ET.fromstring(roofline("chart", points, {"memory": 100e9}, {"int8": 1e12}))
    radius = {dot.find("title").text.split(",")[0]: float(dot.attrib["r"]) for dot in root.iter("circle")}  # type: ignore[union-attr]
    assert set(radius) == {"1 half", "2 eighth"}                   # what takes no time has no dot
    assert (radius["1 half"] / radius["2 eighth"]) ** 2 == pytest.approx(4, rel=0.05)
    first = next(line for line in root.iter("polyline") if "c2" in line.attrib["class"])
    (x0, y0), (x1, y1) = [tuple(map(float, p.split(","))) for p in first.attrib["points"].split()]
    hollow = next(dot for dot in root.iter("circle") if dot.attrib["class"].startswith("hollow") and float(dot.attrib["r"]) > 8)
    cx, cy = float(hollow.attrib["cx"]), float(hollow.attrib["cy"])
    assert cy == pytest.approx(y0 + (y1 - y0) * (cx - x0) / (x1 - x0), abs=0.3)   # 0.5 FLOP/byte x 100 GB/s = 50 GFLOP/s


def test_bars_reach_the_whole() -> None:
    root = ET.fromstring(waterfall("w", [("a", 0.5, 0), ("b", 0.3, 1), ("no name", 0.2, 2)], 1.0))
    bars = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in root.iter("rect")]
    for (x, width), (following, _) in pairwise(bars[:3]):
        assert x + width == pytest.approx(following, abs=0.11)
    whole = bars[3]
    assert bars[0][0] == whole[0] and bars[2][0] + bars[2][1] == pytest.approx(whole[0] + whole[1], abs=0.2)


def test_a_trace_opens_where_chrome_traces_do() -> None:
    spans = [Span("engine", "step", 1_000_000, 3_000_000), Span("model", "head", 1_500_000, 2_000_000, {"rows": 1})]
    found = json.loads(trace(spans, "m"))
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events] == [("step", 0.0, 2000.0), ("head", 500.0, 500.0)]
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert [names[e["tid"]] for e in events] == ["engine", "model"] and events[1]["args"] == {"rows": 1}
