"""Tools and reasoning on /v1/responses with the official client, streamed and not."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from script_kit import CALL, says
from server_kit import Running, client_of

WEATHER: Any = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"],
    "additionalProperties": False}, "strict": True}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {},
                                                              "additionalProperties": False}, "strict": True}
TOOLS = [WEATHER, NOW]
CHAT_TOOLS = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]


@pytest.fixture
def open_client(parsing: Running) -> Iterator[openai.OpenAI]:
    with client_of(parsing.url) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "max_output_tokens": 200, "input": "The sea", "tools": TOOLS, **fields})


def shown(response: Any) -> list[tuple[str, str]]:
    """(type, text or name and arguments) of each item, without ids."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, f"{item.name} {item.arguments}"))
        else:
            found.append((item.type, item.content[0].text))
    return found


def test_reasoning_text_and_calls_become_items(parsing: Running, open_client: openai.OpenAI) -> None:
    says(parsing, f"<think>\nHm.\n</think>\n\nI look. {CALL}\n{CALL}")
    answer = ask(open_client)
    call = ("function_call", 'get_weather {"city": "\u6d77 }\\"{"}')
    assert shown(answer) == [("reasoning", "Hm."), ("message", "I look. "), call, call]
    assert answer.status == "completed" and answer.output_text == "I look. "
    assert {item.status for item in answer.output} == {"completed"} and len({item.id for item in answer.output}) == 4
    assert answer.output[2].call_id != answer.output[3].call_id
    assert [tool.name for tool in answer.tools] == ["get_weather", "now"] and answer.parallel_tool_calls
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    one = ask(open_client, parallel_tool_calls=False)
    assert shown(one)[2:] == [call] and not one.parallel_tool_calls
    none = ask(open_client, tool_choice="none")
    assert none.output_text == f"I look. {CALL}\n{CALL}"


