"""DeepSeek V3 and R1 (a type, the name, JSON in a fence) and V3.1 (the name, JSON).

    <\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>get_weather
    ```json
    {"city": "Paris"}
    ```<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>
"""
from __future__ import annotations

from ridgeline.server.parsers.json_call import JsonCallParser
from ridgeline.server.parsers.scanner import Steps, is_name

CALLS, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class DeepSeekV3(JsonCallParser):
    special = True

    def run(self) -> Steps[None]:
        while (marker := (yield from self.until((CALLS, CALL), self.content))):
            self.keep(back=len(marker))
            yield from self.skip_space()
            if marker == CALLS and not (yield from self.take(CALL)):
                self.content(self.kept())
            elif (yield from self._call()):
                yield from self.skip_space()
                yield from self.take(CALL_END)
                yield from self.skip_space()
                yield from self.take(CALLS_END)

    def _call(self) -> Steps[bool]:
        yield from self.skip_space()
        name = yield from self.word(is_name)
        if not (yield from self.take(SEPARATOR)):
            self.content(self.kept())
            return False
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            name = yield from self.word(is_name)         # what came first was the type
            yield from self.skip_space()
            yield from self.take("```json")
            yield from self.skip_space()
        if not (yield from self.named_call(name, stop=CALL_END)):
            return False
        yield from self.skip_space()
        yield from self.take("```")
        return True
