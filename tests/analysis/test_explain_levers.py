"""Sweeps, limits and levers against hand calculations on a machine with round numbers, where a work takes the longer of its
reading and its computing."""
from __future__ import annotations

import dataclasses

import pytest

from explain_kit import MACHINE, findings, spec, subject
from ridgeline.analysis import sweeps
from ridgeline.analysis.advise import (
    PAYS,
    Advice,
    Question,
    advise,
    other_hardware,
    pruned_head,
    regrouped,
    requantised,
    speculation,
)
from ridgeline.analysis.cost import count
from ridgeline.analysis.stages import bandwidth, roof_s
from ridgeline.analysis.subject import HIGH, LOW, Subject, chunks
from ridgeline.analysis.work import Work, decode, totals

Q = Question(1, 512, 128)


def lever(name: str, of: Subject, q: Question = Q) -> Advice:
    return next(a for a in advise(of, q) if a.lever.startswith(name))


def test_chunks_cut_a_prefill_as_the_scheduler_does() -> None:
    assert [[tuple(r[:3]) for r in step] for step in chunks(5, 4)] == [[(0, 4, 0)], [(4, 1, 1)]]
    assert [[tuple(r[:3]) for r in step] for step in chunks(3, 4, start=16, prompts=2)] == [
        [(16, 3, 1), (16, 1, 0)], [(17, 2, 1)]]


def test_a_step_is_reading_the_weights_where_they_are_most() -> None:
    s = subject()
    sums = totals(count(s.spec, decode(512)))
    assert s.decode_s(1, 512) == pytest.approx(sums.bytes / MACHINE.bandwidth, rel=0.02)
    gain = lever("batch 1 -> 8", s).predicted_gain
    assert gain == pytest.approx(8 * s.decode_s(1, 512) / s.decode_s(8, 512)) and 6 < gain < 8


def test_weights_of_four_bits_gain_what_they_save() -> None:
    s = subject()
    advice = lever("weights int4", s)
    sums, four = (totals(count(x, decode(512))) for x in (s.spec, requantised(s.spec, "q4_0", "q8_0")))
    assert advice.predicted_gain == pytest.approx(sums.bytes / four.bytes, rel=0.03) and advice.verify == "quantization"
    stored = subject(quantization="int4")
    assert lever("weights int8", stored).predicted_gain == 1 and not lever("weights int8", stored).pays


def test_kv_quantisation_pays_where_keys_and_values_are_read() -> None:
    s = subject()
    short, long = lever("KV cache int8", s), lever("KV cache int8", s, Question(32, 8192, 128))
    assert not short.pays and long.pays and 1.5 < long.predicted_gain < 2
    assert long.predicted_gain > short.predicted_gain


def test_fewer_heads_read_fewer_keys() -> None:
    s = subject()
    fewer = regrouped(s.spec, 1)
    assert fewer.kv_bytes_per_token() * 4 == s.spec.kv_bytes_per_token()
    assert fewer.parameters < s.spec.parameters and fewer.attention_layers()[0].kv_heads == 1
    q = Question(32, 8192, 128)
    assert lever("GQA", s, q).predicted_gain == pytest.approx(s.decode_s(32, 8192) / s.other(spec=fewer).decode_s(32, 8192))


def test_what_does_not_pay_comes_last_and_says_so() -> None:
    found = advise(subject(), Q)
    pays = [a.pays for a in found]
    assert pays == sorted(pays, reverse=True) and not all(pays)
    assert all(a.pays == (a.predicted_gain >= PAYS) and a.as_json()["pays"] == a.pays for a in found)
    names = " ".join(a.lever for a in found)
    for wanted in ("batch", "weights int8", "weights int4", "KV cache", "prefix", "chunks", "GQA", "MLA", "SSM", "compression",
                   "diffusion"):
        assert wanted in names


def test_speculation_by_hand() -> None:
    """3 tokens a pass, each with 4 of 4 drafts; a pass with drafts takes 1.5 times as long: 3 / 1.5."""
    advice = speculation(subject(), Q, 3.0, 4.0, 4, {1: 0.010, 5: 0.015})
    assert advice.predicted_gain == pytest.approx(2.0)
    rare = speculation(subject(), Q, 1.1, 1.0, 4, {1: 0.010, 5: 0.030})     # one draft a pass on average: t = 10 + 20 / 4
    assert rare.predicted_gain == pytest.approx(1.1 / 1.5) and not rare.pays


