"""A conversation in the chat form that templates read, put together from the blocks or items of other interfaces."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ridgeline.server.errors import ApiError


class Talk:
    """Chat messages as they are put together; those of `before` are not changed.

    What an assistant reasoned, said and called, in this order, is one message, else several.
    """

    def __init__(self, before: Iterable[dict[str, Any]] = ()):
        self.messages = list(before)
        self._names = {call["id"]: call["function"]["name"] for message in self.messages
                       for call in message.get("tool_calls", ())}
        self._own: dict[str, Any] | None = None          # an assistant's message that may go on

    def say(self, role: Any, text: str) -> None:
        if role != "assistant":
            self._own = None
            self.messages.append({"role": role, "content": text})
        elif self._own is not None and not self._own["content"] and "tool_calls" not in self._own:
            self._own["content"] = text
        else:
            self._begin(text)

    def reason(self, text: str) -> None:
        self._begin("")["reasoning_content"] = text

    def call(self, id: str, name: str, arguments: Mapping[str, Any]) -> None:
        own = self._begin("") if self._own is None else self._own
        own.setdefault("tool_calls", []).append(
            {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}})
        self._names[id] = name

    def result(self, id: Any, text: str, where: str) -> None:
        """What a call gave. raises ApiError for a call that is not in the conversation."""
        if not isinstance(id, str) or id not in self._names:
            raise ApiError(400, f"{where}: got {id!r}; allowed: the id of a call earlier in the conversation", param=where,
                           code="invalid_value")
        self._own = None
        self.messages.append({"role": "tool", "tool_call_id": id, "name": self._names[id], "content": text})

    def _begin(self, content: str) -> dict[str, Any]:
        self._own = {"role": "assistant", "content": content}
        self.messages.append(self._own)
        return self._own


def text_of(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of a content: a string, or a list of parts of these kinds. raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is {type(content).__name__}; expected a string or a list of parts", param=where,
                       code="invalid_value")
    return "\n".join(part_text(part, kinds, f"{where}[{number}]") for number, part in enumerate(content))


def part_text(part: Any, kinds: Sequence[str], where: str) -> str:
    """raises ApiError for another kind of part, or one without a text."""
    kind = kind_of(part)
    if kind not in kinds or not isinstance(part.get("text"), str):
        raise ApiError(400, f"{where} has type {kind!r}; allowed: {', '.join(map(repr, kinds))} with a text", param=where,
                       code="unsupported_parameter")
    return str(part["text"])


def kind_of(part: Any, default: str | None = None) -> Any:
    """The type that a part tells of itself; of what is no object, the type that it is."""
    return part.get("type", default) if isinstance(part, Mapping) else type(part).__name__


def need(part: Mapping[str, Any], name: str, kind: type[Any], where: str) -> Any:
    """A field of a part. raises ApiError where it is missing or of another type."""
    value = part.get(name)
    if not isinstance(value, kind):
        raise ApiError(400, f"{where}.{name} is {type(value).__name__}; expected {_NAMES[kind]}", param=where,
                       code="invalid_value")
    return value


_NAMES: dict[type[Any], str] = {str: "a string", Mapping: "an object"}
