"""The page around charts: headings, sentences, badges, tables, code. Everything that comes from outside is escaped."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ridgeline.report.svg import COLOURS

# Colour-blind safe (Okabe and Ito), lightened for dark pages.
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5a6675; --paper: #fff; --card: #f6f8fa; --edge: #d9dfe6;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0589a; --c4: #b88600; --c5: #3f9ac9;
  --valid: #0b6b3a; --caution: #8a5a00; --invalid: #a32020; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6ebf1; --soft: #9fabb9; --paper: #12171d; --card: #1a2129; --edge: #313b46;
  --c0: #56b4e9; --c1: #ff8c42; --c2: #35c79a; --c3: #dd8fc5; --c4: #f0c040; --c5: #9ad4f5;
  --valid: #58d68d; --caution: #f5b942; --invalid: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 20px 16px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 28px 0 10px; }
h3 { font-size: 15px; margin: 18px 0 6px; }
p { margin: 6px 0; } .soft { color: var(--soft); font-size: 13px; } .verdict { font-size: 18px; margin: 8px 0 12px; }
ul.badges { list-style: none; margin: 8px 0; padding: 0; } .badges li { margin: 4px 0; }
.badge { display: inline-block; border: 1px solid; border-radius: 10px; padding: 0 8px; margin-right: 6px; font-size: 12px; }
.valid { color: var(--valid); } .caution { color: var(--caution); } .invalid { color: var(--invalid); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 14px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px; min-width: 0; }
.card svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; margin: 14px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--edge); vertical-align: top;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td.left, th.left { text-align: left; }
td.text, th.text { text-align: left; white-space: normal; min-width: 180px; color: var(--soft); }
pre { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 8px 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .title { fill: var(--ink); font-size: 13px; font-weight: 600; }
svg .grid { stroke: var(--edge); stroke-width: 1; fill: none; }
svg .rule { stroke: var(--soft); stroke-dasharray: 4 3; fill: none; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .dashed { stroke-dasharray: 5 3; }
svg .hollow { fill: none; stroke-width: 1.8; } svg .note { fill: var(--ink); font-size: 10px;
  paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
@media (max-width: 500px) { th, td { padding-right: 8px; } td.text, th.text { min-width: 130px; } }
""" + "".join(f"svg .line.c{i}, svg .hollow.c{i} {{ stroke: var(--c{i}); }}\n"
              f"svg .dot.c{i}, svg .bar.c{i} {{ fill: var(--c{i}); }}\n" for i in range(COLOURS))


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document. parts: HTML."""
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
            f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n")


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def badges(found: Sequence[tuple[str, str]]) -> str:
    """(grade, sentence): grade is valid, caution or invalid."""
    items = "".join(f'<li><span class="badge {grade}">{grade}</span>{escape(text)}</li>' for grade, text in found)
    return f'<ul class="badges">{items}</ul>'


def charts(found: Sequence[str]) -> str:
    """SVG side by side, one below the other on a narrow screen."""
    return '<div class="charts">' + "".join(f'<div class="card">{svg}</div>' for svg in found) + "</div>"


def facts(found: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in found) + "</dl>"


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def table(rows: Sequence[Sequence[str]], *, text: Sequence[int] = (-1,), left: Sequence[int] = ()) -> str:
    """The first row is the heading; text: columns of sentences, which may wrap; left: columns of words."""
    if not rows:
        return ""
    wraps = {i % len(rows[0]) for i in text}

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [" class=text" if i in wraps else " class=left" if i in left else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds)) + "</tr>"

    head, *body = rows
    return f'<div class="wide"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in body)}</table></div>'
