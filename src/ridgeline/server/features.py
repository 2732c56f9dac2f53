"""The one place where structured output, tools and reasoning enter a request and leave an answer.

`features` reads those fields of a request once. What it returns gives further sampling parameters, further arguments
of the chat template, and for each answer a parser that turns its text into the deltas of a chat message.
"""
from __future__ import annotations

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
    output_parser,
    reasoning_frame,
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


class _Deltas:
    """The deltas of an answer."""

    def __init__(self, parser: OutputParser, features: Features):
        self._parser, self._features = parser, features

    def push(self, text: str) -> list[dict[str, Any]]:
        return self._told(self._parser.push(text))

    def finish(self) -> list[dict[str, Any]]:
        return self._told(self._parser.finish())

    def _told(self, events: list[Event]) -> list[dict[str, Any]]:
        deltas = [Delta(event) for event in events if self._features.shows(event)]
        return [delta for delta in deltas if delta or isinstance(delta.event, ToolCallCut)]


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
        opening, after = reasoning_frame(self.reasoning_parser, prompt)
        if form is None or after is None:
            return self.params
        return {**self.params, "structured_outputs": replace(form, opening=opening, after=after)}

    def parser(self, prompt: str | None) -> TextParser:
        """A fresh parser for one answer. prompt: its text, which tells where the answer begins."""
        return _Deltas(self.text_parser(prompt or ""), self)

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


# Fields and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []), "function_call": (None, "none", "auto"), "reasoning": (None, {}),
    "thinking": (None, {"type": "disabled"}),
}
# Of interfaces whose answers cannot carry calls yet.
_CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "none", "auto", {"type": "none"}, {"type": "auto"}),
    "reasoning_effort": (None, "none"),
}


def features(request: Any, config: ServerConfig | None = None) -> Features:
    """raises ApiError for what is wrong or not supported. request: of any family, fields that it lacks ask for nothing.

    config: of the server, for an interface whose answers carry tool calls and reasoning.
    """
    refused = _UNSUPPORTED if config is not None else {**_UNSUPPORTED, **_CHAT_ONLY}
    for name, harmless in refused.items():
        if getattr(request, name, None) not in harmless:
            raise ApiError(400, f"{name} is not supported yet by this server; leave it out", param=name,
                           code="unsupported_parameter")
    form = asked_form(request)
    found = Features() if config is None else _chat(request, config)
    schema = found.choice.schema
    if schema is not None:
        if form is not None:
            raise ApiError(400, f"tool_choice: got {request.tool_choice!r} beside {form[0]}; allowed: one of them",
                           param="tool_choice", code="invalid_value")
        form = "tools", checked_form("tools", {"json": schema})
    if form is None:
        return found
    return replace(found, params={**found.params, "structured_outputs": form[1]})


def _chat(request: Any, config: ServerConfig) -> Features:
    try:
        choice = tool_choice(request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False)
    except InvalidParams as error:
        raise api_error(error) from error
    if choice.kind == "auto" and config.tool_call_parser is None:
        raise ApiError(400, "tools: this server does not know the model's format of tool calls; start it "
                            f"with --tool-call-parser ({', '.join(TOOL_PARSERS)}), or send tool_choice 'required', 'none' or a "
                            "function",
                       param="tools", code="unsupported_parameter")
    template: dict[str, Any] = {} if choice.template_tools is None else {"tools": choice.template_tools}
    if request.reasoning_effort is not None:
        template["reasoning_effort"] = request.reasoning_effort
    found = Features(template=template, choice=choice, tool_parser=config.tool_call_parser,
                     reasoning_parser=config.reasoning_parser, reasoning=request.include_reasoning is not False)
    special = found.text_parser("").special
    return replace(found, params={"skip_special_tokens": False}) if special else found
