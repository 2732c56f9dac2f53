"""From the text of an answer to reasoning, content and tool calls, while it is being written.

    parser = output_parser("hermes", "qwen3", choice=tool_choice(request.tools, request.tool_choice), prompt=prompt)
    for delta in stream:
        for event in parser.push(delta): ...
    for event in parser.finish(): ...

For every way in which a text is cut into deltas the events add up to the same (`merged`, `collect`), and no text is lost.
"""
from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from ridgeline.errors import ConfigError
from ridgeline.server.parsers.choice import ToolChoice, required_schema, tool_choice
from ridgeline.server.parsers.events import (
    Content,
    Event,
    Message,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
    collect,
    merged,
)
from ridgeline.server.parsers.scanner import Parser

__all__ = [
    "REASONING_PARSERS", "TOOL_PARSERS", "Content", "Event", "Message", "OutputParser", "Parser", "Reasoning", "ToolCall",
    "ToolCallArguments", "ToolCallCut", "ToolCallEnd", "ToolCallStart", "ToolChoice", "check_parsers", "collect",
    "form_frame", "merged", "output_parser", "required_schema", "tool_choice",
]

TOOL_PARSERS = {                                 # --tool-call-parser: name -> module:class
    "hermes": "hermes:Hermes",
    "llama3_json": "llama3_json:Llama3Json",
    "mistral": "mistral:Mistral",
    "pythonic": "pythonic:Pythonic",
    "deepseek_v3": "deepseek_v3:DeepSeekV3",
    "qwen3_coder": "qwen3_coder:Qwen3Coder",
    "gpt_oss": "harmony:Harmony",
}
REASONING_PARSERS = {                            # --reasoning-parser
    "deepseek_r1": "think:DeepSeekR1",
    "qwen3": "think:Qwen3",
    "gpt_oss": "harmony:HarmonyReasoning",
}


class OutputParser(Protocol):
    """What the server feeds with the text of one answer."""

    @property
    def special(self) -> bool:
        """Whether the text must be decoded with skip_special_tokens=False."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """raises ConfigError for an unknown name, which lists the valid ones, and for two that do not go together."""
    for flag, name, known in (("tool_call_parser", tool_parser, TOOL_PARSERS),
                              ("reasoning_parser", reasoning_parser, REASONING_PARSERS)):
        if name is not None and name not in known:
            raise ConfigError(f"{flag} is {name!r}; valid: {', '.join(known)}")
    names = {tool_parser, reasoning_parser} - {None}
    if "gpt_oss" in names and len(names) > 1:
        raise ConfigError(f"tool_call_parser is {tool_parser!r} and reasoning_parser {reasoning_parser!r}; gpt_oss reads both "
                          "from one format and goes with no other")


def output_parser(tool_parser: str | None = None, reasoning_parser: str | None = None, *,
                  choice: ToolChoice | None = None, prompt: str = "",
                  new_id: Callable[[], str] | None = None) -> OutputParser:
    """A parser for one answer. raises ConfigError for an unknown name.

    choice: the request's tools; with kind "none" calls are not looked for, with "required" and "named" the grammar of
    `choice.schema` has made the answer JSON. prompt: the prompt's text, whose end tells whether the answer begins within
    reasoning.
    """
    check_parsers(tool_parser, reasoning_parser)
    from ridgeline.server.parsers.forced import NamedCall, RequiredCalls
    from ridgeline.server.parsers.think import left_open

    choice = choice or ToolChoice()
    calls: Parser | None = None
    if choice.kind == "named":
        assert choice.name is not None, "a named choice names its function"
        calls = NamedCall(choice.name, choice.tools, new_id=new_id)
    elif choice.kind == "required":
        calls = RequiredCalls(choice.tools, new_id=new_id)
    elif choice.kind == "auto" and tool_parser is not None:
        calls = _load(TOOL_PARSERS[tool_parser])(choice.tools, new_id=new_id)
    reasoning: Parser | None = None
    if "gpt_oss" in (tool_parser, reasoning_parser):
        if calls is not None and choice.kind == "auto":
            return calls
        reasoning = _load(REASONING_PARSERS["gpt_oss"])()
    elif reasoning_parser is not None:
        reasoning = _load(REASONING_PARSERS[reasoning_parser])(inside=left_open(prompt))
    if reasoning is None:
        return calls if calls is not None else _Plain()
    return reasoning if calls is None else _Chain(reasoning, calls)


def form_frame(tool_parser: str | None, reasoning_parser: str | None, prompt: str, choice: ToolChoice) -> dict[str, Any]:
    """Which part of an answer to this prompt the form that a request asks for applies to: fields of StructuredOutputsParams.

    Empty: to all of it.
    """
    from ridgeline.server.parsers.harmony import in_message
    from ridgeline.server.parsers.think import CLOSE, OPEN, left_open

    if "gpt_oss" in (tool_parser, reasoning_parser):
        return {} if in_message(prompt) else {"channel": "final", "calls": choice.kind == "auto"}
    if reasoning_parser is None:
        return {}
    inside = left_open(prompt)
    if inside is None and reasoning_parser == "qwen3":
        return {"opening": OPEN, "after": CLOSE}
    return {} if inside is False else {"after": CLOSE}


class _Plain:
    """Everything is content."""

    special = False

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class _Chain:
    """Reasoning first; the calls are looked for in what it leaves as content."""

    def __init__(self, reasoning: Parser, calls: Parser):
        self.reasoning, self.calls = reasoning, calls
        self.special = reasoning.special or calls.special

    def push(self, text: str) -> list[Event]:
        return self._pass(self.reasoning.push(text))

    def finish(self) -> list[Event]:
        return merged([*self._pass(self.reasoning.finish()), *self.calls.finish()])

    def _pass(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out += self.calls.push(event.text) if isinstance(event, Content) else [event]
        return merged(out)


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"ridgeline.server.parsers.{module}"), name)
