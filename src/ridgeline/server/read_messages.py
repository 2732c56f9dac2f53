"""From a request of /v1/messages, in Anthropic's form, to chat messages and to what is asked of tools and reasoning."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError
from ridgeline.server.features import Asked
from ridgeline.server.schemas.messages import CountRequest
from ridgeline.server.talk import Talk, kind_of, need, part_text, text_of

TEXT_BLOCKS = ("text",)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}       # Anthropic's word -> OpenAI's
THINKING = ("enabled", "adaptive", "disabled")
READS = ("tools", "tool_choice", "thinking")


def asked(request: CountRequest, config: ServerConfig) -> Asked:
    """raises ApiError."""
    tools, (choice, parallel) = _tools(request.tools), _choice(request.tool_choice)
    if choice == "required" and not tools:
        _refuse("tool_choice", "'any' without tools", "with at least one tool")
    template, shown = _thinking(request.thinking, config)
    effort = request.output_config.get("effort") if isinstance(request.output_config, Mapping) else None
    if effort is not None:
        template["reasoning_effort"] = effort
    return Asked(tools, choice, parallel=parallel, template=template, reasoning=shown, reads=READS, schema="input_schema",
                 forced="any, tool or none")


def conversation(request: CountRequest) -> list[dict[str, Any]]:
    """raises ApiError for blocks that are not known, or out of place."""
    talk = Talk()
    if request.system:
        talk.say("system", text_of(request.system, TEXT_BLOCKS, "system"))
    for index, message in enumerate(request.messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{index}].content"
        if isinstance(content, list) and content:
            _blocks(talk, role, content, where)
        else:
            talk.say(role, text_of(content, TEXT_BLOCKS, where))
    last = talk.messages[-1] if talk.messages else {}
    if last.get("tool_calls"):
        raise ApiError(400, f"messages[{len(request.messages) - 1}] ends with a tool_use block; expected a message of the user "
                            "with its tool_result behind it", param="messages", code="invalid_value")
    return talk.messages


def _blocks(talk: Talk, role: Any, content: list[Any], where: str) -> None:
    kinds = ("text", "tool_use", "thinking", "redacted_thinking") if role == "assistant" else ("text", "tool_result")
    texts: list[str] = []

    def said() -> None:
        if texts:
            talk.say(role, "\n".join(texts))
            texts.clear()

    for number, block in enumerate(content):
        at, kind = f"{where}[{number}]", kind_of(block)
        if kind not in kinds:
            raise ApiError(400, f"{at} has type {kind!r}; allowed: {', '.join(map(repr, kinds))}", param=at,
                           code="unsupported_parameter")
        if kind == "text":
            texts.append(part_text(block, TEXT_BLOCKS, at))
            continue
        said()
        if kind == "tool_use":
            talk.call(need(block, "id", str, at), need(block, "name", str, at), need(block, "input", Mapping, at))
        elif kind == "tool_result":
            talk.result(block.get("tool_use_id"), text_of(block.get("content") or "", TEXT_BLOCKS, f"{at}.content"),
                        f"{at}.tool_use_id")
        elif kind == "thinking":
            talk.reason(need(block, "thinking", str, at))
    said()


def _tools(given: Any) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    if not isinstance(given, list):
        _refuse("tools", type(given).__name__, "a list of tools")
    found = []
    for at, tool in enumerate(given):
        kind = kind_of(tool, "custom")
        if kind not in ("custom", None):
            _refuse(f"tools[{at}].type", repr(kind), "'custom'; tools that a provider runs are not known here", "tools")
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            _refuse(f"tools[{at}].input_schema", type(schema).__name__, "a JSON schema object", "tools")
        about = {"description": tool["description"]} if tool.get("description") is not None else {}
        found.append({"type": "function", "function": {"name": tool.get("name"), **about, "parameters": schema}})
    return found


def _choice(given: Any) -> tuple[Any, bool]:
    """The choice in OpenAI's form, and whether several calls may be made."""
    if given is None:
        return None, True
    kind = kind_of(given)
    if not isinstance(given, Mapping) or not isinstance(kind, str) or (kind not in CHOICES and kind != "tool"):
        _refuse("tool_choice.type", repr(kind), ", ".join([*CHOICES, "tool"]), "tool_choice")
    parallel = not given.get("disable_parallel_tool_use")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    return CHOICES[kind], parallel


def _thinking(given: Any, config: ServerConfig) -> tuple[dict[str, Any], bool]:
    """Arguments of the chat template, under the two names that templates use, and whether reasoning is shown."""
    if given is None:
        return {}, True
    kind = kind_of(given)
    if not isinstance(given, Mapping) or kind not in THINKING:
        _refuse("thinking.type", repr(kind), ", ".join(THINKING), "thinking")
    if kind == "enabled" and config.reasoning_parser is None:
        raise ApiError(400, "thinking: this server does not know the model's format of reasoning; start it with "
                            "--reasoning-parser, or leave thinking out", param="thinking", code="unsupported_parameter")
    if kind == "adaptive":                               # as the model does by itself
        return {}, given.get("display") != "omitted"
    on = kind == "enabled"
    return {"enable_thinking": on, "thinking": on}, on and given.get("display") != "omitted"


def _refuse(where: str, got: str, allowed: str, param: str | None = None) -> NoReturn:
    raise ApiError(400, f"{where}: got {got}; allowed: {allowed}", param=param or where, code="invalid_value")
