"""Reports as text: tables at a terminal and in markdown, numbers with as many digits as they mean, files."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ridgeline.errors import ConfigError

Rows = list[list[str]]         # the first is the heading
SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def write(path: str, content: str) -> None:
    """raises ConfigError."""
    try:
        Path(path).expanduser().write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be written: {error.strerror}") from error


def table(rows: Rows, right: bool = True) -> str:
    """Columns in line; the first and the last to the left, the others to the right if asked."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        inner = [cell.rjust(w) if right else cell.ljust(w) for cell, w in zip(row[1:-1], widths[1:-1])]
        lines.append("  ".join([row[0].ljust(widths[0]), *inner, row[-1]]).rstrip())
    return "\n".join(lines)


def markdown_table(rows: Rows) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else digits(seconds * 1e3)


def number(value: float | None) -> str:
    return "-" if value is None else digits(value)


def digits(value: float) -> str:
    """Three digits or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def span(found: Sequence[float] | None) -> str:
    return "-" if found is None else f"{ms(found[0])} to {ms(found[1])}"


def si(value: float | None, unit: str = "") -> str:
    """Three digits and a prefix of powers of ten: 35.2 G."""
    if value is None:
        return "-"
    for scale, prefix in SI:
        if abs(value) >= scale:
            return f"{digits(value / scale)} {prefix}{unit}"
    return f"{digits(value) if value != int(value) else f'{int(value)}'} {unit}".rstrip()


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if abs(value) < 0.0995 else f"{value:.0%}"
