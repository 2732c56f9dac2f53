"""Conversations behind one long system prompt: the first pays for it, the others start at once and say the same."""
from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ridgeline import LLM, hub
from ridgeline.errors import ModelNotFound
from server_kit import Running

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}")
WORDS = "The keeper of the lighthouse writes down wind and weather each day before the lamp is lit. "
SYSTEM = WORDS * 56                                         # 1,009 tokens with the template's beginning


@pytest.fixture(scope="module")
def gemma() -> Iterator[Running]:
    try:
        hub.resolve("gemma3-270m")
    except ModelNotFound as missing:
        pytest.skip(f"needs the packaged model: {missing}")
    llm = LLM("gemma3-270m", threads=1, max_model_len=2048, chat_template=TEMPLATE, progress=False)
    with Running(llm, model="gemma3-270m") as server:
        yield server


def ask(http: httpx.Client, question: str, salt: str) -> tuple[float, dict[str, Any], list[Any]]:
    """Seconds to the first token, usage, and all that the answer's tokens were chosen by."""
    body = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}], "temperature": 0,
            "max_tokens": 8, "ignore_eos": True, "logprobs": True, "top_logprobs": 3, "cache_salt": salt, "stream": True,
            "stream_options": {"include_usage": True}}
    start, first, found, usage = time.perf_counter(), None, [], {}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event["usage"] or usage
            for choice in event["choices"]:
                if choice["logprobs"]:
                    first = first or time.perf_counter() - start
                    found += choice["logprobs"]["content"]
    assert first is not None and len(found) == 8
    return first, usage, found


def counters(http: httpx.Client) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix cache, and found there."""
    text = http.get("/metrics").text
    queries, hits = (re.search(rf"^ridgeline:prefix_cache_{name}_total{{.*}} (.*)$", text, re.M)
                     for name in ("queries", "hits"))
    assert queries and hits
    return float(queries[1]), float(hits[1])


def test_the_second_request_behind_a_system_prompt_starts_at_once(gemma: Running) -> None:
    """The best of three each, since other work on the machine only adds to a time."""
    questions = ["Is the sea calm?", "Who lit the lamp?"]
    firsts, seconds = [], []
    with httpx.Client(base_url=gemma.url, timeout=60) as http:
        missed = ask(http, questions[1], "alone")
        assert missed[1]["prompt_tokens"] >= 1000 and missed[1]["prompt_tokens_details"]["cached_tokens"] == 0
        for salt in ("a", "b", "c"):
            before = counters(http)
            first, usage, _ = ask(http, questions[0], salt)
            assert counters(http) == (before[0] + usage["prompt_tokens"], before[1])
            second, usage, tokens = ask(http, questions[1], salt)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert 950 <= cached < usage["prompt_tokens"]
            assert counters(http)[1] == before[1] + cached
            assert tokens == missed[2]                      # bit for bit: log-probabilities too
            firsts.append(first)
            seconds.append(second)
    assert min(seconds) <= 0.2 * min(firsts), (seconds, firsts)
