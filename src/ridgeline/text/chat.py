"""Chat messages to a prompt, by the model's own Jinja template in a sandbox.

The environment offers what templates written for Hugging Face's `apply_chat_template` use: trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that keeps non-ASCII text, and the `generation` block tag.
A template is code from a stranger: it runs in Jinja's immutable sandbox and can read nothing but its arguments.
"""
from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ridgeline.errors import InvalidPrompt
from ridgeline.text.tokenizer import Tokenizer

# What code in a template can raise besides Jinja's own errors: it may index, compare and add what it likes.
_TEMPLATE_CODE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **kwargs: Any,
) -> str:
    """The prompt for a conversation, special tokens spelled out: encode it with add_special_tokens=False.

    `messages` are {"role": str, "content": str | [{"type": "text", "text": str}, ...]} in the OpenAI form;
    `chat_template` replaces the model's own; `kwargs` are passed to the template. A generation prompt is added unless
    the answer shall continue the last message (`continue_final_message`), whose end the prompt then lacks. Raises
    InvalidPrompt for malformed messages, for a model without a template and for whatever the template rejects.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidPrompt("add_generation_prompt and continue_final_message are both true; at most one can be")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    source = chat_template
    if source is None and tools:
        source = tokenizer.chat_templates.get("tool_use")
    if source is None:
        source = tokenizer.chat_template
    if source is None:
        raise InvalidPrompt("this model has no chat template, so chat messages cannot be turned into a prompt; "
                            "pass one with --chat-template FILE (chat_template= in Python), or send a plain prompt")
    try:
        template, takes_parts = _compile(source)
    except jinja2.TemplateError as error:
        raise InvalidPrompt(f"the chat template is not valid: {_describe(error)}") from error
    checked = [_check_message(index, message, takes_parts) for index, message in enumerate(messages)]
    if not checked:
        raise InvalidPrompt("messages is empty; expected at least one message")
    arguments = tokenizer.named_tokens | {
        "messages": checked,
        "tools": None if not tools else [dict(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    } | kwargs
    try:
        rendered = template.render(arguments)
    except jinja2.TemplateError as error:
        raise InvalidPrompt(f"the chat template rejected the messages: {_describe(error)}") from error
    except _TEMPLATE_CODE_ERRORS as error:
        raise InvalidPrompt(f"the chat template failed: {type(error).__name__}: {error}") from error
    return _without_end(rendered, checked[-1]) if continue_final_message else rendered


def _without_end(rendered: str, message: Mapping[str, Any]) -> str:
    """A rendered conversation up to where the text of its last message ends."""
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content[-1:])
    for form in (text, text.strip()):                    # templates often strip what they show
        at = rendered.rfind(form)
        if form and at >= 0:
            return rendered[:at + len(form)]
    raise InvalidPrompt("the last message has no text that the chat template shows, so that nothing can be continued")


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source), _loops_over_content(environment.parse(source))


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template goes through a message's content part by part, and so takes lists."""
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
            aliases.add(assign.target.name)
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, aliases: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in aliases


def _check_message(index: int, message: Any, takes_parts: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidPrompt(f"{where} is {type(message).__name__}; expected an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"{where}.role is {role!r}; expected a non-empty string such as 'user'")
    checked = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [_check_part(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
        checked["content"] = parts if takes_parts else "\n".join(part["text"] for part in parts)
    elif content is None and message.get("tool_calls"):
        checked["content"] = ""
    elif not isinstance(content, str):
        raise InvalidPrompt(f"{where}.content is {type(content).__name__}; expected a string or a list of text parts")
    if message.get("tool_calls"):
        checked["tool_calls"] = _parsed_tool_calls(where, message["tool_calls"])
    return checked


def _check_part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidPrompt(f"{where} has type {kind!r}; allowed: 'text'")
    if not isinstance(part.get("text"), str):
        raise InvalidPrompt(f"{where}.text is {type(part.get('text')).__name__}; expected a string")
    return dict(part)


def _parsed_tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """The API carries arguments as JSON text; templates write the object out themselves."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidPrompt(f"{where}.tool_calls: expected a list of objects")
    result = []
    for number, call in enumerate(calls):
        call = dict(call)
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                parsed = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise InvalidPrompt(f"{where}.tool_calls[{number}].function.arguments is not JSON: {error}") from error
            call["function"] = {**function, "arguments": parsed}
        result.append(call)
    return result


def _describe(error: jinja2.TemplateError) -> str:
    line = getattr(error, "lineno", None)
    return f"{error.message or type(error).__name__}" + (f" (line {line})" if line else "")


