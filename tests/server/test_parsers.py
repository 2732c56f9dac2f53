"""Every parser on recorded outputs, in every way of cutting them into pieces."""
from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_outputs import CALLS, THOUGHTS, TOOLS

from ridgeline.errors import ConfigError
from ridgeline.server.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    collect,
    merged,
    output_parser,
    tool_choice,
)

CHOICE = tool_choice(TOOLS)


def caller(name: str) -> OutputParser:
    count = itertools.count()
    return output_parser(name, choice=CHOICE, new_id=lambda: f"id{next(count)}")


def parse(parser: OutputParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in itertools.cycle(sizes or [len(text) or 1]):
        pieces.append(text[at:at + size])
        at += size
        if at >= len(text):
            return pieces
    raise AssertionError


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS, ids=[f"{call[0]}-{i}" for i, call in enumerate(CALLS)])
def test_calls_in_recorded_outputs_and_in_every_cutting(name, text, content, calls) -> None:
    whole = parse(caller(name), [text])
    message = collect(whole)
    assert message.content == content
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    for size in range(1, len(text) + 1):
        assert parse(caller(name), cut(text, [size])) == whole, f"pieces of {size}"
    for at in range(len(text)):
        assert parse(caller(name), [text[:at], "", text[at:]]) == whole, f"cut at {at}"


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_in_recorded_outputs_and_in_every_cutting(name, prompt, text, reasoning, content) -> None:
    whole = parse(output_parser(None, name, prompt=prompt), [text])
    message = collect(whole)
    assert (message.reasoning, message.content) == (reasoning, content)
    for size in range(1, len(text) + 1):
        assert parse(output_parser(None, name, prompt=prompt), cut(text, [size])) == whole, f"pieces of {size}"


FRAGMENTS = sorted({part for _, text, _, _ in CALLS for part in (text[:9], text[9:23], text[-14:])} | {
    "<tool_call>", "</tool_call>", "<function=now>", "<parameter=days>", "</parameter>", "</function>", '{"name": "now", ',
    '"arguments": {}', "}", "]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "now(", "days=3", ")", "\\", '"', "\n", " ",
     "<", "x",
    "<|channel|>analysis", "<|message|>", "<|end|>", "<|call|>", "<think>", "</think>", "\U0001f600",
})


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), sizes=st.lists(st.integers(1, 7), max_size=6))
def test_any_text_means_the_same_in_any_cutting(name: str, parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    reasoning = "gpt_oss" if name == "gpt_oss" else "qwen3"

    def fresh() -> OutputParser:
        count = itertools.count()
        return output_parser(name, reasoning, choice=CHOICE, new_id=lambda: f"id{next(count)}")

    assert parse(fresh(), cut(text, sizes)) == parse(fresh(), [text])


@pytest.mark.parametrize("name", sorted(set(TOOL_PARSERS) - {"gpt_oss"}))
@given(text=st.text(alphabet="ab \n{}\"'<>=,\u4f60\U0001f600", max_size=40))
def test_text_without_a_call_comes_back_whole(name: str, text: str) -> None:
    message = collect(parse(caller(name), [text]))
    assert (message.content or "", message.tool_calls) == (text, [])


@pytest.mark.parametrize(("name", "text", "calls"), [(n, t, c) for n, t, _, c in CALLS if c])
def test_arguments_are_streamed(name: str, text: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    """A call's arguments come in pieces, none of them late: only what a marker may follow is held back."""
    parser = caller(name)
    pieces = [e for c in text for e in parser.push(c) if isinstance(e, ToolCallArguments)]
    assert len(pieces) >= sum(len(arguments) for _, arguments in calls)


def test_content_is_not_held_back() -> None:
    for name in TOOL_PARSERS:
        parser = caller(name)
        shown = [e.text for c in "Hello, world" for e in parser.push(c) if isinstance(e, Content)]
        assert "".join(shown) == "Hello, world", name


def test_reasoning_then_calls() -> None:
    text = '<think>\nI call <tool_call> now.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    message = collect(parse(output_parser("hermes", "qwen3", choice=CHOICE), [text]))
    assert message.reasoning == "I call <tool_call> now."
    assert message.content is None
    assert [call.name for call in message.tool_calls] == ["now"]
    text = ('<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json'
            '<|message|>{}<|call|>')
    message = collect(parse(output_parser("gpt_oss", "gpt_oss", choice=CHOICE), [text]))
    assert (message.reasoning, [call.name for call in message.tool_calls]) == ("Hm.", ["now"])


def test_calls_are_text_where_the_request_has_no_tools() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for choice in (tool_choice(None), tool_choice(TOOLS, "none")):
        message = collect(parse(output_parser("hermes", choice=choice), [text]))
        assert (message.content, message.tool_calls) == (text, [])


def test_forced_calls_are_read_from_plain_json() -> None:
    named = tool_choice(TOOLS, {"type": "function", "function": {"name": "get_weather"}})
    message = collect(parse(output_parser("hermes", "qwen3", choice=named), list('{"city": "Paris"}')))
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("get_weather", '{"city": "Paris"}')]
    required = tool_choice(TOOLS, "required")
    text = '[{"name": "now", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Paris"}}]'
    message = collect(parse(output_parser(choice=required), list(text)))
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("now", {}), ("get_weather", {"city": "Paris"})]
    cut_off = collect(parse(output_parser(choice=named), ['{"city": "Par']))
    assert (cut_off.content, cut_off.tool_calls) == ('{"city": "Par', [])


def test_ids_are_in_the_form_that_the_family_wants() -> None:
    text = '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}'
    first, second = collect(parse(output_parser("mistral", choice=CHOICE), [text])).tool_calls
    assert len(first.id) == 9 and first.id.isalnum()
    assert second.id == "a1b2c3d4e"
    call = collect(parse(output_parser("llama3_json", choice=CHOICE), ['{"name": "now", "parameters": {}}'])).tool_calls[0]
    assert call.id.startswith("call_") and len(call.id) == 29


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'nope'; valid: hermes, llama3_json, mistral"):
        output_parser("nope")
    with pytest.raises(ConfigError, match="reasoning_parser is 'nope'; valid: " + ", ".join(REASONING_PARSERS)):
        output_parser(None, "nope")
    with pytest.raises(ConfigError, match="goes with no other"):
        output_parser("hermes", "gpt_oss")


def test_markers_that_are_special_tokens_are_asked_for() -> None:
    assert output_parser("mistral", choice=CHOICE).special
    assert output_parser(None, "qwen3").special
    assert not output_parser().special


def test_reasoning_streams_while_it_is_written() -> None:
    parser = output_parser(None, "deepseek_r1")
    assert [e for c in "<think>abc" for e in parser.push(c)] == [Reasoning("a"), Reasoning("b"), Reasoning("c")]
