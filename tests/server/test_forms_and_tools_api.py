"""Structured output, tools and reasoning through the official client and over plain HTTP."""
from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from recorded_outputs import TOOLS

from ridgeline import LLM
from ridgeline.errors import ConfigError
from ridgeline.server.config import ServerConfig
from script_kit import CALL, says
from server_kit import Running, client_of, events

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99,
                                                                                           "minimum": 0}},
    "required": ["name", "age"], "additionalProperties": False}
SAYS: list[Any] = [{"role": "user", "content": "The sea"}]
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
SHORT: Any = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"what": {"type": "string", "maxLength": 4}}, "required": ["what"],
     "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {},
     "additionalProperties": False}}}]


@pytest.fixture(scope="module")
def parsing(folder: Path) -> Iterator[Running]:
    """A server that reads calls and reasoning; what its model says is set by `says`."""
    with Running(LLM(folder, threads=1, max_num_seqs=8), model="tiny", tool_call_parser="hermes",
     reasoning_parser="qwen3") as server:
        yield server


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name.startswith(("guided", "structured"))}
    return client.chat.completions.create(model="tiny", messages=SAYS, max_tokens=200, seed=3, extra_body=extra, **fields)


def whole(chunks: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a stream adds up to, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in chunks:
        choice = chunk.choices[0]
        delta = choice.delta.model_dump(exclude_none=True)
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        reason = choice.finish_reason or reason
    return message, reason


@pytest.mark.parametrize(("fields", "valid"), [
    ({"structured_outputs": COMPACT}, lambda text: jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda text: re.fullmatch("[ab]{3}", text)),
    ({"guided_choice": ["calm", "low"]}, lambda text: text in ("calm", "low")),
    ({"guided_regex": "[0-9]{2}"}, lambda text: re.fullmatch("[0-9]{2}", text)),
    ({"guided_grammar": 'start: "sea" "!"~2'}, lambda text: text == "sea!!"),
    ({"guided_json": {"enum": ["a", 1]}}, lambda text: json.loads(text) in ("a", 1)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": [[], 7]}}}},
     lambda text: json.loads(text) in ([], 7)),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_every_way_to_ask_for_a_form(client: openai.OpenAI, fields: dict[str, Any], valid: Any) -> None:
    answer = chat(client, **fields).choices[0]
    assert answer.finish_reason == "stop" and valid(answer.message.content), answer.message.content
    message, reason = whole(chat(client, stream=True, **fields))
    assert (message["content"], reason) == (answer.message.content, "stop")


def test_a_json_object_and_a_form_of_a_completion(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}).choices[0]
    assert answer.message.content.startswith("{")
    completion = client.completions.create(model="tiny", prompt="The sea", max_tokens=9, extra_body={"guided_choice": ["calm"]})
    assert completion.choices[0].text == "calm"


def test_forms_of_the_other_interfaces(server: Running, client: openai.OpenAI, http: httpx.Client) -> None:
    form: Any = {"type": "json_schema", "name": "x", "schema": {"enum": [[], 7]}}
    answer = client.responses.create(model="tiny", input="The sea", max_output_tokens=30, text={"format": form})
    assert json.loads(answer.output_text) in ([], 7) and answer.text.format.type == "json_schema"
    message = http.post("/v1/messages", json={"model": "tiny", "messages": SAYS, "max_tokens": 30,
     "output_config": {"format": form}})
    assert json.loads(message.json()["content"][0]["text"]) in ([], 7)


def bounded_schema(i: int) -> dict[str, Any]:
    """Different for each i, in names and in shape."""
    return {
        "type": "object", "additionalProperties": False,
        "properties": {f"name{i}": {"type": "string", "maxLength": 1 + i % 5},
                       "age": {"type": "integer", "minimum": i, "maximum": 2 * i + 9},
                       "tags": {"type": "array", "items": {"enum": ["a", "海", i]}, "maxItems": i % 4},
                       "kind": {"type": ["boolean", "null"]}},
        "required": [f"name{i}", "age", "tags", "kind"][:1 + i % 4]}


def test_a_hundred_schemas_at_once_are_all_obeyed(folder: Path) -> None:
    """Through both interfaces and both fields, streamed and not, greedy and not, more than there are seats."""
    async def ask(http: httpx.AsyncClient, i: int) -> tuple[str, str]:
        schema, stream = bounded_schema(i), i % 3 == 0
        form: dict[str, Any] = ({"structured_outputs": {"json": schema}} if i % 4 < 2 else {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}})
        path, prompt = ("/v1/completions", {"prompt": f"{i} "}) if i % 2 else ("/v1/chat/completions", {"messages": SAYS})
        answer = await http.post(path, json={**prompt, **form, "max_tokens": 200, "stream": stream, "seed": i,
                                             "temperature": (i % 5) * 0.4})
        assert answer.status_code == 200, answer.text
        choices = [event["choices"][0] for event in events(answer)] if stream else [answer.json()["choices"][0]]
        texts = [choice["text"] if i % 2 else choice["delta" if stream else "message"].get("content") for choice in choices]
        return "".join(text or "" for text in texts), choices[-1]["finish_reason"]

    async def main(url: str) -> list[tuple[str, str]]:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            return list(await asyncio.gather(*(ask(http, i) for i in range(100))))

    with Running(LLM(folder, threads=1, max_num_seqs=32), model="tiny") as server:
        answers = asyncio.run(main(server.url))
    for i, (text, reason) in enumerate(answers):
        assert reason == "stop", (i, text)
        jsonschema.validate(json.loads(text), bounded_schema(i))


def test_concurrent_requests_of_every_kind(server: Running) -> None:
    """40 callers: half with a schema, some without, some wrong."""
    def call(i: int) -> Any:
        with client_of(server.url) as client:
            try:
                if i % 4 == 0:
                    return i, chat(client, structured_outputs={"json": {"type": "array", "uniqueItems": True}})
                return i, chat(client, **({"structured_outputs": COMPACT} if i % 2 else {}), temperature=1.5)
            except openai.BadRequestError as error:
                return i, error

    with ThreadPoolExecutor(8) as pool:
        for i, answer in pool.map(call, range(40)):
            if i % 4 == 0:
                assert isinstance(answer, openai.BadRequestError) and "uniqueItems" in str(answer)
            elif i % 2:
                jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_forced_calls(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "look"}}
    answer = chat(client, tools=SHORT, tool_choice=named).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "look" and set(json.loads(call.function.arguments)) == {"what"}
    assert answer.message.content is None and answer.finish_reason == "tool_calls"
    message, reason = whole(chat(client, tools=SHORT, tool_choice=named, stream=True))
    assert reason == "tool_calls" and [c["arguments"] for c in message["tool_calls"]] == [call.function.arguments]
    answer = chat(client, tools=SHORT, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in ("look", "now") and isinstance(json.loads(call.function.arguments), dict)


def test_calls_and_reasoning_are_read(parsing: Running) -> None:
    says(parsing, f"<think>\nHm, <tool_call>?\n</think>\n\nI look. {CALL}\n{CALL}")
    with client_of(parsing.url) as client:
        answer = chat(client, tools=TOOLS).choices[0]
        assert answer.message.content == "I look. " and answer.message.reasoning_content == "Hm, <tool_call>?"
        assert answer.finish_reason == "tool_calls" and len({call.id for call in answer.message.tool_calls}) == 2
        assert [json.loads(call.function.arguments) for call in answer.message.tool_calls] == [{"city": '\u6d77 }"{'}] * 2
        message, reason = whole(chat(client, tools=TOOLS, stream=True))
        assert (message["content"], message["reasoning_content"], reason) == ("I look. ", "Hm, <tool_call>?", "tool_calls")
        assert [c["arguments"] for c in message["tool_calls"]] == [c.function.arguments for c in answer.message.tool_calls]
        one = chat(client, tools=TOOLS, parallel_tool_calls=False).choices[0]
        assert len(one.message.tool_calls) == 1
        plain = chat(client, tools=TOOLS, tool_choice="none").choices[0]
        assert plain.message.content == f"I look. {CALL}\n{CALL}" and plain.finish_reason == "stop"


def test_a_call_that_is_cut_off_is_shown_as_text(parsing: Running) -> None:
    says(parsing, CALL[:-20])
    with client_of(parsing.url) as client:
        answer = chat(client, tools=TOOLS).choices[0]
        assert answer.message.content == CALL[:-20] and answer.message.tool_calls is None and answer.finish_reason == "stop"
        message, _ = whole(chat(client, tools=TOOLS, stream=True))
        assert message["tool_calls"][0]["name"] == "get_weather" and message["content"] == ""


def test_a_form_holds_behind_the_reasoning(folder: Path) -> None:
    """The model is random: after many tokens of reasoning the limit comes, and before it nothing is held to the form."""
    reasons = Running(LLM(folder, threads=1), model="tiny", reasoning_parser="deepseek_r1")
    with reasons as server, client_of(server.url) as client:
        answer = chat(client, structured_outputs={"choice": ["calm"]}, logit_bias={"1": 100}).choices[0]
        assert answer.finish_reason == "length" and not answer.message.content and answer.message.reasoning_content


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "structured_outputs.json: keyword 'not' at the top"),
    ({"guided_json": {"not": {}}}, "guided_json", "guided_json.json: keyword 'not'"),
    ({"guided_regex": "a", "min_tokens": 3}, None, "masks exclude every token"),
    ({"guided_regex": "a{2"}, "structured_outputs", "unclosed counted repetition"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "beside guided_regex"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "got 'structural_tag'; allowed: text, json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "contains": {}}}}},
     "response_format", "keyword 'contains'"),
    ({"tools": TOOLS}, "tools", "start it with --tool-call-parser (hermes, "),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "got 'sometimes'"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "beside guided_regex"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "if": {}}}}],
      "tool_choice": "required"}, "tools", "keyword 'if'"),
])
def test_wrong_requests(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": SAYS, "max_tokens": 5, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and error["param"] == param, error


def test_unknown_parsers_are_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'x'; valid: hermes"):
        ServerConfig(model="m", tool_call_parser="x")
    with pytest.raises(ConfigError, match="reasoning_parser is 'x'; valid: deepseek_r1"):
        ServerConfig(model="m", reasoning_parser="x")
