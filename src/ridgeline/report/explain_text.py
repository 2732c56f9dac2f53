"""What `ridgeline explain` found, at a terminal and as markdown."""
from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from ridgeline.report import explain_rows as rows
from ridgeline.report.text import Rows, markdown_table, table

NOTE = ("FLOPs: two a multiply-add. roof: the least time, computing at the peak or reading at the bandwidth of the level that "
        "holds the data. of roof: roof / measured. chapter: 16-bit weights and activations, every intermediate written. "
        "Formulas: docs/explain.md.")


def text(result: Mapping[str, Any], width: int = 100) -> str:
    """The report at a terminal."""
    room = max(40, width - 10)
    wrapped = [(name, textwrap.wrap(told, room, break_on_hyphens=False) or [""]) for name, told in rows.facts(result)]
    parts = ["\n".join(f"{name if i == 0 else '':9} {line}" for name, lines in wrapped for i, line in enumerate(lines)),
             _table(rows.stage_rows(result))]
    for one in result["stages"]:
        parts.append(f"{one['stage']}, by component\n{_table(rows.component_rows(one), left=2)}")
    if fall := rows.waterfall_rows(result):
        parts.append(f"where the time goes\n{_table(fall)}")
    parts.append("where things turn\n" + "\n".join(f"  {name}: {told}" for name, told in rows.limit_rows(result)))
    for key in ("batch", "context"):
        fixed = "context" if key == "batch" else "batch"
        parts.append(f"over {key}, at {fixed} {result['settings'][fixed]:,}\n{_table(rows.sweep_rows(result, key))}")
    parts.append(_levers(result, width))
    parts.append("\n".join(f"{grade}: {told}" for grade, told in rows.badge_pairs(result)))
    return "\n\n".join([*parts, *(textwrap.fill(told, width) for told in (NOTE, result["verdict"]))])


def _levers(result: Mapping[str, Any], width: int) -> str:
    """The table without its sentences, which stand below each lever."""
    found = rows.advice_rows(result)
    lines = _table([row[:6] for row in found]).split("\n")
    told = [lines[0]]
    for line, row in zip(lines[1:], found[1:]):
        told += [line, *textwrap.wrap(f"{row[7]}. Costs: {row[6]}", width, initial_indent="    ", subsequent_indent="    ")]
    return "levers\n" + "\n".join(told)


def _table(found: Rows, left: int = 1) -> str:
    """left: columns that begin at the left; the last one does too."""
    if left == 1:
        return table([[*row, ""] for row in found])
    widths = [max(map(len, column)) for column in zip(*found)]
    lines = [[cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))] for row in found]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown(result: Mapping[str, Any]) -> str:
    """The same as a page of markdown."""
    parts = [f"# Explain: {result['model']['name']}", result["verdict"],
             "\n".join(f"* **{grade}**: {told}" for grade, told in rows.badge_pairs(result)),
             "\n".join(f"* **{name}**: {told}" for name, told in rows.facts(result)),
             "## Stages", markdown_table(rows.stage_rows(result))]
    for one in result["stages"]:
        parts += [f"## {one['stage'].capitalize()}, by component", markdown_table(rows.component_rows(one))]
    if fall := rows.waterfall_rows(result):
        parts += ["## Where the time goes", markdown_table(fall)]
    parts += ["## Where things turn", "\n".join(f"* **{name}**: {told}" for name, told in rows.limit_rows(result))]
    for key in ("batch", "context"):
        parts += [f"## Over {key}", markdown_table(rows.sweep_rows(result, key))]
    parts += ["## Levers", markdown_table(rows.advice_rows(result)), NOTE, "## Again", f"    {rows.reproduce(result)}"]
    return "\n\n".join(parts) + "\n"
