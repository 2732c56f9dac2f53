"""A form in the final channel of an answer in the harmony format, beside reasoning and calls."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import LLM
from ridgeline.errors import InvalidParams
from ridgeline.structured_outputs import StructuredOutputsParams
from script_kit import says
from server_kit import Running, client_of
from tiny_checkpoint import HARMONY, write_checkpoint

TEMPLATE = ("{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
            "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}")
THOUGHT = '<|channel|>analysis<|message|>Hm, {"海"\n7?<|end|><|start|>assistant'
FINAL = "<|channel|>final<|message|>"
TO_FINAL = ("f", "<|message|>")           # what a model must prefer to come to it: the grammar forces the rest
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"what": 1}'
SAYS: list[Any] = [{"role": "user", "content": "The sea"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"what": {"enum": [1, 2]}}, "required": ["what"], "additionalProperties": False}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("harmony"), special=HARMONY)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with Running(LLM(folder, threads=1, chat_template=TEMPLATE), model="tiny", tool_call_parser="gpt_oss",
                 reasoning_parser="gpt_oss") as server:
        yield server


def ends(llm: LLM, text: str, **form: Any) -> bool:
    """Whether the output may be this text, and end behind it."""
    assert llm.tokenizer is not None
    matcher = llm.frontend.compiler.compile(StructuredOutputsParams(choice=["7", "calm"], channel="final", **form)).matcher()
    mask = matcher.mask(llm.tokenizer.encode(text, add_special_tokens=False))
    bits = None if mask is None else np.unpackbits(mask.view(np.uint8), bitorder="little")
    return bits is not None and bool(bits[llm.engine.eos_token_ids[0]])


@pytest.mark.parametrize(("text", "plain", "calling"), [
    (f"{FINAL}calm", True, True), (f"{THOUGHT}{FINAL}7", True, True), (f"{THOUGHT}{THOUGHT}{FINAL}7", True, True),
    ("<|channel|>final <|constrain|>json<|message|>7", True, True),
    (f"{FINAL}low", False, False), (f"{FINAL}calm<|end|>", False, False), ("calm", False, False), (FINAL, False, False),
    (THOUGHT, False, False), (THOUGHT.partition("<|end|>")[0], False, False),
    ("<|channel|>commentary<|message|>Calm.<|end|>", False, False),
    (CALL, False, True), (f"{THOUGHT}{CALL}", False, True),
    (" to=functions.look<|channel|>commentary json<|message|>{}", False, True),
    (f"{THOUGHT} to=functions.look<|channel|>commentary<|message|>{{}}", False, True),
])
def test_what_an_answer_may_be(running: Running, text: str, plain: bool, calling: bool) -> None:
    assert ends(running.llm, text) == plain
    assert ends(running.llm, text, calls=True) == calling


def ask(server: Running, **fields: Any) -> Any:
    with client_of(server.url) as client:
        extra = {name: fields.pop(name) for name in ("structured_outputs", "continue_final_message") if name in fields}
        return client.chat.completions.create(**{"model": "tiny", "messages": SAYS, "max_tokens": 150, **fields},
                                              extra_body=extra).choices[0]


def bias(server: Running, *texts: str) -> dict[str, int]:
    """Makes the model prefer the tokens of these texts, wherever they are allowed."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    return {str(token): 100 for text in texts for token in tokenizer.encode(text, add_special_tokens=False)}


def test_a_form_holds_in_the_final_channel(running: Running) -> None:
    form = {"choice": ["calm", "low"]}
    final = ask(running, structured_outputs=form, logit_bias=bias(running, *TO_FINAL))
    assert final.message.content in form["choice"] and final.finish_reason == "stop"
    # The model is random: it reasons up to the limit, and nothing of that is held to the form, or shown as content.
    reasoned = ask(running, structured_outputs=form, logit_bias=bias(running, "a", "<|message|>"))
    assert not reasoned.message.content and reasoned.message.reasoning_content and reasoned.finish_reason == "length"
    # An answer that continues a message of the final channel has the form at once.
    begun = [*SAYS, {"role": "assistant", "content": "The sea is "}]
    assert ask(running, messages=begun, continue_final_message=True, structured_outputs=form).message.content in form["choice"]


def test_calls_in_the_harmony_format(folder: Path, running: Running) -> None:
    forced = ask(running, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, logit_bias=bias(running, *TO_FINAL))
    (call,) = forced.message.tool_calls
    assert call.function.name == "look" and json.loads(call.function.arguments) in ({"what": 1}, {"what": 2})
    with Running(LLM(folder, threads=1, chat_template=TEMPLATE), model="tiny", tool_call_parser="gpt_oss") as server:
        says(server, f"{THOUGHT}{CALL}")
        called = ask(server, tools=TOOLS, structured_outputs={"choice": ["calm"]})
        assert called.message.tool_calls[0].function.arguments == '{"what": 1}' and called.finish_reason == "tool_calls"


def test_a_tokenizer_without_the_format(llm: LLM) -> None:
    with pytest.raises(InvalidParams, match=r"no <\|channel\|>, so its answers are not in the harmony format"):
        llm.frontend.compiler.compile(StructuredOutputsParams(choice=["a"], channel="final"))
    with pytest.raises(InvalidParams, match="got calls without channel"):
        StructuredOutputsParams(choice=["a"], calls=True)
