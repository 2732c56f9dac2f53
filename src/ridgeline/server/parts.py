"""The parts of an answer, in the order in which they were written: reasoning, texts and tool calls.

Interfaces that show an answer as a list of blocks or items build on it, streamed (`take`, `end`) and whole (`parts`).
"""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.server.parsers import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Part:
    """id, name: of a call, whose text is its arguments; cut: what the model wrote of a call that the end cut off."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    cut: str | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Of a call that is whole; None where its text is no JSON object."""
        if self.kind != "call" or self.cut is not None:
            return None
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @property
    def as_text(self) -> str:
        """Of a call without arguments: what a reader is shown instead."""
        return f"{self.name} {self.text}" if self.cut is None else self.cut


@dataclass(frozen=True, slots=True)
class Change:
    """A part opens, grows by `text`, or closes."""

    what: Literal["open", "grow", "close"]
    part: Part
    text: str = ""


class Parts:
    """Of one answer; one part is open at a time."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Parts:
        """Of a whole answer."""
        found = cls()
        found.take(events)
        found.end()
        return found

    @property
    def called(self) -> bool:
        """Whether there is a call that is whole."""
        return any(part.kind == "call" and part.cut is None for part in self.parts)

    def take(self, events: Iterable[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            match event:
                case Content(text):
                    changes += self._grow("text", text)
                case Reasoning(text):
                    changes += self._grow("reasoning", text)
                case ToolCallStart(_, id, name):
                    changes += self._begin("call", id, name)
                case ToolCallArguments(_, text):
                    changes += self._grow("call", text)
                case ToolCallCut(_, text):
                    assert self._open is not None, "a call that is cut off is open"
                    self._open.cut = text
                    changes += self._close()
                case ToolCallEnd():
                    changes += self._close()
        return changes

    def end(self) -> list[Change]:
        """The answer has ended. One without anything has an empty text."""
        return [*([] if self.parts else self._begin("text")), *self._close()]

    def _grow(self, kind: Kind, text: str) -> list[Change]:
        changes = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        assert self._open is not None, "a part has been opened"
        self._open.pieces.append(text)
        return [*changes, Change("grow", self._open, text)]

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> list[Change]:
        changes = self._close()
        self._open = Part(len(self.parts), kind, id, name)
        self.parts.append(self._open)
        return [*changes, Change("open", self._open)]

    def _close(self) -> list[Change]:
        part, self._open = self._open, None
        return [] if part is None else [Change("close", part)]
