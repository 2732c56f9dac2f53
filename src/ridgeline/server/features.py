"""The one place where structured output, tools and reasoning enter a request and leave an answer.

`features` reads those fields of a request once. What it returns gives further sampling parameters, further arguments
of the chat template, and for each answer a parser that turns its text into the deltas of a chat message.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ridgeline.server.errors import ApiError


class TextParser(Protocol):
    """From the text of one answer, as it grows, to deltas of its message, {"content": ...} for one."""

    def push(self, text: str) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]:
        """What was held back when the text ended."""


class PlainText:
    """Everything is content."""

    def push(self, text: str) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def finish(self) -> list[dict[str, Any]]:
        return []


@dataclass(frozen=True)
class Features:
    """params: of SamplingParams; template: of the chat template."""

    params: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)

    def parser(self, prompt: str | None) -> TextParser:
        """A fresh parser for one answer. prompt: its text, which tells where the answer begins."""
        return PlainText()

    def message(self, deltas: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole message of an answer from all of its deltas."""
        return {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}


# Fields and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "structured_outputs": (None, {}), "response_format": (None, {"type": "text"}), "guided_json": (None,),
    "guided_regex": (None,), "guided_choice": (None,), "guided_grammar": (None,), "tools": (None, []),
    "tool_choice": (None, "none", "auto", {"type": "none"}, {"type": "auto"}), "functions": (None, []),
    "function_call": (None, "none", "auto"), "reasoning": (None, {}), "reasoning_effort": (None, "none"),
    "thinking": (None, {"type": "disabled"}), "text": (None, {"type": "text"}), "output_config": (None, {}),
}


def features(request: Any) -> Features:
    """raises ApiError for what is not supported yet. request: of any family, fields that it lacks ask for nothing."""
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(request, name, None)
        if name == "text" and isinstance(value, dict):             # of /v1/responses; a verbosity is only a wish
            value = value.get("format")
        if value not in harmless:
            raise ApiError(400, f"{name} is not supported yet by this server; leave it out", param=name,
                           code="unsupported_parameter")
    return Features()
