"""Llama 3.1 and 3.2: the whole answer is a call, or several with ";" between them, sometimes behind a special token.

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": ...}
"""
from __future__ import annotations

from ridgeline.server.parsers.json_call import JsonCallParser
from ridgeline.server.parsers.scanner import Steps

TAG = "<|python_tag|>"


class Llama3Json(JsonCallParser):
    """JSON without both a name and parameters is an answer in JSON, and content."""

    special = True

    def run(self) -> Steps[None]:
        space = yield from self.word(str.isspace)
        self.content(space)
        tagged = yield from self.looking_at(TAG)
        if tagged or (yield from self.peek()) == "{":
            yield from self._calls()
        while (yield from self.until((TAG,), self.content)):
            self._at -= len(TAG)
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        while True:
            self.keep()
            if (yield from self.take(TAG)):
                yield from self.skip_space()
            if not (yield from self.json_call(bare=False)):
                return
            self.keep()
            yield from self.skip_space()
            yield from self.take(";", ",")
            yield from self.skip_space()
            more = (yield from self.peek()) == "{" or (yield from self.looking_at(TAG))
            between = self.kept()
            if not more:
                self.content(between)
                return
