"""/v1/responses, /v1/messages and /v1/embeddings with the official clients."""
from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.batch import whole
from ridgeline.server.errors import ApiError
from ridgeline.server.store import Store
from server_kit import Running
from tiny_checkpoint import write_checkpoint

ASK = "The sea 海🙂"
SYSTEM_TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                   "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose template takes system messages; greedy, and without an end of text."""
    folder = write_checkpoint(tmp_path_factory.mktemp("spoken"))
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 5}')
    with Running(LLM(folder, threads=1, chat_template=SYSTEM_TEMPLATE), model="tiny", response_store_size=3) as server:
        yield server


@pytest.fixture(scope="module")
def alone(spoken: Running, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_checkpoint(tmp_path_factory.mktemp("alone")), threads=1, chat_template=SYSTEM_TEMPLATE)


@pytest.fixture
def client(spoken: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{spoken.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def claude(spoken: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=spoken.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def answer_of(llm: LLM, messages: list[Any], tokens: int = 12, **params: Any) -> Any:
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=tokens, **params))[0].outputs[0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_responses_answer_and_remember(client: openai.OpenAI, alone: LLM) -> None:
    system = {"role": "system", "content": "Be calm."}
    expected = answer_of(alone, [system, user(ASK)])
    first = client.responses.create(model="tiny", input=ASK, instructions="Be calm.", max_output_tokens=12)
    assert (first.output_text, first.status) == (expected.text, "incomplete")
    assert first.incomplete_details is not None and first.incomplete_details.reason == "max_output_tokens"
    assert first.usage is not None and first.usage.output_tokens == 12
    # The next one goes on from there; instructions are not inherited.
    second = client.responses.create(model="tiny", input=[user("And?")], previous_response_id=first.id,  # type: ignore[list-item]
                                     max_output_tokens=12)
    talk = [user(ASK), {"role": "assistant", "content": expected.text}, user("And?")]
    assert second.output_text == answer_of(alone, talk).text and second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="is not known"):
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    gone = client.responses.create(model="tiny", input="x", store=False, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)


def test_responses_stream_every_event(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input=ASK, max_output_tokens=12)
    events = list(client.responses.create(model="tiny", input=ASK, max_output_tokens=12, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    # The client's helper wants an answer that ended by itself.
    stop = whole.output_text[3:6]
    with client.responses.stream(model="tiny", input=ASK, max_output_tokens=12, extra_body={"stop": stop}) as stream:
        final = stream.get_final_response()
    assert final.output_text == whole.output_text[:whole.output_text.index(stop)] and final.status == "completed"


@pytest.mark.parametrize("extra, message", [
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text: type 'json_schema' comes without a schema"),
    ({"background": True}, "background is not supported"),
    ({"truncation": "auto"}, "allowed: 'disabled'"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": []}, "messages is empty"),
])
def test_responses_mistakes(spoken: Running, extra: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{spoken.url}/v1/responses", json={"input": "x", **extra})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_the_store_is_bounded() -> None:
    store = Store(3, most_characters=100)
    for name in "abcd":
        store.put({"id": name}, [{"content": "x"}])
    with pytest.raises(ApiError, match="'a' is not known"):
        store.get("a")
    store.get("b")                                           # used, so that c is the next to leave
    store.put({"id": "e"}, [{"content": "x"}])
    assert [name for name in "bcde" if name in store._kept] == ["b", "d", "e"]
    store.put({"id": "f"}, [{"content": "x" * 101}])
    assert not store._kept and store._characters == 0


def test_messages_answer_and_count(claude: anthropic.Anthropic, alone: LLM) -> None:
    talk = [{"role": "system", "content": "Be calm."}, user(ASK)]
    expected = answer_of(alone, talk)
    request: dict[str, Any] = {"model": "tiny", "system": [{"type": "text", "text": "Be calm."}],
                               "messages": [{"role": "user", "content": [{"type": "text", "text": ASK}]}]}
    answer = claude.messages.create(max_tokens=12, **request)
    assert (answer.content[0].text, answer.stop_reason) == (expected.text, "max_tokens")    # type: ignore[union-attr]
    count = claude.messages.count_tokens(**request).input_tokens
    assert count == len(alone.frontend.render(talk))
    assert count == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert answer.usage.output_tokens == 12
    stop = expected.text[2:5]
    answer = claude.messages.create(max_tokens=12, stop_sequences=[stop], **request)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == expected.text[:expected.text.index(stop)]              # type: ignore[union-attr]
    begun = [*request["messages"], {"role": "assistant", "content": "The light"}]
    answer = claude.messages.create(model="tiny", max_tokens=6, messages=begun)
    ids = alone.frontend.render([user(ASK), begun[1]], continue_final_message=True)
    assert answer.content[0].text == alone.generate(                                        # type: ignore[union-attr]
        {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text


def test_messages_stream_every_event(claude: anthropic.Anthropic) -> None:
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": [user(ASK)]}
    whole = claude.messages.create(**request)
    kinds = [event.type for event in claude.messages.create(stream=True, **request)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with claude.messages.stream(**request) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text                         # type: ignore[union-attr]
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, 12)


@pytest.mark.parametrize("extra, status, kind, message", [
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"model": "other"}, 404, "not_found_error", "served: tiny"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error", "'image'"),
    ({"messages": [user("sea " * 300)]}, 400, "invalid_request_error", "the context of 256"),
])
def test_messages_mistakes(spoken: Running, extra: dict[str, Any], status: int, kind: str, message: str) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [user("x")], **extra}
    for stream in (False, True):
        answer = httpx.post(f"{spoken.url}/v1/messages", json={**body, "stream": stream})
        assert answer.status_code == status and answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == kind and message in answer.json()["error"]["message"]


def expected_rows(llm: LLM, text: str) -> torch.Tensor:
    """(T, hidden): final hidden states of a prompt, run through the model's modules without the engine or its cache."""
    assert llm.tokenizer is not None
    ids = torch.tensor(llm.tokenizer.encode(text))
    with torch.inference_mode():
        rows: torch.Tensor = llm.loaded.model(whole([len(ids)], ids)).hidden
    return rows


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_pooled_hidden_states(folder: Path, pooling: str) -> None:
    texts = ["The sea is calm", "大海很平静 🙂", "The light is low. " * 12]
    llm = LLM(folder, threads=1, backend="torch", max_num_batched_tokens=32)       # the last needs several passes
    rows = [expected_rows(llm, text) for text in texts]
    wanted = [r[-1] if pooling == "last" else r.mean(0) for r in rows]
    with Running(llm, model="tiny", pooling_type=pooling) as server, \
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
        for got, vector in zip(plain.data, wanted):
            torch.testing.assert_close(torch.tensor(got.embedding), vector / vector.norm(), atol=1e-4, rtol=1e-3)
            assert math.isclose(sum(x * x for x in got.embedding), 1, rel_tol=1e-5)
        packed = client.embeddings.create(model="tiny", input=texts)               # the client asks for base64
        again = client.embeddings.create(model="tiny", input=texts[0]).data[0].embedding
        assert [len(d.embedding) for d in packed.data] == [32, 32, 32]
        for one, other in zip(plain.data, packed.data):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert again == pytest.approx(plain.data[0].embedding, abs=1e-5)
        assert llm.tokenizer is not None
        assert plain.usage.prompt_tokens == sum(len(llm.tokenizer.encode(text)) for text in texts)
        with pytest.raises(openai.BadRequestError, match="dimensions is not supported"):
            client.embeddings.create(model="tiny", input="x", dimensions=8)
        with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
            client.embeddings.create(model="tiny", input=["x", ""])
        with pytest.raises(openai.BadRequestError, match="the context of 256"):
            client.embeddings.create(model="tiny", input="sea " * 400)
