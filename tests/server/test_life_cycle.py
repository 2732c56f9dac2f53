"""Clients that go, queues that fill, keys, limits, faults, and the way down."""
from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ridgeline import LLM
from ridgeline.errors import ConfigError
from ridgeline.server.config import ServerConfig
from ridgeline.server.lifecycle import listen
from server_kit import Running, client_of, events, until

LONG: dict[str, Any] = {"prompt": "The sea", "temperature": 0, "max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="session")
def slow_llm(folder: Path) -> LLM:
    """Steps of at least 5 ms, so that a request of 240 tokens runs for more than a second."""
    llm = LLM(folder, threads=1, max_num_seqs=2)
    step = llm.engine.step

    def slow() -> Any:
        time.sleep(0.005)
        return step()

    llm.engine.step = slow                                   # type: ignore[method-assign]
    return llm


@contextmanager
def open_stream(url: str, path: str = "/v1/completions", **body: Any) -> Iterator[Iterator[str]]:
    with httpx.stream("POST", f"{url}{path}", json={**LONG, "stream": True, **body}, timeout=60) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def test_a_client_that_goes_ends_its_request(slow_llm: LLM) -> None:
    engine = slow_llm.engine
    with Running(slow_llm, model="tiny") as server:
        with open_stream(server.url):
            assert len(engine.scheduler.running) == 1
        server.wait_idle()
        # Not streaming: nothing is written before the end, so only the closed connection tells.
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={**LONG, "n": 2}, timeout=0.3)
        server.wait_idle()
        # While its prompt is still in the queue behind others.
        with open_stream(server.url, n=2):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=0.2)
            until(lambda: not engine.scheduler.waiting)
        server.wait_idle()
        assert engine.stats.generation_tokens < 3 * 240
        text = httpx.get(f"{server.url}/metrics").text
        assert re.search(r'request_success_total\{finished_reason="abort",model_name="tiny"\} [3-9]', text)


def test_a_full_queue_refuses_and_recovers(slow_llm: LLM) -> None:
    with Running(slow_llm, model="tiny", max_queue=1) as server:
        with open_stream(server.url, n=2), open_stream_waiting(server):
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
            with client_of(server.url) as client, pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="x")
        server.wait_idle()
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": 4})
        assert answer.status_code == 400 and "at most 3 fit" in answer.json()["error"]["message"]


@contextmanager
def open_stream_waiting(server: Running) -> Iterator[None]:
    """One request that waits for a seat."""
    body = json.dumps({**LONG, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                           + str(len(body)).encode() + b"\r\n\r\n" + body)
        until(lambda: len(server.llm.engine.scheduler.waiting) == 1)
        yield


def test_keys_guard_everything_but_the_state_routes(slow_llm: LLM) -> None:
    with Running(slow_llm, model="tiny", api_key=["secret", "other"]) as server:
        for path in ("/health", "/ready", "/version", "/metrics", "/"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}, {"x-api-key": ""}):
            answer = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.post(f"{server.url}/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        for headers in ({"authorization": "Bearer secret"}, {"authorization": "bearer other"}, {"x-api-key": "secret"}):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        with client_of(server.url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_large_bodies_are_refused(slow_llm: LLM) -> None:
    with Running(slow_llm, model="tiny", max_request_bytes=1000) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 1000})
        assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]

        def chunks() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(20):
                yield b"x" * 100

        answer = httpx.post(f"{server.url}/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_request_ids_and_cors(slow_llm: LLM) -> None:
    with Running(slow_llm, model="tiny", allowed_origins=["http://page"]) as server:
        ask = {"prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=ask,
                            headers={"X-Request-Id": "mine-1", "Origin": "http://page"})
        assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
        assert answer.headers["access-control-allow-origin"] == "http://page"
        ids = {httpx.get(f"{server.url}/health").headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3
        bad = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "a" * 300}).headers["x-request-id"]
        assert len(bad) == 32
        answer = httpx.get(f"{server.url}/health", headers={"Origin": "http://elsewhere"})
        assert "access-control-allow-origin" not in answer.headers
    with Running(slow_llm, model="tiny") as server:
        answer = httpx.get(f"{server.url}/health", headers={"Origin": "http://page"})
        assert "access-control-allow-origin" not in answer.headers


