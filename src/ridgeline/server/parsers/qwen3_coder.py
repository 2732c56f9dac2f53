"""Qwen3-Coder and Qwen3.5: calls as tags, values as plain text whose type only the tool's schema tells.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
"""
from __future__ import annotations

import json

from ridgeline.server.parsers.scanner import Parser, Steps
from ridgeline.server.parsers.schema import argument_types, text_to_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER = "<parameter="
# A parameter's end, with the line end that belongs to the tag; models forget the tag now and then.
VALUE_ENDS = ("\n</parameter>", "</parameter>")
NEXT = ("\n<parameter=", "\n</function>")


class Qwen3Coder(Parser):
    """Strings are told as they come, other values when they are whole."""

    special = True

    def run(self) -> Steps[None]:
        while (marker := (yield from self.until((OPEN, FUNCTION), self.content))):
            self.keep(back=len(marker))
            if marker == OPEN:
                yield from self.skip_space()
                if not (yield from self.take(FUNCTION)):
                    self.content(self.kept())
                    continue
            name = (yield from self.word(lambda c: c not in "<>\n")).strip()
            if not name or not (yield from self.take(">")):
                self.content(self.kept())
                continue
            self.start(name)
            yield from self._parameters(name)
            yield from self.skip_space()
            yield from self.take(CLOSE)

    def _parameters(self, name: str) -> Steps[None]:
        told = 0
        while True:
            stray: list[str] = []
            marker = yield from self.until((PARAMETER, FUNCTION_END, CLOSE), stray.append)
            if not marker:
                self.cut()                                # the stray text is within what was kept
                return
            between = "".join(stray)
            if between.strip():
                self.content(between)
            if marker != PARAMETER:
                self.arguments("}" if told else "{}")
                self.kept()
                self.end()
                if marker == CLOSE:
                    self._at -= len(CLOSE)
                return
            key = (yield from self.word(lambda c: c not in ">\n")).strip()
            yield from self.take(">")
            yield from self.take("\n")
            if not (yield from self.peek()):
                self.cut()
                return
            self.arguments(f"{', ' if told else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            told += 1
            if not (yield from self._value(name, key)):
                self.cut()
                return

    def _value(self, name: str, key: str) -> Steps[bool]:
        types = argument_types(self.tools.get(name), key)
        streamed = types <= {"string"}
        parts: list[str] = []
        if streamed:
            self.arguments('"')
            end = yield from self.until((*VALUE_ENDS, *NEXT), self._escaped)
            if end:
                self.arguments('"')
        else:
            end = yield from self.until((*VALUE_ENDS, *NEXT), parts.append)
            self.arguments(text_to_json("".join(parts), types))
        if end in NEXT:
            self._at -= len(end)
        return bool(end)

    def _escaped(self, text: str) -> None:
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
