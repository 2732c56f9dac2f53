"""Bytes of a stream become chunks, counts and one-line errors."""
from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.bench.serve.record import Record, share_out
from ridgeline.bench.serve.stream import Answer, BrokenAnswer, Events, message_of

STREAM = b': comment\r\n\r\ndata: {"a": 1}\r\n\r\ndata:first\ndata: second\n\nevent: x\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts):
    events, edges = Events(), sorted({0, *cuts, len(STREAM)})
    found = [event for a, b in pairwise(edges) for event in events.feed(STREAM[a:b])]
    assert found == [b'{"a": 1}', b"first\nsecond", b"[DONE]"]


def settled(*events: Any, done: bool = True) -> tuple[Record, Answer]:
    """Event i comes at i seconds."""
    answer, record = Answer(), Record(0, 0, 10, 10, scheduled=-1.0, sent=-0.5)
    for second, event in enumerate(events):
        answer.take(json.dumps(event).encode(), float(second))
    if done:
        answer.take(b"[DONE]", float(len(events)))
    answer.settle(record)
    return record, answer


def text(words: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": words, "finish_reason": finish, **more}]}


def delta(finish: str | None = None, **channels: Any) -> dict[str, Any]:
    return {"choices": [{"delta": channels, "finish_reason": finish}]}


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": tokens, **more}}


def test_a_role_frame_and_empty_deltas_are_no_chunks():
    record, _ = settled(delta(role="assistant", content=""), delta(), delta(content="a"), delta(content="b"),
                        delta(finish="length"), usage(2))
    assert record.times == [2.0, 3.0] and record.tokens == [1, 1]
    assert record.ttft == 3.0 and record.service_ttft == 2.5 and record.e2el == 4.0 and record.tpot == 1.0


@pytest.mark.parametrize("first", [
    {"content": "x"}, {"reasoning_content": "x"}, {"reasoning": "x"}, {"refusal": "x"},
    {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, {"function_call": {"name": "f"}}])
def test_the_first_token_may_come_in_any_channel(first):
    record, _ = settled(delta(role="assistant"), delta(**first), delta(content="b"), delta(finish="length"), usage(2))
    assert record.times[0] == 1.0


def test_reasoning_does_not_go_into_a_history():
    _, answer = settled(delta(reasoning_content="hmm "), delta(content="yes"), delta(finish="stop"), usage(2))
    assert "".join(answer.texts) == "yes"


def test_a_bundled_first_chunk_does_not_flatter_tpot():
    """Five tokens at once, then one a second: one second a token, not (tN - t1) / (n - 1) = 0.43."""
    running = [text("a b c d e", **{}), text("f"), text("g"), text("h", "length")]
    for event, count in zip(running, (5, 6, 7, 8)):
        event["usage"] = {"completion_tokens": count}
    record, _ = settled(*running)
    assert record.tokens == [5, 1, 1, 1] and record.tpot == 1.0 and record.token_gaps() == [1.0, 1.0, 1.0]


def test_a_chunk_of_several_tokens_gives_as_many_gaps():
    record, _ = settled(text("a", token_ids=[1]), text("b c d e", token_ids=[2, 3, 4, 5]), text("f", "length", token_ids=[6]))
    assert record.tokens == [1, 4, 1] and record.counted == "usage"
    assert record.token_gaps() == [0.25] * 4 + [1.0] and record.chunk_gaps() == [1.0, 1.0]


def test_tokens_are_spread_by_text_where_the_server_does_not_say():
    record, _ = settled(text("aaaa"), text("bbbbbbbb"), text("cccc", "length"), usage(8))
    assert record.tokens == [2, 4, 2] and record.spread


def test_held_back_bytes_belong_to_the_next_chunk():
    record, _ = settled(text("a", token_ids=[1]), text("", token_ids=[2]), text("é", token_ids=[3]), text("", "length"))
    assert record.times == [0.0, 2.0] and record.tokens == [1, 2]


def test_the_token_that_ends_the_text_came_with_the_finish_reason():
    record, _ = settled(text("a"), text("b"), text("", "stop"), usage(3))
    assert record.times == [0.0, 1.0, 2.0] and record.tokens == [1, 1, 1] and not record.spread


def test_counts_are_the_servers_not_the_chunks():
    record, _ = settled(text("a"), text("b", "length"), usage(2, prompt_tokens_details={"cached_tokens": 7}))
    assert (record.counted, record.prompt_tokens, record.cached_tokens) == ("usage", 10, 7)
    record, _ = settled(text("a"), text("b", "length"))
    assert (record.counted, record.completion_tokens, record.prompt_tokens) == ("chunks", 2, None)


def test_fewer_tokens_than_chunks():
    """A token whose bytes come in two chunks: time without a token goes to the next one."""
    record, _ = settled(text("a"), text("b"), text("c"), text("d", "length"), usage(2))
    assert record.tokens == [1, 0, 1, 0] and record.token_gaps() == [2.0]


def test_an_answer_of_an_end_token_alone():
    record, _ = settled(text("", "stop"), usage(1))
    assert record.times == [0.0] and record.tokens == [1] and record.tpot is None


@pytest.mark.parametrize("events, done, kind, words", [
    ([text("a")], False, "broken stream", "after 1 chunks without a finish reason"),
    ([], True, "no token", "holds no token"),
    ([text("", "stop")], True, "no token", "holds no token"),
    ([{"error": {"message": "out of pages"}}], False, "error event", "the server reports out of pages"),
    ([["what"]], False, "error event", "what"),
    *(([event], False, "bad event", "an event has another form") for event in (
        {"choices": [7]}, {"choices": 7}, delta(content=["x"]), delta(tool_calls=["x"]), text(7),
        {"usage": [1]}, usage("many"), usage(2, prompt_tokens_details=3))),
])
def test_broken_answers(events, done, kind, words):
    with pytest.raises(BrokenAnswer, match=words) as error:
        settled(*events, done=done)
    assert error.value.kind == kind


def test_an_event_that_is_not_json():
    with pytest.raises(BrokenAnswer, match="an event is not JSON"):
        Answer().take(b"{not", 0.0)


@pytest.mark.parametrize("body, message", [
    ({"error": {"message": "bad"}}, "bad"), ({"detail": "Not Found"}, "Not Found"), ({"message": "m"}, "m"),
    ({"error": "plain"}, "plain"), ("text", "'text'"), ({"error": {"code": 3}}, "{'code': 3}")])
def test_messages_of_errors(body, message):
    assert message_of(body) == message


@given(st.integers(1, 200), st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_sharing_out_loses_no_token(total, sizes):
    shares = share_out(total, sizes)
    assert sum(shares) == total and len(shares) == len(sizes) and shares[0] >= 1
    assert all(share >= 1 for share in shares) or total < len(sizes)


def test_a_record_survives_being_saved():
    record, _ = settled(text("a"), text("b", "length"), usage(2))
    assert Record.of(json.loads(json.dumps(record.as_json()))) == record
