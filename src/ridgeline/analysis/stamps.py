"""When what happened in a run: spans of the engine's own functions, and in them the parts of each native call.

    with recorded(llm) as run:
        ...
    run.spans()     # in order of their starts, each with the time that is its own

The functions are wrapped on the instances while the block runs, about a microsecond a call, and not at all afterwards.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ridgeline.analysis.measure import Event, Events
from ridgeline.llm import LLM
from ridgeline.report.perfetto import Span as Row
from ridgeline.report.perfetto import trace

# Functions of an LLM and the name of their spans. A function that calls another one of the same name is one span.
FRONTEND = {"prepare": "tokenise", "step": "step", "_take": "detokenise"}
ENGINE = {"step": "engine", "_advance": "commit", "_receive": "commit", "_report": "commit", "_place": "place"}
RUNNER = {"forward": "forward", "_likeliest": "forward", "execute": "execute", "_hidden": "choose",
          "_prompt_logprobs": "choose", "_choose": "choose"}


@dataclass
class Span:
    """Nanoseconds on the monotonic clock. own_ns: without the spans inside it; step: how many-th engine step it is part of,
    -1 outside of all; layer, rows: of a component of a model."""

    name: str
    start_ns: int
    end_ns: int
    layer: int | None = None
    rows: int = 0
    component: bool = False
    own_ns: int = 0
    step: int = -1

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class Run:
    """What was stamped."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._open: dict[str, int] = {}

    def spans(self) -> list[Span]:
        """In order of start; own times and steps filled in. Spans nest: none begins in another and ends behind it."""
        found = sorted(self._spans, key=lambda s: (s.start_ns, -s.end_ns))
        stack: list[Span] = []
        steps = 0
        for span in found:
            while stack and stack[-1].end_ns <= span.start_ns:
                stack.pop()
            span.own_ns = span.duration_ns
            if stack:
                stack[-1].own_ns -= min(span.end_ns, stack[-1].end_ns) - span.start_ns
            if span.name == "step" and not span.component:
                span.step, steps = steps, steps + 1
            else:
                span.step = stack[0].step if stack else -1
            stack.append(span)
        return found

    def wrap(self, owner: Any, function: str, name: str) -> None:
        inner, clock, spans, depth = getattr(owner, function), time.monotonic_ns, self._spans, self._open

        def timed(*args: Any, **kwargs: Any) -> Any:
            if depth.get(name):
                return inner(*args, **kwargs)
            depth[name] = 1
            start = clock()
            try:
                return inner(*args, **kwargs)
            finally:
                spans.append(Span(name, start, clock()))
                depth[name] = 0

        setattr(owner, function, timed)

    def add(self, events: Sequence[Event]) -> None:
        self._spans += [Span(component, start, end, layer, rows, True) for layer, component, rows, start, end in events]


@contextmanager
def recorded(llm: LLM) -> Iterator[Run]:
    """Stamp everything that one LLM does in this thread."""
    run = Run()
    with ExitStack() as stack:
        for owner, functions in _targets(llm):
            for function, name in functions.items():
                run.wrap(owner, function, name)
                stack.callback(delattr, owner, function)
        sources = [Events.of(llm, role) for role in llm.engine.runners]
        for source in sources:
            stack.callback(source.stop)
            source.start()
        yield run
        for source in sources:
            run.add(source.take())


def _targets(llm: LLM) -> Iterator[tuple[Any, Mapping[str, str]]]:
    yield llm.frontend, FRONTEND
    yield llm.engine, ENGINE
    yield llm.engine.scheduler, {"schedule": "schedule"}
    for runner in llm.engine.runners.values():
        yield runner, RUNNER


def as_trace(spans: Sequence[Span], process: str) -> str:
    """The spans in Chrome's trace format: the engine's functions on one track, the parts of the model on another."""
    return trace([Row("model" if span.component else "engine", span.name, span.start_ns, span.end_ns,
                      {"step": span.step, **({"layer": span.layer, "rows": span.rows} if span.component else {})})
                  for span in spans], process)
