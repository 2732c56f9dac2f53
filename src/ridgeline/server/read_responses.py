"""From a request of /v1/responses to chat messages and to what is asked of tools and reasoning."""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ridgeline.server.errors import ApiError
from ridgeline.server.features import Asked
from ridgeline.server.schemas.responses import ResponsesRequest
from ridgeline.server.talk import Talk, kind_of, need, text_of

TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
READS = ("tools", "tool_choice", "reasoning")


def asked(request: ResponsesRequest) -> Asked:
    """raises ApiError."""
    reasoning, template = request.reasoning, {}
    if reasoning is not None:
        if not isinstance(reasoning, Mapping):
            raise ApiError(400, f"reasoning: got {reasoning!r}; allowed: an object with effort", param="reasoning",
                           code="invalid_value")
        if reasoning.get("effort") is not None:
            template["reasoning_effort"] = reasoning["effort"]
    choice = request.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "function" not in choice:
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return Asked(_tools(request.tools), choice, parallel=request.parallel_tool_calls is not False, template=template,
                 reads=READS, schema="parameters")


def _tools(given: Any) -> Any:
    """As chat has them, a function within an object."""
    if not isinstance(given, list):
        return given
    found = []
    for at, tool in enumerate(given):
        kind = kind_of(tool)
        if kind != "function":
            raise ApiError(400, f"tools[{at}].type: got {kind!r}; allowed: 'function'; tools that a provider runs are not "
                                "known here", param="tools", code="unsupported_parameter")
        found.append({"type": "function", "function": {
            name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}})
    return found


def messages(given: str | Iterable[Mapping[str, Any]], before: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """`before`, and the items of an input behind it. raises ApiError for items and parts that are not known."""
    talk = Talk(before)
    if isinstance(given, str):
        talk.say("user", given)
        return talk.messages
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = kind_of(item, "message")
        if kind == "message":
            role = item.get("role")                      # few templates know developers
            talk.say("system" if role == "developer" else role, text_of(item.get("content"), TEXT_PARTS, f"{where}.content"))
        elif kind == "function_call":
            talk.call(need(item, "call_id", str, where), need(item, "name", str, where),
                      _arguments(need(item, "arguments", str, where), f"{where}.arguments"))
        elif kind == "function_call_output":
            talk.result(item.get("call_id"), text_of(item.get("output"), TEXT_PARTS, f"{where}.output"), f"{where}.call_id")
        elif kind == "reasoning":
            talk.reason(text_of(item.get("content") or item.get("summary") or "", REASONING_PARTS, f"{where}.content"))
        else:
            raise ApiError(400, f"{where} has type {kind!r}; allowed: {', '.join(map(repr, ITEMS))}", param=where,
                           code="unsupported_parameter")
    return talk.messages


def _arguments(text: str, where: str) -> Mapping[str, Any]:
    value: Any = None
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise ApiError(400, f"{where} is no JSON object: {text[:60]!r}", param=where, code="invalid_value")
    return value
