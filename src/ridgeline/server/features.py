"""The one place where structured output, tools and reasoning enter a request and leave an answer.

`features` reads those fields of a request once. What it returns gives further sampling parameters, further arguments
of the chat template, and for each answer a reader that turns its text into events, or into the deltas of a chat message.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ridgeline.errors import InvalidParams
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError, api_error
from ridgeline.server.forms import asked_form, checked_form
from ridgeline.server.parsers import (
    TOOL_PARSERS,
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    ToolCallCut,
    ToolCallStart,
    ToolChoice,
    collect,
    form_frame,
    output_parser,
    tool_choice,
)


class TextParser(Protocol):
    """From the text of one answer, as it grows, to deltas of its message, {"content": ...} for one."""

    def push(self, text: str) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]:
        """What was held back when the text ended."""


class Delta(dict[str, Any]):
    """A delta that remembers the event it tells. Of a call that was cut off there is nothing more to tell."""

    def __init__(self, event: Event):
        super().__init__(_fields(event))
        self.event = event


def _fields(event: Event) -> dict[str, Any]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return {}


class Reader:
    """The events of one answer that its request wants to see."""

    def __init__(self, parser: OutputParser, features: Features):
        self._parser, self._features = parser, features

    def push(self, text: str) -> list[Event]:
        return [event for event in self._parser.push(text) if self._features.shows(event)]

    def finish(self) -> list[Event]:
        """What was held back when the text ended."""
        return [event for event in self._parser.finish() if self._features.shows(event)]


class _Deltas:
    """The deltas of an answer."""

    def __init__(self, reader: Reader):
        self._reader = reader

    def push(self, text: str) -> list[dict[str, Any]]:
        return _told(self._reader.push(text))

    def finish(self) -> list[dict[str, Any]]:
        return _told(self._reader.finish())


def _told(events: list[Event]) -> list[dict[str, Any]]:
    return [delta for delta in map(Delta, events) if delta or isinstance(delta.event, ToolCallCut)]


@dataclass(frozen=True)
class Asked:
    """What a request asks of tools and reasoning, in the form of OpenAI's chat interface, whatever its own form.

    reads: the fields of the request that are read for it; schema: its name for the schema of a tool's arguments, where a
    tool is no object within an object; forced: the values of its tool_choice that need no parser of calls.
    """

    tools: Any = None
    choice: Any = None
    parallel: bool = True           # whether an answer may hold several calls
    template: Mapping[str, Any] = field(default_factory=dict)       # further arguments of the chat template
    reasoning: bool = True          # whether reasoning is shown
    reads: tuple[str, ...] = ()
    schema: str | None = None
    forced: str = "'required', 'none' or a function"

    @classmethod
    def of_chat(cls, request: Any) -> Asked:
        effort = request.reasoning_effort
        return cls(request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False,
                   template={} if effort is None else {"reasoning_effort": effort},
                   reasoning=request.include_reasoning is not False, reads=("tools", "tool_choice", "reasoning_effort"))


@dataclass(frozen=True)
class Features:
    """params: of SamplingParams; template: of the chat template."""

    params: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    choice: ToolChoice = field(default_factory=ToolChoice)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning: bool = True          # whether reasoning is shown

    def params_for(self, prompt: str) -> dict[str, Any]:
        """`params`, with the form of the output asked for only behind the reasoning that this prompt leaves room for."""
        form = self.params.get("structured_outputs")
        if form is None:
            return self.params
        frame = form_frame(self.tool_parser, self.reasoning_parser, prompt, self.choice)
        return {**self.params, "structured_outputs": replace(form, **frame)}

    def reader(self, prompt: str) -> Reader:
        """A fresh reader of one answer. prompt: its text, which tells where the answer begins."""
        return Reader(self.text_parser(prompt), self)

    def parser(self, prompt: str) -> TextParser:
        """As `reader`, for the deltas of a chat message."""
        return _Deltas(self.reader(prompt))

    def text_parser(self, prompt: str) -> OutputParser:
        return output_parser(self.tool_parser, self.reasoning_parser, choice=self.choice, prompt=prompt)

    def shows(self, event: Event) -> bool:
        if isinstance(event, Content):
            return True
        return self.reasoning if isinstance(event, Reasoning) else self.choice.parallel or event.index == 0

    def message(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole message of an answer from all of its deltas."""
        found = collect(delta.event for delta in deltas if isinstance(delta, Delta))
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.content is None and not found.tool_calls:
            message["content"] = ""
        if found.reasoning is not None:
            message["reasoning_content"] = found.reasoning
        if found.tool_calls:
            message["tool_calls"] = [{"id": call.id, "type": "function",
                                      "function": {"name": call.name, "arguments": call.arguments}}
                                     for call in found.tool_calls]
        return message


# Fields that not every interface reads, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []), "function_call": (None, "none", "auto"), "reasoning": (None, {}),
    "thinking": (None, {"type": "disabled"}), "tools": (None, []),
    "tool_choice": (None, "none", "auto", {"type": "none"}, {"type": "auto"}), "reasoning_effort": (None, "none"),
}


def features(request: Any, config: ServerConfig, asked: Asked | None = None) -> Features:
    """raises ApiError for what is wrong or not supported. request: of any family, fields that it lacks ask for nothing.

    asked: of an interface whose answers carry tool calls and reasoning.
    """
    for name, harmless in _UNSUPPORTED.items():
        if (asked is None or name not in asked.reads) and getattr(request, name, None) not in harmless:
            raise ApiError(400, f"{name} is not supported by this interface; leave it out", param=name,
                           code="unsupported_parameter")
    form = asked_form(request)
    found = Features() if asked is None else _conversing(asked, config)
    schema = found.choice.schema
    if schema is not None:
        if form is not None:
            raise ApiError(400, f"tool_choice: got {request.tool_choice!r} beside {form[0]}; allowed: one of them",
                           param="tool_choice", code="invalid_value")
        form = "tools", checked_form("tools", {"json": schema})
    if form is None:
        return found
    return replace(found, params={**found.params, "structured_outputs": form[1]})


def _conversing(asked: Asked, config: ServerConfig) -> Features:
    try:
        choice = tool_choice(asked.tools, asked.choice, parallel=asked.parallel)
    except InvalidParams as error:
        message = str(error)
        if asked.schema is not None:
            message = message.replace(".function.parameters", f".{asked.schema}").replace(".function.name", ".name")
        raise api_error(InvalidParams(message)) from error
    if choice.kind == "auto" and config.tool_call_parser is None:
        raise ApiError(400, "tools: this server does not know the model's format of tool calls; start it "
                            f"with --tool-call-parser ({', '.join(TOOL_PARSERS)}), or send tool_choice {asked.forced}",
                       param="tools", code="unsupported_parameter")
    template = {**asked.template, **({} if choice.template_tools is None else {"tools": choice.template_tools})}
    found = Features(template=template, choice=choice, tool_parser=config.tool_call_parser,
                     reasoning_parser=config.reasoning_parser, reasoning=asked.reasoning)
    special = found.text_parser("").special
    return replace(found, params={"skip_special_tokens": False}) if special else found
