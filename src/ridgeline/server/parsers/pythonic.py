"""Llama 3.2 and 4, ToolACE and others: the whole answer is a Python list of calls.

    [get_weather(city="Paris", days=3), get_time(zone='CET')]

Llama 4 writes it between <|python_start|> and <|python_end|>. Arguments become JSON one by one.
"""
from __future__ import annotations

import json
import re

from ridgeline.server.parsers.scanner import NotACall, Parser, Steps, is_name
from ridgeline.server.parsers.schema import argument_types, literal_to_json

START, END = "<|python_start|>", "<|python_end|>"

_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")


class Pythonic(Parser):
    """A list that is not one of calls, of known tools where these are known, is content."""

    special = True

    def run(self) -> Steps[None]:
        space = yield from self.word(str.isspace)
        self.content(space)
        self.keep()
        tagged = yield from self.take(START)
        yield from self.skip_space()
        if not (yield from self.take("[")):
            self.content(self.kept())
            return
        try:
            while True:
                yield from self._call()
                self.keep()
                yield from self.skip_space()
                if not (yield from self.take(",")):
                    break
            yield from self.skip_space()
            if (yield from self.take("]")):
                self.kept()
        except NotACall:
            pass
        if self._mark is not None:
            self.content(self.kept())
        if tagged:
            yield from self.skip_space()
            yield from self.take(END)

    def _call(self) -> Steps[None]:
        """One call, told from its first whole argument on; the kept text ends with it."""
        yield from self.skip_space()
        name = yield from self.word(is_name)
        if not name or (self.tools and name not in self.tools) or not (yield from self.take("(")):
            raise NotACall
        function = self.tools.get(name)
        positional = list(((function or {}).get("parameters") or {}).get("properties") or {})
        begun, count = False, 0
        while True:
            source, closer = yield from self._argument()
            if source.strip():
                keyword = _KEYWORD.match(source)
                key = keyword[1] if keyword else positional[count] if count < len(positional) else None
                text = source[keyword.end():] if keyword else source
                value = None if key is None else literal_to_json(text, argument_types(function, key))
                if value is None:
                    if not begun:
                        raise NotACall
                    key, value = key or f"argument_{count}", json.dumps(text.strip(), ensure_ascii=False)
                if not begun:
                    self.start(name)
                self.arguments(f"{', ' if begun else '{'}{json.dumps(key)}: {value}")
                begun, count = True, count + 1
            if closer == ",":
                continue
            if not closer and not begun:
                raise NotACall
            if not closer:
                self.cut()
                return
            if not begun:
                self.start(name)
            self.arguments("}" if begun else "{}")
            self.kept()
            self.end()
            return

    def _argument(self) -> Steps[tuple[str, str]]:
        """(source of one argument, the "," or ")" behind it, which is passed, or "" at the end of the text)."""
        parts: list[str] = []
        quote, depth = "", 0
        while (c := (yield from self.peek())):
            self._at += 1
            if quote:
                if c == "\\":
                    c += yield from self.peek()
                    self._at += len(c) - 1
                elif c == quote:
                    quote = ""
            elif c in "\"'":
                quote = c
            elif c in "([{":
                depth += 1
            elif not depth and c in ",)":
                return "".join(parts), c
            elif c in ")]}":
                depth -= 1
            parts.append(c)
        return "".join(parts), ""
