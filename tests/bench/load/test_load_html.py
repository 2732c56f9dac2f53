"""The report as one file, and the charts in it."""
from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.report import page
from ridgeline.report.svg import HEIGHT, WIDTH, Axis, Plot, distribution, short
from streaming_peer import Behaviour, serving

SVG = re.compile(r"<svg.*?</svg>", re.S)


def charts(content: str) -> dict[str, ET.Element]:
    """Title -> chart; a chart that is no well-formed XML fails here."""
    return {root.attrib["aria-label"]: root for root in map(ET.fromstring, SVG.findall(content))}


def test_one_load_is_a_page_without_links(load, tmp_path):
    with serving(Behaviour(fails=lambda number: number == 4)) as peer:
        result = load(peer, "--max-concurrency", 3, "--goodput", "ttft:900", "--html", tmp_path / "r.html", num_prompts=12)
        address = peer.url
    content = (tmp_path / "r.html").read_text()
    assert "://" not in content.replace(address, "") and not re.search(r"<(script|link|img|iframe)|url\(", content)
    found = charts(content)
    assert list(found) == ["TTFT: t1 - t_sched", "TPOT: (tN - t1) / (n - n1)", "ITL: gap D / k for each of a chunk's k tokens",
                           "E2E: tN - t_sched", "Requests", "Waiting and running, as clients see it"]
    bars = [bar for bar in found["Requests"].iter("rect") if bar.find("title") is not None]
    told = [bar.find("title").text for bar in bars]
    assert sum("answering" in text for text in told) == 11 and sum("failed" in text for text in told) == 1
    assert "11 of 12 requests answered" in content and 'class="badge invalid"' in content
    assert result["command"].replace("'", "&#x27;") in content and f"--salt {result['salt']}" in content


def test_a_sweep_is_a_curve_with_its_knee(load, tmp_path):
    with serving(Behaviour(ttft_s=0.04, slots=1)) as peer:
        load(peer, "--sweep", "1,8", "--sweep-over", "concurrency", "--stagger", 0, "--goodput", "ttft:150", "--html",
             tmp_path / "r.html", num_prompts=16)
    found = charts((tmp_path / "r.html").read_text())
    curve = found["TTFT over load"]
    assert "knee" in [text.text for text in curve.iter("text")] and "objective" in [text.text for text in curve.iter("text")]
    kinds = [dot.attrib["class"].split()[0] for dot in curve.iter("circle")]
    assert {"dot", "hollow"} == set(kinds) and "Output tokens/s over load" in found


def test_a_run_without_an_answer_is_a_page_too(load, tmp_path):
    with serving(Behaviour(fails=lambda number: number > 1)) as peer:
        load(peer, "--max-concurrency", 2, "--html", tmp_path / "r.html")
    content = (tmp_path / "r.html").read_text()
    assert "no request was answered" in content
    assert list(charts(content)) == ["Requests", "Waiting and running, as clients see it"]


def test_what_comes_from_a_server_is_escaped():
    evil = "<img src=x onerror=1>&\"'"
    whole = page.page(evil, [page.heading(evil), page.paragraph(evil), page.badges([("invalid", evil)]), page.code(evil),
                             page.facts([(evil, evil)]), page.table([["a", evil], [evil, evil]]), page.charts([named(evil)])])
    assert "<img" not in whole and len(charts(whole)) == 1


def named(text: str) -> str:
    plot = Plot(text, Axis(0, 1, text), Axis(0, 1, text))
    plot.line([(0, 0), (1, 1)], label=text)
    plot.dots([(0.5, 0.5)], titles=[text])
    plot.bar((0, 1), (0, 1), title=text)
    plot.rule(text, x=0.5)
    plot.rule(text, y=0.5)
    return plot.svg()


@given(st.lists(st.floats(-1e9, 1e9).filter(lambda v: v == 0 or abs(v) > 1e-9), max_size=8), st.booleans(), st.booleans())
def test_axes_hold_their_values_and_have_a_few_ticks(values, log, zero):
    axis = Axis.over(values, "x", log=log, zero=zero)
    shown = [v for v in values if v > 0] if log else values
    slack = 1e-6 * (abs(axis.lowest) + abs(axis.highest))
    assert all(axis.lowest - slack <= v <= axis.highest + slack for v in shown)
    assert 1 <= len(axis.ticks()) <= 7
    assert all(-1e-9 <= axis.place(t) <= 1 + 1e-9 for t in axis.ticks())
    assert axis.place(axis.lowest) == 0.0 and axis.place(axis.highest) == 1.0


def test_logarithmic_axes_divide_by_factors():
    axis = Axis(1, 100, log=True)
    assert axis.place(10) == pytest.approx(0.5) and axis.ticks() == [1, 3, 10, 30, 100] and axis.place(0) == 0.0


@pytest.mark.parametrize("value, text", [(0, "0"), (0.25, "0.25"), (1500, "1500"), (15_000, "15k"), (1.5e6, "1.5M"),
                                         (2e9, "2G")])
def test_ticks_are_short(value, text):
    assert short(value) == text


def test_places_and_legends():
    plot = Plot("t", Axis(0, 10), Axis(0, 1))
    assert plot.at(0, 0) == (52, HEIGHT - 42) and plot.at(10, 1) == (WIDTH - 12, 28)
    assert plot.at(99, -5) == (WIDTH - 12, HEIGHT - 42)          # what lies beyond is put on the edge
    plot.line([(0, 0), (5, 1)], step=True, label="a" * 30)
    plot.line([(0, 0)], colour=1, label="b" * 30)
    plot.rule("gone", x=11)
    root = ET.fromstring(plot.svg())
    assert next(root.iter("polyline")).attrib["points"].split()[1:] == ["220.0,208.0", "220.0,28.0"]
    assert "gone" not in [text.text for text in root.iter("text")] and int(root.attrib["viewBox"].split()[3]) == HEIGHT + 32


def test_a_distribution_rises_to_one():
    points = distribution([3.0, 1.0, 2.0, 2.0])
    assert points == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    assert len(distribution(list(range(10_000)))) <= 402 and distribution(list(range(10_000)))[-1] == (9999, 1.0)
