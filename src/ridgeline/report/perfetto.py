"""Spans of a run in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Format: "Trace Event Format" of the Catapult project; complete events ("ph": "X"), times in microseconds.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Nanoseconds on the monotonic clock. track: the row it is shown on; spans of one track nest or follow each other."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    facts: Mapping[str, Any] = {}


def trace(spans: Sequence[Span], process: str) -> str:
    """One JSON object. The first span begins at 0."""
    tracks = list(dict.fromkeys(span.track for span in spans))
    zero = min((span.start_ns for span in spans), default=0)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": process}}]
    for tid, track in enumerate(tracks, 1):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    events += [{"ph": "X", "pid": 1, "tid": tracks.index(span.track) + 1, "name": span.name, "cat": span.track,
                "ts": (span.start_ns - zero) / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3, "args": dict(span.facts)}
               for span in spans]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
