"""Spans as a collector gets them: OTLP over HTTP, protobuf."""
from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ridgeline import LLM
from ridgeline.errors import ConfigError
from ridgeline.server.config import ServerConfig
from ridgeline.server.tracing import traces_url
from server_kit import Running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.paths: list[str] = []
        self.services: set[str] = set()
        self.spans: list[Any] = []


class Taker(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.paths.append(self.path)
        for resource in request.resource_spans:
            self.server.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    yield collector
    collector.shutdown()
    thread.join()
    collector.server_close()


def values(span: Any) -> dict[str, Any]:
    return {a.key: _value(a.value) for a in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def test_each_request_is_a_span_in_the_callers_trace(folder: Path, collector: Collector) -> None:
    before = time.time_ns()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    with Running(LLM(folder, threads=1), model="tiny", otlp_traces_endpoint=endpoint) as server, \
            httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"prompt": "The sea", "max_tokens": 9, "n": 2, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}
        usage = http.post("/v1/completions", json=body, headers={
            "traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}).json()["usage"]
        http.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00", "x-request-id": "unsampled"})
        http.post("/v1/completions", json={**body, "n": 1, "stream": True}, headers={"x-request-id": "two"})
        assert http.post("/v1/completions", json={"prompt": "sea " * 400}, headers={"x-request-id": "bad"}).status_code == 400
        http.get("/health")
    # The end of the server sends what waited.
    assert set(collector.paths) == {"/v1/traces"} and collector.services == {"ridgeline"}
    spans = {values(span)["gen_ai.request.id"]: span for span in collector.spans}
    assert list(spans) == ["one", "two", "bad"]
    one, two, bad = spans.values()
    assert (one.trace_id.hex(), one.parent_span_id.hex()) == (TRACE, PARENT) and one.kind == Span.SPAN_KIND_SERVER
    assert two.trace_id.hex() != TRACE and not two.parent_span_id
    assert {span.name for span in spans.values()} == {"llm_request"}
    found = values(one)
    assert found.items() >= {
        "gen_ai.response.model": "tiny", "gen_ai.request.n": 2, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 9, "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 18, "gen_ai.usage.num_sequences": 2,
        "gen_ai.response.finish_reasons": ["length", "length"]}.items()
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in found.items() if "latency" in name}
    assert set(latency) == {"time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode",
                            "time_in_model_inference"}
    assert 0 <= latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    prefilled = latency["time_in_queue"] + latency["time_in_model_prefill"]
    assert prefilled == pytest.approx(latency["time_to_first_token"], abs=1e-2)
    assert before < one.start_time_unix_nano and one.end_time_unix_nano < time.time_ns()
    assert one.end_time_unix_nano - one.start_time_unix_nano >= latency["e2e"] * 1e9 - 1e6
    assert one.status.code == Status.STATUS_CODE_UNSET
    assert bad.status.code == Status.STATUS_CODE_ERROR and "the context of 256" in bad.status.message
    assert values(bad)["gen_ai.usage.num_sequences"] == 0


def test_a_collector_that_is_gone_costs_nothing(folder: Path) -> None:
    gone = Collector()
    gone.server_close()
    start = time.monotonic()
    with Running(LLM(folder, threads=1), model="tiny", otlp_traces_endpoint=f"http://127.0.0.1:{gone.server_port}") as server:
        for _ in range(3):
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "The sea", "max_tokens": 3}, timeout=60)
            assert answer.status_code == 200
    assert time.monotonic() - start < 15


def test_the_endpoint_is_checked_before_a_model_is_loaded() -> None:
    assert traces_url("http://host:4318") == traces_url("http://host:4318/") == "http://host:4318/v1/traces"
    assert traces_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"
    for wrong in ("host:4317", "grpc://host:4317", "http://"):
        with pytest.raises(ConfigError, match="it must be a URL such as"):
            ServerConfig(model="m", otlp_traces_endpoint=wrong)


def test_missing_packages_are_named() -> None:
    """In a process that cannot import them; without the flag nothing imports them."""
    code = ("import sys; sys.modules['opentelemetry'] = None\n"
            "from ridgeline.server.config import ServerConfig; from ridgeline.errors import ConfigError\n"
            "ServerConfig(model='m')\n"
            "try: ServerConfig(model='m', otlp_traces_endpoint='http://h')\n"
            "except ConfigError as error: print(error)")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'ridgeline[otel]'" in ran.stdout
