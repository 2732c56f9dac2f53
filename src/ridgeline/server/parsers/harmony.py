"""gpt-oss: every part of an answer is a message in a channel (OpenAI's "harmony" format).

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>commentary
     to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

Channel analysis is reasoning, final is content, commentary with a recipient among the functions is a call and without one
content. The prompt ends with <|start|>assistant, so an answer begins in the middle of its first header.
"""
from __future__ import annotations

import json
import re

from ridgeline.server.parsers.events import Reasoning
from ridgeline.server.parsers.scanner import Parser, Sink, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def in_message(prompt: str) -> bool:
    """Whether a prompt ends within a message, whose text the answer then continues."""
    return prompt.rfind(MESSAGE) > max(map(prompt.rfind, (START, CHANNEL, *ENDS)))


class Harmony(Parser):
    """Reasoning, content and calls."""

    special = True
    read_calls = True       # else calls are shown as content
    _reasoned = False

    def run(self) -> Steps[None]:
        while (marker := (yield from self.until((START, CHANNEL, *ENDS), self.content))):
            if marker in ENDS:
                continue
            self.keep(back=len(marker))
            header: list[str] = [marker]
            if not (yield from self.until((MESSAGE,), header.append)):
                self.content(self.kept())
                return
            head = "".join(header)
            recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
            if recipient and self.read_calls:
                yield from self._call(recipient[1])
                continue
            self.kept()
            if channel and channel[1] == "analysis":
                if self._reasoned:
                    self._reason("\n")
                self._reasoned = True
                yield from self._body(self._reason)
            else:
                yield from self._body(self.content)

    def _reason(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def _call(self, name: str) -> Steps[None]:
        parts: list[str] = []

        def told(text: str) -> None:
            parts.append(text)
            self.arguments(text)

        self.start(name)
        marker = yield from self._body(told)
        body = "".join(parts)
        if not body.strip():
            self.arguments("{}")
        if not marker and not _is_json(body):
            self.cut()
            return
        self.kept()
        self.end()

    def _body(self, sink: Sink) -> Steps[str]:
        marker = yield from self.until((START, CHANNEL, *ENDS), sink)
        if marker in (START, CHANNEL):
            self._at -= len(marker)
        return marker


class HarmonyReasoning(Harmony):
    """Calls stay text: for answers to requests without tools."""

    read_calls = False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