def test_a_pruned_head_reads_its_high_halves() -> None:
    s = subject().other(head_share=HIGH + 0.1 * LOW)
    head = next(p for p in s.predict(decode(512)) if p.work.component == "head")
    whole = next(p for p in subject().predict(decode(512)) if p.work.component == "head")
    assert head.work.weight_bytes == pytest.approx(whole.work.weight_bytes * (18 + 1.6) / 34, abs=1)
    assert head.seconds == pytest.approx(whole.seconds * (18 + 1.6) / 34)
    many = [next(p for p in x.predict(decode(512, batch=5)) if p.work.component == "head") for x in (s, subject())]
    assert many[0] == many[1]                                        # five rows read it whole
    advice, = pruned_head(s, Q, 0.1)
    assert advice.predicted_gain == pytest.approx(subject().decode_s(1, 512) / s.decode_s(1, 512)) and advice.pays
    assert not list(pruned_head(subject(), Q, 1.0))


def test_other_machines_that_hold_the_model() -> None:
    faster = dataclasses.replace(MACHINE, name="faster", bandwidth=2 * MACHINE.bandwidth,
                                 peaks={k: 2 * v for k, v in MACHINE.peaks.items()})
    small = dataclasses.replace(faster, name="small", memory_bytes=10**8)
    advice, = other_hardware(subject(), Q, [faster, small])
    assert advice.predicted_gain == pytest.approx(2.0) and "faster" in advice.lever and "$1.50" in advice.cost


def test_limits_by_brute_force() -> None:
    s = subject()
    found = sweeps.limits(s, batch=4, context=512, output=128)

    def sums(batch: int, context: int):
        return totals(count(s.spec, decode(context, batch=batch)))

    at = found["kv_overtakes_context"]
    assert sums(4, at).kv_bytes >= sums(4, at).weight_bytes and sums(4, at - 1).kv_bytes < sums(4, at - 1).weight_bytes
    at = found["batch_kv"]
    assert sums(at, 512).kv_bytes >= sums(at, 512).weight_bytes > sums(at - 1, 512).kv_bytes
    at = found["batch_memory"]
    assert s.memory_bytes(at, 640) <= MACHINE.memory_bytes < s.memory_bytes(at + 1, 640)
    at = found["batch_stops"]
    more = [s.decode_s(2 * batch, 512) / s.decode_s(batch, 512) for batch in (at, at - 1)]
    assert 1.05 * more[0] >= 2 and 1.05 * more[1] < 2
    assert found["batch_compute"] == pytest.approx(2e12 * 2 / (2 * 100e9), rel=0.02)      # peak x w / (2 x bandwidth)


def test_a_window_keeps_the_cache_below_the_weights() -> None:
    windowed = spec(model_type="mistral", sliding_window=256)
    found = sweeps.limits(subject().other(spec=windowed), batch=1, context=512, output=16)
    assert found["kv_overtakes_context"] is None


@pytest.mark.parametrize("edge", [1, 2, 3, 7, 64, 100])
def test_first_finds_the_edge(edge: int) -> None:
    assert sweeps.first(lambda n: n >= edge, 64) == (edge if edge <= 64 else None)


def test_roof_of_a_work_reads_from_the_level_that_holds_it() -> None:
    from ridgeline.analysis.hardware import Level

    cached = dataclasses.replace(MACHINE, threads=2, levels=(
        Level("L2", 10**6, 2, 400e9), Level("L2", 10**6, 1, 200e9), Level("memory", 10**9, 2, 100e9)))
    assert bandwidth(cached, 10**6) == 400e9 and bandwidth(cached, 10**6 + 1) == 100e9 and bandwidth(MACHINE, 1) == 100e9
    work = Work(0, "mlp.up", "linear", 1, 10**6, weight_bytes=10**6, activation_bytes=10**3, compute="int8")
    assert roof_s(work, cached, 10**6) == pytest.approx((10**6 + 10**3) / 400e9)
    assert roof_s(work, cached, 10**8) == pytest.approx(10**6 / 100e9 + 10**3 / 400e9)
    assert roof_s(dataclasses.replace(work, flops=10**9), cached, 10**6) == pytest.approx(10**9 / 4e12)


def test_stages_add_up_and_show_both_countings() -> None:
    result = findings().result
    for stage in result["stages"]:
        for size in ("flops", "bytes", "weight_bytes", "kv_bytes"):
            assert stage[size] == sum(one[size] for one in stage["components"])
        assert stage["predicted_s"] == pytest.approx(sum(one["predicted_s"] for one in stage["components"]))
        assert stage["intensity"] == pytest.approx(stage["flops"] / stage["bytes"])
        assert sum(one["share_of_time"] for one in stage["components"]) == pytest.approx(1)
        assert stage["chapter"]["bytes"] != stage["bytes"] and stage["measured_s"] is None
    prefill, decoding = result["stages"]
    assert (prefill["bound"], decoding["bound"]) == ("compute", "memory")
    assert prefill["tokens"] == 512 and decoding["tokens"] == 2 and decoding["components"][0]["layers"] == 1
