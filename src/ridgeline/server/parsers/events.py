"""What a parser finds in a model's output, piece by piece, and the whole message that the pieces add up to."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """index counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the call's arguments; the pieces of a call that ends are a JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is whole. Says nothing to a client of a stream."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCallCut:
    """The output ended inside the call. A stream has told its beginning already; `text` is what the model wrote, which a
    whole answer shows as content."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallCut


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbouring pieces of one kind joined and empty ones left out: equal for equal outputs."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            out[-1] = replace(last, text=last.text + event.text)
        elif not isinstance(event, Content | Reasoning | ToolCallArguments) or event.text:
            out.append(event)
    return out


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A whole answer. None where there was no text of that kind."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> Message:
    """The message of a finished output. A call that was cut off is shown as the text it was."""
    message, calls = Message(), dict[int, ToolCall]()
    for event in events:
        match event:
            case Content(text):
                message.content = (message.content or "") + text
            case Reasoning(text):
                message.reasoning = (message.reasoning or "") + text
            case ToolCallStart(index, id, name):
                calls[index] = ToolCall(id, name)
            case ToolCallArguments(index, text):
                calls[index].arguments += text
            case ToolCallCut(index, text):
                del calls[index]
                message.content = (message.content or "") + text
            case ToolCallEnd():
                pass
    message.tool_calls = [calls[index] for index in sorted(calls)]
    return message
