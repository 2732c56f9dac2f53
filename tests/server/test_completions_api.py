"""/v1/completions with the official client: answers are the engine's, streamed or not, in every form of prompt."""
from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from ridgeline import LLM, SamplingParams
from server_kit import Running, events
from tiny_checkpoint import Script

GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
TEXT = "The sea 海は🙂"


def text_of(llm: LLM, prompt: Any, **params: Any) -> str:
    return llm.generate([prompt], SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **params})
                        )[0].outputs[0].text


@pytest.fixture(scope="session")
def alone(folder: Any) -> LLM:
    """The same model beside the server."""
    return LLM(folder, threads=1)


def streamed(client: openai.OpenAI, **request: Any) -> tuple[dict[int, str], list[Any]]:
    texts: dict[int, str] = {}
    chunks = list(client.completions.create(stream=True, model="tiny", **request))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, chunks


def test_whole_and_streamed_text_are_the_engines(client: openai.OpenAI, alone: LLM) -> None:
    expected = text_of(alone, TEXT)
    answer = client.completions.create(model="tiny", prompt=TEXT, **GREEDY)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    ids = len(alone.tokenizer.encode(TEXT))                                # type: ignore[union-attr]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (ids, 24, ids + 24)
    texts, chunks = streamed(client, prompt=TEXT, stream_options={"include_usage": True}, **GREEDY)
    assert texts == {0: expected}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_prompts_of_every_form(client: openai.OpenAI, alone: LLM) -> None:
    assert alone.tokenizer is not None
    one, two = alone.tokenizer.encode("The sea"), alone.tokenizer.encode("The light")
    expected = [text_of(alone, one), text_of(alone, two)]
    for prompt, wanted in ((one, expected[:1]), (["The sea", "The light"], expected), ([one, two], expected)):
        answer = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
        assert [c.text for c in answer.choices] == wanted
        assert [c.index for c in answer.choices] == list(range(len(wanted)))
        texts, _ = streamed(client, prompt=prompt, **GREEDY)
        assert texts == dict(enumerate(wanted))


def test_samples_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"prompt": ["The sea", "The light"], "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12}
    first = client.completions.create(model="tiny", **request)
    assert [c.index for c in first.choices] == list(range(6))
    assert len({c.text for c in first.choices}) > 3
    texts, _ = streamed(client, **request)
    assert texts == {c.index: c.text for c in first.choices}
    assert first.usage is not None and first.usage.completion_tokens <= 72


def test_logprobs_cover_the_text_and_the_echoed_prompt(client: openai.OpenAI, alone: LLM) -> None:
    request: dict[str, Any] = {"prompt": TEXT, "logprobs": 3, "echo": True, **GREEDY}
    answer = client.completions.create(model="tiny", **request)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert logprobs is not None and choice.text.startswith(TEXT)
    assert answer.usage is not None and len(logprobs.tokens or []) == answer.usage.total_tokens
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    data = b"".join(token[6:].encode().decode("unicode_escape").encode("latin-1") if token.startswith("bytes:")
                    else token.encode() for token in logprobs.tokens or [])
    assert data.startswith(f"<bos>{TEXT}".encode())            # the bytes of the tokens are exactly those of the text
    assert data.decode("utf-8", "replace").removeprefix("<bos>").startswith(choice.text[:-4])
    offsets = logprobs.text_offset or []
    assert offsets[0] == offsets[1] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(choice.text)
    _, chunks = streamed(client, **request)
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [item for piece in pieces for item in getattr(piece, name)]
        assert joined == getattr(logprobs, name), name


def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI, alone: LLM) -> None:
    """As lm-eval asks for the likelihood of a text."""
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=0, echo=True, logprobs=1, temperature=0)
    expected = alone.generate([TEXT], SamplingParams(max_tokens=0, prompt_logprobs=1))[0].prompt_logprobs
    assert expected is not None
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == TEXT and logprobs is not None
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert logprobs.token_logprobs == [None, *(entry.logprob for entry in expected[1:] if entry is not None)]