def test_an_exception_in_one_request_hurts_no_other(slow_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = slow_llm.engine.runners["target"]
    execute = runner.execute

    def failing(slices: Any) -> Any:
        if any(66 in s.seq.prompt for s in slices):
            raise ValueError("no kernel for this")
        return execute(slices)

    with Running(slow_llm, model="tiny") as server:
        with open_stream(server.url) as lines:
            monkeypatch.setattr(runner, "execute", failing)
            # They share a pass, so this one may fail as well; what comes after must not.
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [66, 7], "max_tokens": 2})
            assert answer.status_code == 500 and "no kernel for this" in answer.json()["error"]["message"]
            stream = httpx.post(f"{server.url}/v1/completions", json={"prompt": [66, 7], "max_tokens": 2, "stream": True})
            assert "no kernel for this" in events(stream)[-1]["error"]["message"]
            list(lines)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_an_engine_that_has_ended_is_told_by_health(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, threads=1)
    with Running(llm, model="tiny") as server:
        def fail(*_: object) -> None:
            raise ValueError("broken for good")

        monkeypatch.setattr(llm.engine, "step", fail)
        monkeypatch.setattr(llm.engine, "abort", fail)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 500
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 500
    monkeypatch.undo()
    llm.engine.abort("request-2")


def test_draining_finishes_what_runs_and_refuses_what_comes(slow_llm: LLM) -> None:
    with Running(slow_llm, model="tiny") as server:
        with httpx.Client(base_url=server.url) as late, open_stream(server.url) as lines:
            assert late.get("/ready").status_code == 200
            server.end()
            until(lambda: server.server.service.draining)
            assert late.get("/health").status_code == 200
            assert late.get("/ready").status_code == 503
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})     # a new connection too
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in answer.headers
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        server.join()


def test_what_has_not_finished_in_time_is_told(slow_llm: LLM) -> None:
    with Running(slow_llm, model="tiny", shutdown_timeout=0.1) as server:
        with open_stream(server.url) as lines:
            server.end()
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and "shutting down" in rest[-2]
        server.join()


def test_readiness_waits_for_the_warm_up(folder: Path) -> None:
    llm = LLM(folder, threads=1)
    step, gate = llm.engine.step, threading.Event()

    def gated() -> Any:
        gate.wait(20)
        return step()

    llm.engine.step = gated                                  # type: ignore[method-assign]
    running = Running(llm, model="tiny")
    running._thread.start()
    until(lambda: _answers(running.url))
    assert httpx.get(f"{running.url}/ready").status_code == 503
    assert httpx.get(f"{running.url}/health").status_code == 200
    gate.set()
    until(lambda: httpx.get(f"{running.url}/ready").status_code == 200)
    running.end()
    running.join()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.ConnectError:
        return False


def test_health_answers_while_a_giant_prompt_is_tokenised(server: Running) -> None:
    """Tokenising 4 MB takes seconds and must hold neither the event loop nor the engine."""
    async def main() -> tuple[list[float], float, int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            giant = asyncio.create_task(client.post("/v1/completions", json={"prompt": "The sea is calm. " * 120_000}))
            await asyncio.sleep(0.3)
            delays: list[float] = []
            start = time.perf_counter()
            other = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
            taken = time.perf_counter() - start
            while not giant.done():
                start = time.perf_counter()
                await client.get("/health")
                delays.append(time.perf_counter() - start)
                await asyncio.sleep(0.01)
            assert other.status_code == 200
            return delays, taken, (await giant).status_code

    delays, taken, status = asyncio.run(main())
    assert status == 400 and len(delays) > 10
    assert sorted(delays)[len(delays) // 2] < 0.1 and taken < 1.0, (max(delays), taken)


def test_the_command_serves_and_ends_on_sigterm(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    command = [sys.executable, "-m", "ridgeline", "serve", str(folder), "--port", "0", "--served-model-name", "tiny", "alias",
               "--threads", "1", "--access-log", str(log), "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "RIDGELINE_API_KEY": "k"})
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving" in line)
        url = line.split()[-1]
        with client_of(url, "k") as client:
            assert [m.id for m in client.models.list()] == ["tiny", "alias"]
            answer = client.completions.create(model="alias", prompt="The sea", max_tokens=4, temperature=0)
            assert answer.model == "alias" and answer.usage is not None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(e["method"], e["path"], e["status"]) for e in entries] == [
        ("GET", "/v1/models", 200), ("POST", "/v1/completions", 200)]
    entry = entries[1]
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert 0 < entry["ttft_s"] < entry["duration_s"] < 30 and entry["request_id"] in answer.id
    assert "The sea" not in log.read_text()                  # prompts are nobody's business


def test_wrong_flags_are_told_before_a_model_is_loaded() -> None:
    for options in ({"max_queue": -1}, {"shutdown_timeout": float("nan")}, {"pooling_type": "max"}, {"api_key": [""]},
                    {"allow_credentials": True, "allowed_origins": ["*"]}, {"generation_config": "vllm"}):
        with pytest.raises(ConfigError, match=next(iter(options)).split("_")[0]):
            ServerConfig(model="tiny", **options)            # type: ignore[arg-type]
    taken = listen("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
        listen("127.0.0.1", taken.getsockname()[1])
    taken.close()
