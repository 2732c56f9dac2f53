"""The base of all parsers: a reader of text that arrives in pieces.

A parser is written as if it had the whole text: a generator that looks at characters and markers at a cursor. Where it
must see more to decide, it yields and goes on with the next piece. Decisions depend on the text alone, never on where a
piece ended, so every way of cutting a text gives the same result.
"""
from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from ridgeline.server.parsers.events import (
    Content,
    Event,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
    merged,
)

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]
Tools = Sequence[Mapping[str, Any]]     # in the OpenAI form: {"type": "function", "function": {"name": ..., ...}}


def call_id() -> str:
    """A fresh id of a call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A fresh id in the form that Mistral's templates insist on: nine letters or digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class NotACall(Exception):
    """What looked like the beginning of a call is none."""


class Parser(ABC):
    """Turns the text of one answer into events; one instance an answer.

    special: the format's markers are special tokens, so the text must be decoded with skip_special_tokens=False.
    new_id: makes the ids of calls.
    """

    special = False
    new_id: Callable[[], str] = staticmethod(call_id)

    def __init__(self, tools: Tools = (), *, new_id: Callable[[], str] | None = None):
        self.tools = {str(tool["function"]["name"]): tool["function"] for tool in tools if "function" in tool}
        if new_id is not None:
            self.new_id = new_id
        self.calls = 0                       # calls begun
        self._text, self._at = "", 0         # what has come and is not forgotten; the cursor
        self._mark: int | None = None        # where the text begins that must be kept
        self._ended = False
        self._events: list[Event] = []
        self._space = ""                     # white space before the first text or behind a call, if it was all so far
        self._fresh = True
        self._steps: Steps[None] | None = None

    def push(self, text: str) -> list[Event]:
        """What the next piece of text adds."""
        assert not self._ended, "text after the end"
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        if self._mark is not None:
            self._mark = 0
        return self._go()

    def finish(self) -> list[Event]:
        """What was held back, once the text has ended."""
        self._ended = True
        events = self._go()
        assert self._at == len(self._text), "text was left over"
        return events

    @abstractmethod
    def run(self) -> Steps[None]:
        """Read the whole text, telling what it finds; yields wherever it needs more."""

    def _go(self) -> list[Event]:
        if self._steps is None:
            self._steps = self._whole()
        next(self._steps, None)
        events, self._events = merged(self._events), []
        return events

    def _whole(self) -> Steps[None]:
        yield from self.run()
        yield from self.until((), self.content)          # what a format leaves over is text
        if self._space and not self.calls:
            self._events.append(Content(self._space))

    # Telling.

    def content(self, text: str) -> None:
        """Text for the reader. White space alone before, between and behind calls belongs to the format."""
        if self._fresh:
            text = self._space + text
            if not text or text.isspace():
                self._space = text
                return
            self._fresh, self._space = False, ""
        self._events.append(Content(text))

    def start(self, name: str, id: str | None = None) -> int:
        """A call begins; returns its index."""
        index, self.calls = self.calls, self.calls + 1
        self._fresh, self._space = True, ""
        self._events.append(ToolCallStart(index, id or self.new_id(), name))
        return index

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call begun last."""
        if text:
            self._events.append(ToolCallArguments(self.calls - 1, text))

    def end(self) -> None:
        self._events.append(ToolCallEnd(self.calls - 1))

    def cut(self) -> None:
        self._events.append(ToolCallCut(self.calls - 1, self.kept()))

    # Keeping text that may turn out to be content after all.

    def keep(self, back: int = 0) -> None:
        """Remember the text from `back` characters before the cursor on."""
        self._mark = self._at - back

    def kept(self) -> str:
        """The text remembered, up to the cursor; it is then forgotten."""
        assert self._mark is not None, "nothing is kept"
        text, self._mark = self._text[self._mark:self._at], None
        return text

    # Reading.

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, fewer at the end of the text."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        return self._text[self._at:self._at + count]

    def looking_at(self, *markers: str) -> Steps[str]:
        """The marker at the cursor, or "". The cursor stays."""
        while True:
            rest = self._text[self._at:self._at + max(map(len, markers))]
            for marker in markers:
                if rest.startswith(marker):
                    return marker
            if self._ended or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield

    def take(self, *markers: str) -> Steps[str]:
        """As `looking_at`, and goes behind the marker."""
        marker = yield from self.looking_at(*markers)
        self._at += len(marker)
        return marker

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()).isspace():
            self._at += 1

    def until(self, markers: Sequence[str], sink: Sink) -> Steps[str]:
        """Give the text before the first of `markers` to `sink` and go behind it; returns it, "" at the end of the text."""
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            if found:
                at, marker = min(found)
                sink(self._text[self._at:at])
                self._at = at + len(marker)
                return marker
            end = len(self._text) - (0 if self._ended else self._partial(markers))
            if end > self._at:
                sink(self._text[self._at:end])
                self._at = end
            if self._ended:
                return ""
            yield

    def _partial(self, markers: Sequence[str]) -> int:
        """Length of the longest end of the text that may be the beginning of a marker."""
        longest = max(map(len, markers), default=1) - 1
        for size in range(min(longest, len(self._text) - self._at), 0, -1):
            tail = self._text[len(self._text) - size:]
            if any(marker.startswith(tail) for marker in markers):
                return size
        return 0

    def word(self, allowed: Callable[[str], bool]) -> Steps[str]:
        """The longest run of allowed characters at the cursor."""
        parts: list[str] = []
        while (character := (yield from self.peek())) and allowed(character):
            parts.append(character)
            self._at += 1
        return "".join(parts)


def is_name(character: str) -> bool:
    """Whether a tool's name may contain it."""
    return character.isalnum() or character in "_-."
