"""Chat templates in the styles of the common model families, and what they refuse."""
from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from ridgeline.errors import InvalidPrompt
from ridgeline.text.chat import render_chat
from ridgeline.text.tokenizer import Tokenizer

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + ':' + call.function.arguments.city + '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate user/assistant/user") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
{%- elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}
{{ raise_exception('only user and assistant roles are supported') }}
{% endif %}
{% endfor %}"""

USER = {"role": "user", "content": "Grüße, 世界 <b>"}
BOTH = [USER, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": " again "}]


def test_llama3_style(spm: Tokenizer) -> None:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert render_chat(spm, BOTH, chat_template=LLAMA3) == (
        "<s>" + header.format("user") + "Grüße, 世界 <b><|eot_id|>" + header.format("assistant") + "Hi<|eot_id|>"
        + header.format("user") + "again<|eot_id|>" + header.format("assistant"))
    assert render_chat(spm, [USER], chat_template=LLAMA3, add_generation_prompt=False).endswith("<b><|eot_id|>")


def test_qwen_style_with_tools_and_options(spm: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "wetter", "description": "Größe < 3 & 世界"}}
    text = render_chat(spm, [USER], chat_template=QWEN, tools=[tool], enable_thinking=False)
    assert text == (
        '<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "wetter", "description": '
        '"Größe < 3 & 世界"}}<|im_end|>\n<|im_start|>user\nGrüße, 世界 <b><|im_end|>\n<|im_start|>assistant\n'
        "<think>\n\n</think>\n\n")


def test_tool_calls_reach_the_template_as_objects(spm: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "<tool_call>weather:Köln</tool_call>" in render_chat(spm, messages, chat_template=QWEN)
    call["function"] = {"name": "weather", "arguments": "{city"}
    with pytest.raises(InvalidPrompt, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON"):
        render_chat(spm, messages, chat_template=QWEN)


def test_gemma_style_takes_parts(spm: Tokenizer) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}
    expected = "<s><start_of_turn>user\nonetwo<end_of_turn>\n<start_of_turn>model\n"
    assert render_chat(spm, [parts], chat_template=GEMMA) == expected
    with pytest.raises(InvalidPrompt, match="roles must alternate user/assistant/user"):
        render_chat(spm, [USER, USER], chat_template=GEMMA)


def test_parts_become_one_string_for_templates_that_want_strings(spm: Tokenizer) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert "\n\none\ntwo<|eot_id|>" in render_chat(spm, [parts], chat_template=LLAMA3)


def test_mistral_style_with_loop_controls_and_generation_tag(spm: Tokenizer) -> None:
    messages = [{"role": "system", "content": "ignored"}, *BOTH]
    text = render_chat(spm, messages, chat_template=MISTRAL)
    assert text == "<s>[INST] Grüße, 世界 <b> [/INST]Hi</s>[INST]  again  [/INST]"
    with pytest.raises(InvalidPrompt, match="only user and assistant roles"):
        render_chat(spm, [{"role": "tool", "content": "x"}], chat_template=MISTRAL)


def test_same_text_as_transformers(spm: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=spm._backend, bos_token="<s>", eos_token="</s>")
    for template in (LLAMA3, QWEN, GEMMA, MISTRAL):
        expected = theirs.apply_chat_template(BOTH, chat_template=template, tokenize=False, add_generation_prompt=True)
        assert render_chat(spm, BOTH, chat_template=template) == expected


def test_date_and_variables_of_the_caller(spm: Tokenizer) -> None:
    template = "{{ strftime_now('%Y') }} {{ mood }} {{ bos_token }}"
    text = render_chat(spm, [USER], chat_template=template, mood="calm")
    assert text == f"{datetime.datetime.now().year} calm <s>"


def test_no_template_says_how_to_pass_one(spm: Tokenizer) -> None:
    assert spm.chat_template is None
    with pytest.raises(InvalidPrompt, match=r"no chat template.*--chat-template FILE"):
        render_chat(spm, [USER])


@pytest.mark.parametrize("template, message", [
    ("{% for m in messages %}", "not valid"),
    ("{{ ''.__class__.__mro__ }}", "rejected"),
    ("{{ messages.append(1) }}", "rejected"),
    ("{{ messages[0].content + 1 }}", "failed: TypeError"),
    ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
    ("{{ range(10 ** 9) | list }}", "failed: OverflowError"),
    ("{{ missing.attribute }}", "rejected"),
])
def test_bad_templates(spm: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        render_chat(spm, [USER], chat_template=template)


@pytest.mark.parametrize("messages, where", [
    ([], "messages is empty"),
    (["hello"], r"messages\[0\] is str"),
    ([{"content": "x"}], r"messages\[0\]\.role is None"),
    ([{"role": "user"}], r"messages\[0\]\.content is NoneType"),
    ([USER, {"role": "user", "content": 3}], r"messages\[1\]\.content is int"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] has type 'image_url'; allowed: 'text'"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is NoneType"),
    ([{"role": "assistant", "content": "", "tool_calls": "x"}], r"tool_calls: expected a list"),
])
def test_malformed_messages(spm: Tokenizer, messages: list, where: str) -> None:
    with pytest.raises(InvalidPrompt, match=where):
        render_chat(spm, messages, chat_template=LLAMA3)


def test_messages_are_not_changed(spm: Tokenizer) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "one"}]}
    render_chat(spm, [message], chat_template=LLAMA3)
    assert message == {"role": "user", "content": [{"type": "text", "text": "one"}]}
