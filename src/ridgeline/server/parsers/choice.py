"""What the `tools` and `tool_choice` of a request mean for the prompt and for the grammar of the answer."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import InvalidParams
from ridgeline.server.parsers.scanner import Tools

CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolChoice:
    """A checked request. kind: none | auto | required | named; tools: those whose calls may be made."""

    kind: str = "none"
    tools: tuple[Mapping[str, Any], ...] = ()
    name: str | None = None
    parallel: bool = True           # whether an answer may hold several calls

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The `tools` argument of the chat template."""
        return None if self.kind == "none" or not self.tools else [dict(tool) for tool in self.tools]

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must have: of a list of calls, or of the named function's arguments."""
        if self.kind == "named":
            return next(_parameters(tool) for tool in self.tools if tool["function"]["name"] == self.name)
        if self.kind != "required":
            return None
        return required_schema(self.tools) | ({} if self.parallel else {"maxItems": 1})


def tool_choice(tools: Any, choice: Any = None, *, parallel: bool = True) -> ToolChoice:
    """The request's `tools` and `tool_choice` in the OpenAI form. raises InvalidParams; choice None: auto with tools."""
    checked = _checked(tools)
    if choice is None:
        choice = "auto" if checked else "none"
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise InvalidParams(f"tool_choice: got {choice!r}; allowed: {', '.join(CHOICES)}, or "
                                '{"type": "function", "function": {"name": ...}}')
        if choice == "required" and not checked:
            raise InvalidParams("tool_choice: got 'required' without tools; allowed: with at least one tool")
        return ToolChoice(choice if checked else "none", checked, None, parallel)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidParams(f"tool_choice: got {choice!r}; allowed: {', '.join(CHOICES)}, or "
                            '{"type": "function", "function": {"name": ...}}')
    names = [tool["function"]["name"] for tool in checked]
    if name not in names:
        raise InvalidParams(f"tool_choice: got the function {name!r}; allowed: the tools, {', '.join(names) or '(none given)'}")
    return ToolChoice("named", checked, name, parallel)


def _checked(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidParams(f"tools: got {type(tools).__name__}; allowed: a list of tools")
    seen: set[str] = set()
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise InvalidParams(f"{where}: got {kind!r}; allowed: objects of type 'function'")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidParams(f"{where}.function.name: got {name!r}; allowed: 1 to 64 letters, digits, '_', '-' and '.'")
        if name in seen:
            raise InvalidParams(f"{where}.function.name: got {name!r} twice; allowed: different names")
        seen.add(name)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidParams(f"{where}.function.parameters: got {type(parameters).__name__}; allowed: a JSON schema object")
    return tuple(tools)


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whatever the schema leaves open."""
    schema = dict(tool["function"].get("parameters") or {})
    schema.setdefault("type", "object")
    return schema


def required_schema(tools: Tools) -> dict[str, Any]:
    """The schema of a list of at least one call. Definitions of a tool's schema move to the top, under its name."""
    calls, definitions = [], {}
    for tool in tools:
        name, schema = tool["function"]["name"], _parameters(tool)
        for group in ("$defs", "definitions"):
            own = schema.pop(group, None)
            for key, value in (own.items() if isinstance(own, Mapping) else ()):
                definitions[f"{name}.{key}"] = _moved(value, name)
        calls.append({
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": _moved(schema, name)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        })
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    return whole | ({"$defs": definitions} if definitions else {})


def _moved(schema: Any, name: str) -> Any:
    """The same with references to a tool's own definitions pointing to where these have moved."""
    if isinstance(schema, Mapping):
        out = {key: _moved(value, name) for key, value in schema.items()}
        reference = out.get("$ref")
        for group in ("#/$defs/", "#/definitions/"):
            if isinstance(reference, str) and reference.startswith(group):
                out["$ref"] = f"#/$defs/{name}.{reference[len(group):]}"
        return out
    return [_moved(item, name) for item in schema] if isinstance(schema, list) else schema
