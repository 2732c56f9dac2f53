"""/v1/chat/completions, /tokenize and /detokenize."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ridgeline import LLM, SamplingParams
from server_kit import Running, client_of, events
from tiny_checkpoint import write_checkpoint

ASK: list[Any] = [{"role": "user", "content": "The sea 海🙂"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 20, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="session")
def alone(folder: Path) -> LLM:
    return LLM(folder, threads=1)


def answer_of(llm: LLM, messages: list[Any], **template: Any) -> str:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    return llm.chat(messages, params, **template)[0].outputs[0].text


def test_whole_and_streamed_answers_are_the_engines(client: openai.OpenAI, alone: LLM) -> None:
    expected = answer_of(alone, ASK)
    answer = client.chat.completions.create(model="tiny", messages=ASK, **GREEDY)
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", expected, "length")
    assert answer.usage is not None and answer.usage.completion_tokens == 20
    chunks = list(client.chat.completions.create(model="tiny", messages=ASK, stream=True,
                                                 stream_options={"include_usage": True}, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage == answer.usage
    assert len({c.id for c in chunks}) == 1


def test_samples_are_told_apart(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": ASK, "n": 3, "seed": 5, "temperature": 1.4, "max_tokens": 10}
    whole = {c.index: c.message.content for c in client.chat.completions.create(**request).choices}
    assert len(set(whole.values())) == 3
    texts = dict.fromkeys(whole, "")
    ends = []
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == whole and sorted(ends) == [0, 1, 2]


def test_logprobs_have_exact_bytes(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, logprobs=True, top_logprobs=2, **GREEDY)
    entries = answer.choices[0].logprobs
    assert entries is not None and entries.content is not None and len(entries.content) == 20
    data = b"".join(bytes(entry.bytes or []) for entry in entries.content)
    assert data.decode("utf-8", "replace").startswith((answer.choices[0].message.content or "")[:-4])
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.logprob - 1e-6
               for entry in entries.content)
    body = {"messages": ASK, "temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": True, "top_logprobs": 2,
            "stream": True, "return_token_ids": True}
    chunks = [c["choices"][0] for c in events(http.post("/v1/chat/completions", json=body))]
    told = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert told == [entry.model_dump() for entry in entries.content]
    assert sum(len(c.get("token_ids", [])) for c in chunks) == 20


def test_the_template_gets_its_arguments(http: httpx.Client, alone: LLM) -> None:
    body: dict[str, Any] = {"messages": ASK, "temperature": 0, "max_tokens": 20, "ignore_eos": True}

    def content(**extra: Any) -> str:
        return str(http.post("/v1/chat/completions", json={**body, **extra}).json()["choices"][0]["message"]["content"])

    assert content(add_generation_prompt=False) == answer_of(alone, ASK, add_generation_prompt=False) != content()
    begun = [*ASK, {"role": "assistant", "content": "The light"}]
    prompt = alone.frontend.conversation(begun, continue_final_message=True)[0]
    assert prompt.endswith("<assistant>The light")
    assert content(messages=begun, continue_final_message=True) == answer_of(alone, begun, continue_final_message=True)
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    assert content(messages=parts, chat_template_kwargs={"unused": 1}) == content()


@pytest.mark.parametrize("extra, message", [
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "system", "content": "x"}]}, "no system messages here"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
    ({"messages": [{"role": "user"}]}, "expected a string"),
    ({"messages": "hello"}, "valid list"),
    ({"top_logprobs": 2}, "with logprobs true"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name: got None"),
    ({"response_format": {"type": "json_schema"}}, "response_format: type 'json_schema' comes without a schema"),
    ({"functions": [{"name": "f"}]}, "functions is not supported by this interface"),
    ({"tool_choice": "required"}, "tool_choice: got 'required' without tools"),
    ({"chat_template": "{{ 1 }}"}, "--chat-template FILE"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "at most one"),
])
def test_chat_mistakes(http: httpx.Client, extra: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 2, **extra})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_a_model_without_a_template_says_how_to_pass_one(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    with Running(LLM(folder, threads=1), model="tiny") as server, client_of(server.url) as client:
        with pytest.raises(openai.BadRequestError, match=r"no chat template.*--chat-template FILE"):
            client.chat.completions.create(model="tiny", messages=ASK)
        assert httpx.get(f"{server.url}/stats").json()["chat"] is False
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].text


def test_a_template_from_a_file_is_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    with Running(LLM(folder, threads=1, chat_template="{{ messages[0].content }}!"), model="tiny") as server:
        answer = httpx.post(f"{server.url}/tokenize", json={"messages": ASK}).json()
        assert httpx.post(f"{server.url}/detokenize", json={"tokens": answer["tokens"]}).json() == {
            "prompt": f"{ASK[0]['content']}!"}


def test_tokenizer_info(http: httpx.Client, alone: LLM) -> None:
    found = http.get("/tokenizer_info").json()
    assert (found["bos_token"], found["eos_token"], found["model_max_length"]) == ("<bos>", "<eos>", 256)
    assert alone.tokenizer is not None and found["chat_template"] == alone.tokenizer.chat_template
    for name in ("bos_token", "eos_token"):
        assert http.post("/tokenize", json={"prompt": found[name], "add_special_tokens": False}).json()["count"] == 1


def test_tokenize_and_detokenize(http: httpx.Client, alone: LLM) -> None:
    assert alone.tokenizer is not None
    for special in (True, False):
        ids = alone.tokenizer.encode("The sea 🙂", add_special_tokens=special)
        answer = http.post("/tokenize", json={"prompt": "The sea 🙂", "add_special_tokens": special}).json()
        assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    assert http.post("/detokenize", json={"model": "tiny", "tokens": ids}).json() == {"prompt": "The sea 🙂"}
    answer = http.post("/tokenize", json={"messages": ASK, "return_token_strs": True}).json()
    assert answer["tokens"] == alone.frontend.render(ASK) and answer["token_strs"][-1] == "<assistant>"
    for path, body in (("/detokenize", {"tokens": [9999]}), ("/detokenize", {"tokens": [-1]}), ("/tokenize", {}),
                       ("/tokenize", {"prompt": "x", "messages": ASK})):
        assert http.post(path, json=body).status_code == 400


def test_models_and_state(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "ridgeline"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json()["version"]
    assert http.get("/openapi.json").json()["paths"].keys() >= {"/v1/completions", "/v1/chat/completions"}
