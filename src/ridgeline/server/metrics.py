"""Prometheus metrics, prefix `ridgeline:`. Histograms are fed when a request ends; gauges and counters of the engine
are read when somebody asks, so the engine's loop does not know of them. Definitions: docs/metrics.md."""
from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.analysis.live import Meter
from ridgeline.engine import EngineStats
from ridgeline.types import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From 1 ms, since a small model answers a cached prompt in a few.
LATENCY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
           2560)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03,
                  0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", LATENCY),
    "inter_token_latency_seconds": ("One value a token after the first; tokens of one step share its time.", BETWEEN_TOKENS),
    "request_time_per_output_token_seconds": ("Mean time of a request's tokens after the first.", BETWEEN_TOKENS),
    "e2e_request_latency_seconds": ("Arrival to end.", LATENCY),
    "request_queue_time_seconds": ("Arrival to first scheduled.", LATENCY),
    "request_prefill_time_seconds": ("First scheduled to first token.", LATENCY),
    "request_decode_time_seconds": ("First token to last.", LATENCY),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", TOKENS),
    "iteration_tokens_total": ("Rows of the target's passes in one engine step.", STEP_TOKENS),
}
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """stats: the engine's counters; model: the label of every sample; meter: what accounts for its passes."""

    def __init__(self, stats: EngineStats, model: str, meter: Meter | None = None):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, model, meter))
        label = ("model_name",)
        self._histograms = {name: Histogram(f"ridgeline:{name}", text, label, buckets=buckets,
                                            registry=self.registry).labels(model)
                            for name, (text, buckets) in HISTOGRAMS.items()}
        ended = Counter("ridgeline:request_success", "Answers that ended, by how.", ("model_name", "finished_reason"),
                        registry=self.registry)
        self._ended = {reason: ended.labels(model, reason) for reason in FINISH_REASONS}
        self._http = Counter("ridgeline:http_requests", "HTTP requests answered.", ("method", "route", "status"),
                             registry=self.registry)
        self._rows = 0

    def observe(self, metrics: RequestMetrics, reason: str) -> None:
        """One answer has ended."""
        self.count(reason)
        h, m = self._histograms, metrics
        for name, value in (("time_to_first_token_seconds", m.ttft_s), ("e2e_request_latency_seconds", m.e2e_s),
                            ("request_time_per_output_token_seconds", m.tpot_s), ("request_queue_time_seconds", m.queue_s)):
            if value is not None:
                h[name].observe(value)
        if m.first_token is not None and m.scheduled is not None and m.last_token is not None:
            h["request_prefill_time_seconds"].observe(m.first_token - m.scheduled)
            h["request_decode_time_seconds"].observe(m.last_token - m.first_token)
        h["request_prompt_tokens"].observe(m.prompt_tokens)
        h["request_generation_tokens"].observe(m.completion_tokens)
        between = h["inter_token_latency_seconds"]
        for gap in m.itl_s:
            between.observe(gap)

    def count(self, reason: str, number: int = 1) -> None:
        self._ended[reason if reason in self._ended else "error"].inc(number)

    def step(self, stats: EngineStats) -> None:
        """After each engine step, in the engine's thread."""
        rows = stats.target_rows - self._rows
        self._rows = stats.target_rows
        if rows:
            self._histograms["iteration_tokens_total"].observe(rows)

    def http(self, method: str, route: str, status: int) -> None:
        self._http.labels(method, route, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, stats: EngineStats, model: str, meter: Meter | None):
        self._stats, self._model, self._meter = stats, model, meter

    def collect(self) -> Iterator[Metric]:
        s = self._stats
        for name, text, value in (
                ("num_requests_running", "Sequences that have a seat.", s.running),
                ("num_requests_waiting", "Sequences that wait for one.", s.waiting),
                ("kv_cache_usage_perc", "Share of the cache that live sequences own, 0 to 1.", s.kv_usage)):
            gauge = GaugeMetricFamily(f"ridgeline:{name}", text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, text, value in (
                ("prompt_tokens", "Prompt tokens computed.", s.prompt_tokens),
                ("generation_tokens", "Tokens generated.", s.generation_tokens),
                ("num_preemptions", "Sequences put back because the cache was full.", s.preemptions),
                ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_queries),
                ("prefix_cache_hits", "Of these, found.", s.prefix_hits),
                ("spec_decode_num_drafts", "Passes that verified draft tokens.", s.drafts),
                ("spec_decode_num_draft_tokens", "Draft tokens verified.", s.draft_tokens),
                ("spec_decode_num_accepted_tokens", "Of these, accepted.", s.accepted_tokens),
                ("diffusion_num_denoising_steps", "Passes of block diffusion over committed blocks.", s.denoising_steps),
                ("diffusion_num_committed_tokens", "Tokens of these blocks that were committed.", s.diffusion_tokens),
                ("diffusion_num_blocks", "Blocks committed.", s.diffusion_blocks)):
            counter = CounterMetricFamily(f"ridgeline:{name}", text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        positions = CounterMetricFamily("ridgeline:spec_decode_num_accepted_tokens_per_pos",
                                        "Draft tokens accepted, by their place in the draft.",
                                        labels=("model_name", "position"))
        for place, accepted in enumerate(list(s.accepted_per_pos)):
            positions.add_metric((self._model, str(place)), accepted)
        yield positions
        if self._meter is not None:
            yield from self._estimates(self._meter)

    def _estimates(self, meter: Meter) -> Iterator[Metric]:
        for name, text, value in (
                ("estimated_flops", "Operations of the target's passes, two a multiply-add.", meter.flops),
                ("estimated_read_bytes", "Weights, keys and values that they read.", meter.read_bytes),
                ("estimated_write_bytes", "Keys and values that they wrote.", meter.write_bytes)):
            counter = CounterMetricFamily(f"ridgeline:{name}", text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        text = "Share of the recent time of a stage that a kind of limit explains."
        bottleneck = GaugeMetricFamily("ridgeline:bottleneck", text,
                                       labels=("model_name", "stage", "kind"))
        for stage, found in meter.shares().items():
            for kind, part in found.items():
                bottleneck.add_metric((self._model, stage, kind), part)
        yield bottleneck
