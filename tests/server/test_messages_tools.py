"""Tools and thinking on /v1/messages with the official client, streamed and not."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from script_kit import CALL, says
from server_kit import Running

WEATHER: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"],
    "additionalProperties": False}}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
ASK: Any = [{"role": "user", "content": "The sea"}]


@pytest.fixture
def claude(parsing: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=parsing.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(claude: anthropic.Anthropic, **fields: Any) -> Any:
    return claude.messages.create(**{"model": "tiny", "max_tokens": 200, "messages": ASK, "tools": [WEATHER, NOW], **fields})


def streamed(claude: anthropic.Anthropic, **fields: Any) -> tuple[Any, list[Any]]:
    """The message that the client's helper puts together, and the raw events."""
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": ASK, "tools": [WEATHER, NOW], **fields}
    with claude.messages.stream(**request) as stream:
        raw = [event for event in stream if event.type.startswith(("message_", "content_block_"))]
        return stream.get_final_message(), raw


def plain(message: Any) -> list[dict[str, Any]]:
    """Content without ids, which are drawn anew."""
    return [{name: value for name, value in block.model_dump(exclude_none=True).items() if name != "id"}
            for block in message.content]


def test_thinking_text_and_calls_become_blocks(parsing: Running, claude: anthropic.Anthropic) -> None:
    says(parsing, f"<think>\nHm.\n</think>\n\nI look. {CALL}\n{CALL}")
    answer = ask(claude)
    call = {"type": "tool_use", "name": "get_weather", "input": {"city": '海 }"{'}}
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert plain(answer)[1:] == [{"type": "text", "text": "I look. "}, call, call]
    assert answer.content[0].thinking == "Hm." and answer.content[0].signature
    assert answer.stop_reason == "tool_use" and answer.content[2].id != answer.content[3].id
    message, events = streamed(claude)
    assert plain(message) == plain(answer) and message.stop_reason == "tool_use"
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2, 3]
    assert starts[2].content_block.name == "get_weather" and starts[2].content_block.input == {}
    deltas = [event.delta for event in events if event.type == "content_block_delta" and event.index == 2]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta.partial_json for delta in deltas)) == call["input"]
    one = ask(claude, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]
    none = ask(claude, tool_choice={"type": "none"})
    assert none.content[-1].text == f"I look. {CALL}\n{CALL}" and none.stop_reason == "end_turn"


def test_thinking_can_be_left_out(parsing: Running, claude: anthropic.Anthropic) -> None:
    says(parsing, "<think>\nHm.\n</think>\n\nCalm.")
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        assert plain(ask(claude, thinking=thinking)) == [{"type": "text", "text": "Calm."}]
        assert plain(streamed(claude, thinking=thinking)[0]) == [{"type": "text", "text": "Calm."}]
    on = ask(claude, thinking={"type": "enabled", "budget_tokens": 100})
    assert [block.type for block in on.content] == ["thinking", "text"]


def test_a_call_that_is_cut_off(parsing: Running, claude: anthropic.Anthropic) -> None:
    says(parsing, CALL[:-20])
    answer = ask(claude)
    assert plain(answer) == [{"type": "text", "text": CALL[:-20]}] and answer.stop_reason == "end_turn"
    _, events = streamed(claude)
    assert [e.content_block.type for e in events if e.type == "content_block_start"] == ["tool_use"]
    says(parsing, '<tool_call>{"name": "now", "arguments": {"a": nope}}</tool_call>')
    assert plain(ask(claude)) == [{"type": "text", "text": 'now {"a": nope}'}]


def test_a_conversation_with_calls_reaches_the_template(parsing: Running, claude: anthropic.Anthropic) -> None:
    says(parsing, f"<think>\nHm.\n</think>\n\nI look. {CALL}")
    first = ask(claude)
    call = first.content[-1]
    back: Any = [*ASK, {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
                 {"role": "user", "content": [
                     {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},
                     {"type": "tool_result", "tool_use_id": call.id, "is_error": True},
                     {"type": "text", "text": "And?"}]}]
    expected = parsing.llm.frontend.render([
        *ASK, {"role": "assistant", "content": "I look. ", "reasoning_content": "Hm.", "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": "get_weather", "arguments": call.input}}]},
        {"role": "tool", "content": "rain", "tool_call_id": call.id, "name": "get_weather"},
        {"role": "tool", "content": "", "tool_call_id": call.id, "name": "get_weather"},
        {"role": "user", "content": "And?"}], tools=[as_function(WEATHER), as_function(NOW)])
    says(parsing, "Rain.")
    answer = ask(claude, messages=back)
    assert plain(answer) == [{"type": "text", "text": "Rain."}]
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(expected)
    count = claude.messages.count_tokens(model="tiny", messages=back, tools=[WEATHER, NOW]).input_tokens
    assert count == len(expected) > claude.messages.count_tokens(model="tiny", messages=back).input_tokens


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    about = {"description": tool["description"]} if "description" in tool else {}
    return {"type": "function", "function": {"name": tool["name"], **about, "parameters": tool["input_schema"]}}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"},
                                    {"type": "any", "disable_parallel_tool_use": True}], ids=["any", "tool", "one"])
def test_forced_calls_are_valid(server: Running, choice: Any) -> None:
    """Of a random model, with no parser at all."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as claude:
        greedy = {"temperature": 0.0}
        answer = ask(claude, tool_choice=choice, extra_body=greedy)
        message, _ = streamed(claude, tool_choice=choice, extra_body=greedy)
        for found in (answer, message):
            assert found.stop_reason == "tool_use" and {block.type for block in found.content} == {"tool_use"}
            for block in found.content:
                schema = {tool["name"]: tool["input_schema"] for tool in (WEATHER, NOW)}[block.name]
                jsonschema.validate(block.input, schema)
        assert plain(answer) == plain(message)
        if "disable_parallel_tool_use" in choice or "name" in choice:
            assert len(answer.content) == 1


@pytest.mark.parametrize("extra, message", [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: got 'web_search_20250305'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: got NoneType"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: got 'a b'"),
    ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type: got 'required'; allowed: auto, any, none, tool"),
    ({"tool_choice": {"type": "any"}}, "got 'any' without tools"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "g"}}, "got the function 'g'; allowed: the tools, now"),
    ({"tools": [NOW]}, "or send tool_choice any, tool or none"),
    ({"tools": [{"name": "f", "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}}, "keyword 'not'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "start it with --reasoning-parser"),
    ({"thinking": {"type": "much"}}, "thinking.type: got 'much'; allowed: enabled, adaptive, disabled"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
     "messages[0].content[0].tool_use_id: got 'x'; allowed: the id of a call earlier"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]}, "has type 'tool_use'; allowed: 'text', "),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": "{}"}]}]},
     "messages[0].content[0].input is str; expected an object"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
     "messages[0] ends with a tool_use block"),
])
def test_mistakes_name_their_place(http: httpx.Client, extra: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 5, "messages": ASK, **extra})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
