"""Odd bodies on every endpoint: never a 5xx, and the next request is answered as ever."""
from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from ridgeline.server.app import ENDPOINTS
from server_kit import Running

# What a field may hold that nobody thought of.
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 256, 2**31, 2**63, 2**64, 2**70, -2**70, 0.5, -0.0, 1e-300, 1e300, -1e300, 1e999,
    "", "x", "0", "true", "🙂\N{NULL}", "\ud800", "a" * 3000, [], [[]], [None], [0], [-1], [2**70], ["x", 1], [[1], "x"],
    {}, {"a": 1}, {"1": 1e300}, {"1": -1e300}, {"-1": 1}, {"type": "text"}, {"type": "json_object"}, [{}], [{"role": "user"}],
    [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": 5, "content": {}}], [{"role": "assistant", "content": ""}], [{"role": "user", "content": "x", "tool_calls": 5}]]
USUAL: dict[str, Any] = {
    "prompt": "The sea", "messages": [{"role": "user", "content": "The sea"}], "input": "The sea", "tokens": [5, 6],
    "max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3}


@pytest.mark.parametrize("path", sorted(ENDPOINTS))
def test_odd_bodies_are_the_clients_fault(server: Running, path: str) -> None:
    rng = random.Random(path)
    schema, _ = ENDPOINTS[path]
    names = sorted(schema.model_fields)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        expected = http.post("/v1/completions", json={"prompt": "The sea", "temperature": 0, "max_tokens": 5}).json()["choices"]
        usual = {name: value for name, value in USUAL.items() if name in names and (path, name) != ("/tokenize", "messages")}
        assert http.post(path, json=usual).status_code == 200
        statuses = set()
        for _ in range(150):
            count = min(len(names), rng.choice((1, 1, 1, 2, 4)))
            body = {**usual, **{name: rng.choice(ODD) for name in rng.sample(names, count)}}
            answer = http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (body, answer.text)
            if '"stream": true' in json.dumps(body) and answer.status_code == 200:
                assert '"error":{' not in answer.text, (body, answer.text)
        assert 400 in statuses
        for content in (b"", b"[", b"[]", b"5", b"[" * 5000, b'{"a": ' * 5000, b"\xff\xfe",
                        b'{"prompt": ' + b"9" * 5000 + b"}"):
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and "error" in answer.json(), (content[:20], answer.text)
        again = http.post("/v1/completions", json={"prompt": "The sea", "temperature": 0, "max_tokens": 5}).json()["choices"]
        assert again == expected
