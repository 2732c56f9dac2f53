"""Answers to requests whose tool_choice forces calls: a grammar makes the whole text JSON, so no format is looked for."""
from __future__ import annotations

from collections.abc import Callable

from ridgeline.server.parsers.json_call import JsonCallParser
from ridgeline.server.parsers.scanner import Steps, Tools


class NamedCall(JsonCallParser):
    """The text is the arguments of one function."""

    def __init__(self, name: str, tools: Tools = (), *, new_id: Callable[[], str] | None = None):
        super().__init__(tools, new_id=new_id)
        self.name = name

    def run(self) -> Steps[None]:
        self.keep()
        yield from self.skip_space()
        yield from self.named_call(self.name)


class RequiredCalls(JsonCallParser):
    """The text is a list of calls: [{"name": ..., "parameters": {...}}, ...]."""

    def run(self) -> Steps[None]:
        self.keep()
        yield from self.skip_space()
        if not (yield from self.take("[")):
            self.content(self.kept())
            return
        yield from self.skip_space()
        while (yield from self.json_call()):
            yield from self.skip_space()
            if (yield from self.take(",", "]")) != ",":
                return
            self.keep(back=1)
            yield from self.skip_space()
