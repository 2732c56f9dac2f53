"""Planning without weights: Llama-3.1-70B's public shape on H100s, against a calculation by hand."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.analysis.catalogue import hardware
from ridgeline.analysis.plan import plan
from ridgeline.analysis.work import totals
from ridgeline.errors import ConfigError

LLAMA_70B = json.loads((Path(__file__).parents[1] / "data" / "llama-3.1-70b.json").read_text())
NAME = "Llama-3.1-70B"
# 80 layers: q and o 8192 x 8192, k and v 8192 x 1024, three of 8192 x 28672; 128256 x 8192 twice.
LAYER, ENDS, NORMS = 2 * 8192 ** 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672, 128256 * 8192, 161 * 8192
BANDWIDTH, PEAK, LINK, LATENCY, FLOAT_PEAK = 3350e9, 989.4e12, 450e9, 3e-6, 66.9e12      # of the data sheet; one way of NVLink


def by_hand(batch: int, context: int) -> float:
    """Seconds of a decoding step: 4.5 bits a weight of layers, 8.5 of the ends, half of all on each of two H100."""
    d, f, heads, kv, h, layers, vocab = 8192, 28672, 64, 8, 128, 80, 128256

    def matrix(inputs: int, outputs: int, bits: float = 4.5) -> float:
        """A row reads its inputs and writes its outputs, 2 bytes each."""
        moved = inputs * outputs * bits / 8 + 2 * batch * (inputs + outputs)
        return max(moved / BANDWIDTH, 2 * batch * inputs * outputs / PEAK)

    def small(elements: float, operations: float = 0) -> float:
        return max(2 * batch * elements / BANDWIDTH, batch * operations / FLOAT_PEAK)

    queries, keys = heads * h // 2, kv * h // 2                  # of one device
    all_reduce = 2 * 1 / 2 * batch * d * 2 / LINK + 2 * LATENCY
    keys_and_values = batch * (context + 1) * 2 * keys * 2
    core = max((keys_and_values + 2 * batch * 2 * queries) / BANDWIDTH, 4 * batch * queries * (context + 1) / PEAK)
    norm, residual = small(2 * d, 4 * d), small(3 * d, d)
    # Rotation reads and writes queries and keys; keys and values are written to the cache.
    rotation = small(2 * (queries + keys) + keys + 2 * keys, 3 * (queries + keys))
    # gate and up are one kernel that writes their product alone
    up = max((d * f * 4.5 / 8 + 2 * batch * (d + f / 2)) / BANDWIDTH, 2 * batch * d * f / PEAK)
    down = matrix(f // 2, d)
    layer = 2 * norm + 2 * residual + matrix(d, queries + 2 * keys) + rotation + core + matrix(queries, d) + up + down
    # Logits stay where the best of them is found; all_gather passes them to the other device.
    head = max((vocab / 2 * d * 8.5 / 8 + 2 * batch * d) / BANDWIDTH, 2 * batch * d * vocab / 2 / PEAK)
    lookup = (batch * d * 8.5 / 8 + 2 * batch * d) / BANDWIDTH
    gather = batch * vocab * 2 / 2 / LINK + LATENCY
    choice = batch * vocab / FLOAT_PEAK
    return layers * (layer + 2 * all_reduce) + lookup + all_reduce + norm + head + gather + choice


def test_bf16_does_not_fit_one_h100_and_by_how_much():
    found = plan(LLAMA_70B, hardware("H100"), name=NAME)
    weights = 2 * (80 * LAYER + 2 * ENDS + NORMS)
    assert found.spec.parameters == 70_553_706_496 and found.spec.weight_bytes == weights
    assert not found.fits and found.missing_bytes == weights - 80_000_000_000 and found.cache_tokens == 0
    assert found.verdict() == ("Llama-3.1-70B: 141.1 GB of weights, and H100 has 80.0 GB: it does not fit, 61.1 GB are missing")


def test_int4_on_two_h100_fits():
    found = plan(LLAMA_70B, hardware("H100"), name=NAME, quantization="int4", devices=2)
    share = (80 * LAYER * 4.5 / 8 + 2 * ENDS * 8.5 / 8) / 2 + 2 * NORMS
    assert found.spec.weight_bytes == share and found.fits and found.missing_bytes == 0
    assert found.spec.kv_bytes_per_token() == 80 * 2 * 8 * 128 * 2 / 2
    assert found.cache_tokens == (80_000_000_000 - share) // found.spec.kv_bytes_per_token()
    assert found.verdict().startswith("Llama-3.1-70B, int4: 20.4 GB of weights, and each of 2 H100 has 80.0 GB: it fits, with ")


@pytest.mark.parametrize("context", [128, 2048, 32768])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_decoding_step_is_what_a_hand_calculation_says(batch, context):
    found = plan(LLAMA_70B, hardware("H100"), quantization="int4", devices=2)
    assert found.decode_s(batch, context) == pytest.approx(by_hand(batch, context), rel=1e-6)


def test_a_step_has_all_three_bounds():
    """At batch 1 weights and collectives, at 64 keys and values too, at 256 the compute roof of matrices."""
    found = plan(LLAMA_70B, hardware("H100"), quantization="int4", devices=2)

    def share(batch: int, bound: str, context: int = 2048) -> float:
        works = found.predict(batch, context)
        return sum(p.seconds for p in works if p.bound == bound) / sum(p.seconds for p in works)

    assert share(1, "memory") > 0.8 and share(1, "compute") < 1e-5 and 0.05 < share(1, "overhead") < 0.2
    assert share(64, "kv") > 0.3 and share(64, "kv", 128) < 0.1
    assert share(256, "compute", 128) > 0.6


def test_batching_stops_helping_between_the_two_roofs():
    """Where keys and values outweigh the weights, more sequences still help a little; where matrices are bound by computing,
    no more."""
    found = plan(LLAMA_70B, hardware("H100"), quantization="int4", devices=2)
    roofs, stops = found.roofs(2048), found.stops(2048)
    assert roofs.compute == pytest.approx(PEAK * 4.5 / 8 / (2 * BANDWIDTH), rel=0.03)              # the head has 8.5 bits
    weights = (80 * LAYER * 4.5 / 8 + ENDS * 8.5 / 8) / 2
    assert roofs.kv == pytest.approx(weights / (2049 * found.spec.kv_bytes_per_token()), rel=1e-3)
    assert roofs.kv < stops < roofs.compute < roofs.memory
    rate = {batch: batch / found.decode_s(batch, 2048) for batch in (1, stops, 2 * stops, 8 * stops)}
    assert rate[stops] > 30 * rate[1] and rate[8 * stops] < 1.12 * rate[stops]


def test_long_contexts_stop_batching_earlier():
    found = plan(LLAMA_70B, hardware("H100"), quantization="int4", devices=2)
    assert found.roofs(32768).kv < found.roofs(2048).kv / 15 and found.roofs(32768).memory < 12


def test_a_cpu_runs_our_kernels_and_a_gpu_without_bfloat16_another_float():
    raw = {**LLAMA_70B, "num_hidden_layers": 2}
    cpu, old = plan(raw, hardware("EPYC-9654"), quantization="int4"), plan(raw, hardware("T4"), quantization="int4")
    assert (cpu.spec.kernels, cpu.spec.stream) == ("native", 4)
    assert {p.work.compute for p in cpu.predict(1, 9) if p.work.kind == "linear"} == {"int8"}
    assert {p.work.compute for p in old.predict(1, 9) if p.work.kind in ("linear", "attention")} == {"float16"}


def test_tensor_parallel_needs_a_link():
    found = plan({**LLAMA_70B, "num_hidden_layers": 2}, hardware("EPYC-9654"), devices=2)
    with pytest.raises(ConfigError, match="EPYC-9654 has no link to another device"):
        found.decode_s(1, 9)


def test_a_plan_of_one_layer_counts_its_totals():
    found = plan({**LLAMA_70B, "num_hidden_layers": 1}, hardware("H100"))
    sums = totals(p.work for p in found.predict(1, 0))
    assert sums.weight_bytes == 2 * (LAYER + ENDS + 8192)               # the embedding's row
    assert sums.kv_bytes == 2 * 2 * 2 * 8 * 128                         # written, and read
