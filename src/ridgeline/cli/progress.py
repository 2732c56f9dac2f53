"""Progress bars on standard error, silent when it is not a terminal."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.llm import LLM


def load_llm(model: str, **options: Any) -> LLM:
    """Load a model under a progress bar."""
    from ridgeline.llm import LLM

    options.setdefault("progress", sys.stderr.isatty())
    with bar(f"Loading {model}", unit="bytes") as advance:
        return LLM(model, on_load=lambda name, done, total: advance(done, total, "" if name == model else name), **options)


@contextmanager
def bar(title: str, *, unit: str = "items") -> Iterator[Any]:
    """Gives advance(done, total, note)."""
    if not sys.stderr.isatty():
        yield lambda done, total, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), TextColumn("{task.fields[note]}"),
                  console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, note="")
        yield lambda done, total, note: progress.update(task, completed=done, total=total, note=note)
