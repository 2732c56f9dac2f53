"""Reasoning between <think> and </think>, as DeepSeek R1 and Qwen 3 write it.

The line ends around the tags belong to the format. Only the first block counts; a later tag is text.
"""
from __future__ import annotations

from ridgeline.server.parsers.events import Reasoning
from ridgeline.server.parsers.scanner import Parser, Steps

OPEN, CLOSE = "<think>", "</think>"


def left_open(prompt: str) -> bool | None:
    """Whether a prompt ends within reasoning: True behind an open tag, False right behind a closed one, else None."""
    if prompt.rfind(OPEN) > prompt.rfind(CLOSE):
        return True
    return False if prompt.rstrip().endswith(CLOSE) else None


class Think(Parser):
    """inside: whether the answer begins within reasoning; None: it does if its first word is the tag (Qwen 3), and in any
    case for models whose template opens the tag (DeepSeek R1)."""

    special = True
    assumed = False

    def __init__(self, *, inside: bool | None = None):
        super().__init__()
        self.inside = inside

    def run(self) -> Steps[None]:
        space = yield from self.word(str.isspace)
        opened = "" if self.inside is False else (yield from self.take(OPEN))
        if not opened and not (self.assumed if self.inside is None else self.inside):
            self.content(space)
            return
        if opened:
            yield from self._newlines()
        else:
            self._reason(space.lstrip("\n"))
        held = ""

        def reason(text: str) -> None:
            nonlocal held
            text = held + text
            kept = text.rstrip("\n")
            self._reason(kept)
            held = text[len(kept):]

        if not (yield from self.until((CLOSE,), reason)):
            self._reason(held)
            return
        yield from self._newlines()

    def _newlines(self) -> Steps[None]:
        while (yield from self.peek()) == "\n":
            self._at += 1

    def _reason(self, text: str) -> None:
        self._events.append(Reasoning(text))


class DeepSeekR1(Think):
    """The answer is reasoning up to </think>, whether the tag is opened or not."""

    assumed = True


class Qwen3(Think):
    """The answer is reasoning only where a tag opens it, in the answer or in the prompt."""
