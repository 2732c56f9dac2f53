"""OpenTelemetry spans, one for each request that was handed to the engine, sent by OTLP over HTTP in a thread of their own.

Names of spans and attributes are vLLM's. A request's `traceparent` header makes its span part of the caller's trace; one that
says that the trace is not sampled gives none.
"""
from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from ridgeline import __version__
from ridgeline.errors import ConfigError
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import RequestMetrics

SPAN = "llm_request"
HEADERS = ("traceparent", "tracestate")      # W3C Trace Context
DEFAULT_PATH = "/v1/traces"                  # of an endpoint that names a host alone


@dataclass(frozen=True)
class Ended:
    """A request of which nothing more comes. started: when it came, on the monotonic clock; reasons: how its samples ended."""

    request_id: str
    started: float
    headers: Mapping[str, str]
    params: SamplingParams
    prompt_tokens: int
    metrics: Sequence[RequestMetrics]
    reasons: Sequence[str]
    error: str | None = None


class Tracer:
    """Sends spans to one collector. endpoint: one that `check_endpoint` has passed.

    A collector that does not answer costs the requests nothing: spans wait in a bounded queue, and then are dropped.
    """

    def __init__(self, endpoint: str, model: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.model = model
        # The environment's name of the service counts more than ours.
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": "ridgeline"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("ridgeline", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: Ended) -> None:
        """Make the span of a request that has ended; times become those of the wall clock."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now, wall = time.monotonic(), time.time_ns()
        span = self._tracer.start_span(SPAN, self._propagator.extract(dict(request.headers)), SpanKind.SERVER,
                                       attributes=attributes(request, self.model),
                                       start_time=wall - round((now - request.started) * 1e9))
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(wall)

    def close(self) -> None:
        """Send what waits, and end the thread."""
        self._provider.shutdown()


def attributes(request: Ended, model: str) -> dict[str, Any]:
    """Of a span; times in seconds, of the sample that was first in each."""
    params, metrics = request.params, request.metrics
    found: dict[str, Any] = {
        "gen_ai.request.id": request.request_id, "gen_ai.response.model": model, "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens, "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(m.completion_tokens for m in metrics),
        "gen_ai.usage.num_sequences": len(metrics), "gen_ai.response.finish_reasons": list(request.reasons),
        "gen_ai.latency.time_in_queue": _least([m.queue_s for m in metrics]),
        "gen_ai.latency.time_to_first_token": _least([m.ttft_s for m in metrics]),
        "gen_ai.latency.e2e": _most([m.e2e_s for m in metrics]),
        "gen_ai.latency.time_in_model_prefill": _least([_span(m.scheduled, m.first_token) for m in metrics]),
        "gen_ai.latency.time_in_model_decode": _most([_span(m.first_token, m.last_token) for m in metrics]),
        "gen_ai.latency.time_in_model_inference": _most([_span(m.scheduled, m.last_token) for m in metrics])}
    return {name: value for name, value in found.items() if value is not None}


def check_endpoint(endpoint: str) -> None:
    """raises ConfigError where it is no URL, or the packages are missing."""
    traces_url(endpoint)
    try:
        import_module("opentelemetry.sdk.trace")
        import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry's SDK and its exporter for OTLP over HTTP; install them "
                          "with: pip install 'ridgeline[otel]'") from error


def traces_url(endpoint: str) -> str:
    """Where spans go. raises ConfigError for what is no HTTP URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"otlp_traces_endpoint is {endpoint!r}; it must be a URL such as http://127.0.0.1:4318{DEFAULT_PATH}")
    return endpoint if parts.path.strip("/") else parts._replace(path=DEFAULT_PATH).geturl()


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