def test_stop_strings_and_stop_tokens(http: httpx.Client, alone: LLM) -> None:
    whole = text_of(alone, "The sea")
    stop = whole[3:6]
    at = whole.index(stop)
    body: dict[str, Any] = {"prompt": "The sea", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    for extra, expected in (({"stop": stop}, whole[:at]), ({"stop": [stop, "never"]}, whole[:at]), ({"stop": ""}, whole),
                            ({"stop": stop, "include_stop_str_in_output": True}, whole[:at + len(stop)])):
        plain = http.post("/v1/completions", json={**body, **extra}).json()["choices"][0]
        assert plain["text"] == expected
        chunks = events(http.post("/v1/completions", json={**body, **extra, "stream": True}))
        assert "".join(c["choices"][0]["text"] for c in chunks) == expected
        if extra["stop"]:
            assert plain["finish_reason"] == "stop" and plain["stop_reason"] == stop
    ids = alone.generate(["The sea"], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0].outputs[0].token_ids
    body |= {"stop_token_ids": [ids[5]], "return_token_ids": True}
    plain = http.post("/v1/completions", json=body).json()["choices"][0]
    assert plain["token_ids"] == ids[:ids.index(ids[5]) + 1] and plain["stop_reason"] == ids[5]
    assert plain["prompt_token_ids"] == alone.tokenizer.encode("The sea")  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_split_characters_come_whole(server: Running, http: httpx.Client, size: int) -> None:
    """Emoji and CJK in byte tokens, several tokens a step: chunks hold whole characters and add up to the text."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    wanted = "静かな海 🙂🚀👩‍🚀 naïve"
    tokens = tokenizer.encode(wanted, add_special_tokens=False)
    strategies = server.llm.engine.strategies
    strategies["script"] = Script(tokens, (size,))
    default, server.llm.engine.default_strategy = server.llm.engine.default_strategy, "script"
    try:
        body = {"prompt": "x", "max_tokens": len(tokens), "logprobs": 1}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == wanted
        chunks = events(http.post("/v1/completions", json={**body, "stream": True, "return_token_ids": True}))
        texts = [c["choices"][0]["text"] for c in chunks]
        assert "".join(texts) == wanted and not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
        assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == tokens
    finally:
        server.llm.engine.default_strategy = default
        del strategies["script"]


def test_parameters_reach_the_sampler(http: httpx.Client, alone: LLM) -> None:
    """Each of the fields changes the answer as SamplingParams says."""
    assert alone.tokenizer is not None
    fields: list[dict[str, Any]] = [
        {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}, {"typical_p": 0.3}, {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5}, {"frequency_penalty": 1.5}, {"allowed_token_ids": [40, 41, 42]}, {"bad_words": ["e"]},
        {"min_tokens": 10}, {"skip_special_tokens": False}]
    for extra in fields:
        params = SamplingParams(seed=3, max_tokens=12, **extra)
        expected = alone.generate(["The sea"], params)[0].outputs[0]
        got = http.post("/v1/completions", json={"prompt": "The sea", "seed": 3, "max_tokens": 12, "temperature": 1,
                                                 "return_token_ids": True, **extra}).json()["choices"][0]
        assert (got["text"], got["token_ids"]) == (expected.text, expected.token_ids), extra
    got = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "temperature": 0, "logit_bias": {"50": 100},
                                             "return_token_ids": True, "priority": 1, "cache_salt": "a"}).json()
    assert got["choices"][0]["token_ids"] == [50, 50, 50]
    got = http.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 1, "prompt_logprobs": 1}).json()
    told = got["choices"][0]["prompt_logprobs"]
    assert told[0] is None and all(entry["logprob"] <= 0 for one in told[1:] for entry in one.values())


@pytest.mark.parametrize("body, param, message", [
    ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported"),
    ({"prompt": "x", "temperature": -1}, "temperature", "finite number >= 0"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "valid number"),
    ({"prompt": "x", "n": 1000}, "n", "1 to 128"),
    ({"prompt": "x", "best_of": 3}, "best_of", "the value of n"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"prompt": "x", "logprobs": 100}, None, "at most 20"),
    ({"prompt": []}, None, "empty list"),
    ({"prompt": ""}, None, "the prompt is empty"),
    ({"prompt": [5000]}, None, "out of range"),
    ({}, "prompt", "Field required"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "nothing would come back"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format", "got 'xml'"),
    ({"prompt": "x", "structured_outputs": {"regx": "a"}}, "structured_outputs", "unknown field 'regx'"),
    ({"prompt": "x", "tools": [{"type": "function"}]}, "tools", "not supported by this interface"),
    ({"prompt": [7] * 256}, "prompt", "the context of 256"),
])
def test_mistakes_are_told_in_openai_s_form(http: httpx.Client, body: dict[str, Any], param: str | None, message: str) -> None:
    for stream in (False, True):
        answer = http.post("/v1/completions", json={**body, "stream": stream})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert message in error["message"] and error["param"] == param, error


def test_other_errors(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[7] * 300)
    assert caught.value.code == "context_length_exceeded"
    answer = http.post("/v1/completions", content=b"{nonsense", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]
    answer = http.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "lone surrogate" in answer.json()["error"]["message"]
    assert http.get("/v1/completions").status_code == 405
    assert http.get("/nowhere").json()["error"]["code"] == "not_found"
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "unheard_of": 1}).status_code == 200


def test_concurrent_callers_get_what_each_gets_alone(server: Running, alone: LLM) -> None:
    prompts = [f"{i} the sea 🙂" for i in range(24)]
    expected = [text_of(alone, prompt) for prompt in prompts]

    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        if index % 2:
            answer = await client.completions.create(model="tiny", prompt=prompts[index], **GREEDY)  # type: ignore[call-overload]
            return str(answer.choices[0].text)
        stream = await client.completions.create(model="tiny", prompt=prompts[index], stream=True, **GREEDY)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client, i) for i in range(len(prompts)))))

    assert asyncio.run(main()) == expected
