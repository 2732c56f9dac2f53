"""Hermes 2 and 3, Qwen 2.5 and Qwen 3: each call a JSON object between tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""
from __future__ import annotations

from ridgeline.server.parsers.json_call import JsonCallParser
from ridgeline.server.parsers.scanner import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(JsonCallParser):
    special = True      # the tags are added tokens, in some vocabularies special ones

    def run(self) -> Steps[None]:
        while (yield from self.until((OPEN,), self.content)):
            self.keep(back=len(OPEN))
            yield from self.skip_space()
            if (yield from self.json_call(CLOSE)):
                yield from self.skip_space()
                yield from self.take(CLOSE)