def test_every_event_of_a_stream(parsing: Running, open_client: openai.OpenAI) -> None:
    says(parsing, f"<think>\nHm.\n</think>\n\nI look. {CALL}")
    whole = ask(open_client)
    events = list(ask(open_client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys((getattr(e, "output_index", None), e.type.removeprefix("response.")) for e in events))
    assert kinds == [
        (None, "created"), (None, "in_progress"),
        (0, "output_item.added"), (0, "content_part.added"), (0, "reasoning_text.delta"), (0, "reasoning_text.done"),
        (0, "content_part.done"), (0, "output_item.done"),
        (1, "output_item.added"), (1, "content_part.added"), (1, "output_text.delta"), (1, "output_text.done"),
        (1, "content_part.done"), (1, "output_item.done"),
        (2, "output_item.added"), (2, "function_call_arguments.delta"), (2, "function_call_arguments.done"),
        (2, "output_item.done"), (None, "completed")]
    final = events[-1].response
    assert shown(final) == shown(whole)
    assert [e.item.to_dict() for e in events if e.type == "response.output_item.done"] == [
        item.to_dict() for item in final.output]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done.arguments == final.output[2].arguments and done.item_id == final.output[2].id
    with open_client.responses.stream(model="tiny", input="The sea", tools=TOOLS) as stream:
        assert shown(stream.get_final_response()) == shown(whole)


def test_the_answer_to_a_call_goes_back(parsing: Running, open_client: openai.OpenAI) -> None:
    """By the id of the response, and with all of its items: the same prompt."""
    says(parsing, f"<think>\nHm.\n</think>\n\nI look. {CALL}")
    first = ask(open_client)
    id = first.output[-1].call_id
    result: Any = {"type": "function_call_output", "call_id": id, "output": "rain"}
    expected = parsing.llm.frontend.render([
        {"role": "user", "content": "The sea"},
        {"role": "assistant", "content": "I look. ", "reasoning_content": "Hm.", "tool_calls": [
            {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": {"city": '\u6d77 }"{'}}}]},
        {"role": "tool", "content": "rain", "tool_call_id": id, "name": "get_weather"}], tools=CHAT_TOOLS)
    says(parsing, "Rain.")
    by_id = ask(open_client, previous_response_id=first.id, input=[result])
    by_items = ask(open_client, input=[{"role": "user", "content": "The sea"}, *(i.to_dict() for i in first.output), result])
    third = ask(open_client, previous_response_id=by_id.id, input=[{**result, "output": [{"type": "input_text", "text": "x"}]}])
    assert by_id.output_text == by_items.output_text == third.output_text == "Rain."
    assert by_id.usage.input_tokens == by_items.usage.input_tokens == len(expected) < third.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].call_id: got 'x'; allowed: the id of a call earlier"):
        ask(open_client, previous_response_id=first.id, input=[{**result, "call_id": "x"}])


def test_a_call_that_is_cut_off_is_incomplete(parsing: Running, open_client: openai.OpenAI) -> None:
    says(parsing, f"I look. {CALL}")
    assert parsing.llm.tokenizer is not None
    most = len(parsing.llm.tokenizer.encode(f"I look. {CALL[:-30]}", add_special_tokens=False))
    answer, events = ask(open_client, max_output_tokens=most), list(ask(open_client, max_output_tokens=most, stream=True))
    for found in (answer, events[-1].response):
        assert found.status == "incomplete" and [item.status for item in found.output] == ["completed", "incomplete"]
        assert found.output[1].type == "function_call" and found.output[1].name == "get_weather"
        # What is remembered of it is text, so that the conversation can go on.
        again = ask(open_client, previous_response_id=found.id, input="And?", tool_choice="none")
        assert again.output_text.startswith("I look. ")
    done = [e.item.status for e in events if e.type == "response.output_item.done"]
    assert done == ["completed", "incomplete"]


def test_a_developer_is_the_system(parsing: Running, open_client: openai.OpenAI) -> None:
    says(parsing, "Calm.")
    talk = [{"role": "system", "content": "Be calm."}, {"role": "user", "content": "The sea"}]
    asked: Any = [{"role": "developer", "content": "Be calm."}, talk[1]]
    answer = open_client.responses.create(model="tiny", input=asked)
    assert answer.usage is not None and answer.usage.input_tokens == len(parsing.llm.frontend.render(talk))
    assert answer.usage.input_tokens < len(parsing.llm.frontend.render([{**talk[0], "role": "developer"}, talk[1]]))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"])
def test_forced_calls_are_valid(client: openai.OpenAI, choice: Any) -> None:
    """Of a random model, with no parser at all."""
    answer = ask(client, tool_choice=choice, temperature=0, parallel_tool_calls=False)
    final = list(ask(client, tool_choice=choice, temperature=0, parallel_tool_calls=False, stream=True))[-1].response
    for found in (answer, final):
        (call,) = found.output
        assert call.type == "function_call" and found.status == "completed"
        schema = {tool["name"]: tool["parameters"] for tool in TOOLS}[call.name]
        jsonschema.validate(json.loads(call.arguments), schema)
    assert shown(answer) == shown(final)


@pytest.mark.parametrize("extra, message", [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type: got 'web_search'; allowed: 'function'"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name: got 'a b'"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters: got int"),
    ({"tools": TOOLS}, "start it with --tool-call-parser"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "got the function 'g'; allowed: the tools, get_"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice: got {'type': 'web_search'}"),
    ({"tool_choice": "required"}, "'required' without tools"),
    ({"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "beside text"),
    ({"reasoning": "high"}, "reasoning: got 'high'; allowed: an object with effort"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
     "input[0].arguments is no JSON object: '[1]'"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments is NoneType; expected a string"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] has type 'item_reference'; allowed: 'message'"),
])
def test_mistakes_name_their_place(http: httpx.Client, extra: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 5, **extra})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_the_echo_of_a_number_that_json_lacks(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", content=b'{"input": "x", "max_output_tokens": 1, "metadata": {"a": 1e999}}',
                       headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.json()["metadata"] == {"a": None}
