"""Forced tool calls of a real model that was never taught any, by the official clients."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from ridgeline import LLM, hub
from ridgeline.cli.options import read_text
from ridgeline.errors import ModelNotFound
from server_kit import Running, client_of

TEMPLATE = """\
{{ bos_token }}{% if tools %}Tools: {{ tools | map(attribute='function') | list | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
ORDER: dict[str, Any] = {
    "type": "object", "properties": {
        "dish": {"enum": ["soup", "bread"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 12}},
    "required": ["dish", "count", "note"], "additionalProperties": False}
ABOUT = "Order a dish"
SAYS: Any = [{"role": "user", "content": "Two soups, please."}]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    try:
        hub.resolve("gemma3-270m")
    except ModelNotFound as missing:
        pytest.skip(f"needs the packaged model: {missing}")
    path: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TEMPLATE)
    llm = LLM("gemma3-270m", max_model_len=1024, kv_cache_memory_bytes=1 << 28, progress=False, threads=1,
              chat_template=read_text(str(path), "chat template"))
    with Running(llm, model="gemma3-270m") as server:
        yield server


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "order"}], ids=["any", "tool"])
def test_calls_by_the_anthropic_client(gemma: Running, choice: Any) -> None:
    tools: Any = [{"name": "order", "description": ABOUT, "input_schema": ORDER}]
    choice = {**choice, "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=gemma.url, api_key="none", max_retries=0, timeout=60) as claude:
        request: dict[str, Any] = {"model": "gemma3-270m", "max_tokens": 100, "messages": SAYS, "tools": tools,
                                   "tool_choice": choice, "extra_body": {"temperature": 0.0}}
        answer = claude.messages.create(**request)
        with claude.messages.stream(**request) as stream:
            message = stream.get_final_message()
        for found in (answer, message):
            (block,) = found.content
            assert found.stop_reason == "tool_use" and block.type == "tool_use" and block.name == "order"
            jsonschema.validate(block.input, ORDER)
        assert answer.content[0].input == message.content[0].input                          # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "ready"}       # type: ignore[union-attr]
        back = [*SAYS, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        again = claude.messages.create(**{**request, "messages": back, "tool_choice": {"type": "none"}, "max_tokens": 5})
        assert again.content[0].type == "text" and again.usage.output_tokens == 5


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "order"}], ids=["required", "named"])
def test_calls_by_the_openai_client(gemma: Running, choice: Any) -> None:
    tools: Any = [{"type": "function", "name": "order", "description": ABOUT, "parameters": ORDER, "strict": True}]
    with client_of(gemma.url) as client:
        request: dict[str, Any] = {"model": "gemma3-270m", "max_output_tokens": 100, "input": SAYS, "tools": tools,
                                   "tool_choice": choice, "temperature": 0, "parallel_tool_calls": False}
        answer = client.responses.create(**request)
        with client.responses.stream(**request) as stream:
            final: Any = stream.get_final_response()
        (call,) = answer.output
        assert isinstance(call, openai.types.responses.ResponseFunctionToolCall) and call.name == "order"
        jsonschema.validate(json.loads(call.arguments), ORDER)
        assert final.output[0].arguments == call.arguments
        again = client.responses.create(model="gemma3-270m", previous_response_id=answer.id, max_output_tokens=5, input=[
            {"type": "function_call_output", "call_id": call.call_id, "output": "ready"}])
        assert again.output_text and again.usage is not None and answer.usage is not None
        assert again.usage.input_tokens > 0
