"""Mistral's instruct models, both forms: a list of JSON objects, and since version 11 of its tokenizer names with JSON.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome"}
"""
from __future__ import annotations

from ridgeline.server.parsers.json_call import JsonCallParser
from ridgeline.server.parsers.scanner import Steps, is_name, short_call_id

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(JsonCallParser):
    """Its templates refuse ids that are not nine letters or digits."""

    special = True
    new_id = staticmethod(short_call_id)
    closes = False

    def run(self) -> Steps[None]:
        while (yield from self.until((CALLS,), self.content)):
            self.keep(back=len(CALLS))
            yield from self.skip_space()
            if (yield from self.take("[")):
                yield from self._list()
            elif (yield from self.peek()) == "{":
                yield from self.json_call(CALLS)
            else:
                yield from self._named()

    def _list(self) -> Steps[None]:
        yield from self.skip_space()
        while (yield from self.json_call(CALLS)):
            yield from self.skip_space()
            if (yield from self.take("]", ",")) != ",":
                return
            self.keep(back=1)
            yield from self.skip_space()

    def _named(self) -> Steps[None]:
        name, id = (yield from self.word(is_name)), None
        if (yield from self.take(CALL_ID)):
            id = yield from self.word(str.isalnum)
        yield from self.take(ARGS)
        yield from self.skip_space()
        yield from self.named_call(name, id, CALLS)
