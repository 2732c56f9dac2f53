"""Predictions on machines whose every cost is known."""
from __future__ import annotations

import dataclasses

import pytest

from ridgeline.analysis.hardware import Curve, Hardware, Speed
from ridgeline.analysis.predict import predict, step_seconds
from ridgeline.analysis.work import Work

PLAIN = Hardware("table", bandwidth=100.0, peaks={"int8": 1000.0, "float32": 500.0}, memory_bytes=1 << 30)
UP = Work(0, "mlp.up", "linear", 4, flops=2 * 4 * 64 * 32, weight_bytes=64 * 32, activation_bytes=40, compute="int8",
          weight_type="q8_0", shape=(64, 32, 32))
CORE = Work(0, "attention.core", "attention", 3, flops=4 * 8 * 16 * 300, kv_bytes=2 * 2 * 16 * 2 * 300, compute="float32",
            shape=(8, 2, 16), kv_type="bfloat16")
NORM = Work(0, "attention.norm", "elementwise", 4, flops=40, activation_bytes=400, shape=(100, True))


def flat(kernel: str, cost: float) -> Curve:
    return Curve(kernel, "s", ((1.0, cost), (512.0, cost)))


CALIBRATED = dataclasses.replace(PLAIN, threads=2, barrier_s=0.5, curves=(
    flat("product.Q8_0.int8.512", 3e-3), flat("product.Q8_0.int8.4096", 2e-3), flat("product.Q8_0.split.int8.512", 5e-3),
    flat("product.Q8_0.split.int8.4096", 5e-3), flat("elementwise.activation", 0.2), flat("elementwise.norm", 0.1),
    flat("elementwise.input", 0.3), flat("attention.decode.bfloat16.64.4", 0.04), flat("attention.start.bfloat16.64.4", 7.0),
    flat("attention.prefill.bfloat16.64.4", 0.01), flat("pass", 1.0), flat("step", 2.0), flat("prefill.pass", 5.0),
    flat("prefill.step", 6.0)))


@pytest.mark.parametrize("work, seconds, bound", [
    (UP, 2088 / 100, "memory"),
    (dataclasses.replace(UP, rows=400, flops=100 * UP.flops), 100 * UP.flops / 1000, "compute"),
    (dataclasses.replace(CORE, flops=10 * CORE.flops), CORE.flops / 50, "compute"), (CORE, CORE.kv_bytes / 100, "kv"),
    (NORM, 4.0, "memory")])
def test_without_measured_costs_a_work_takes_the_longer_of_reading_and_computing(work, seconds, bound):
    (found,) = predict([work], PLAIN)
    assert found == (work, pytest.approx(seconds), bound)


def test_the_speed_of_this_moment_on_a_machine_from_the_table():
    assert predict([UP], PLAIN, now=Speed(memory=0.5))[0].seconds == pytest.approx(2088 / 50)
    many = dataclasses.replace(UP, rows=400, flops=100 * UP.flops)
    assert predict([many], PLAIN, now=Speed(compute=0.5))[0].seconds == pytest.approx(100 * UP.flops / 500)


def test_a_product_costs_by_its_columns_and_has_its_activation():
    """2 / 32 of a row of 32 columns would be 9 times further from 4,096 than 512 is: linear in 1 / columns."""
    per_weight = 2e-3 + (3e-3 - 2e-3) * (1 / 32 - 1 / 4096) / (1 / 512 - 1 / 4096)
    (found,) = predict([UP], CALIBRATED)
    assert found.seconds == pytest.approx(64 * 32 * per_weight + 0.2 * 4 * 32 / 2)
    head = dataclasses.replace(UP, layer=None, component="head", shape=(64, 4096, 0), flops=2 * 4 * 64 * 4096)
    assert predict([head], CALIBRATED)[0].seconds == pytest.approx(64 * 4096 * 5e-3 + 0.3 * 4 * 4096 / 2)


def test_time_grows_with_rows_beyond_the_measured_ones():
    few, many = (predict([dataclasses.replace(UP, rows=rows, flops=2 * rows * 64 * 32, shape=(64, 32, 0))], CALIBRATED)
                 for rows in (512, 2048))
    assert many[0].seconds == pytest.approx(4 * few[0].seconds)


@pytest.mark.parametrize("rows, now, factor", [
    (1, Speed(memory=0.5), 2), (1, Speed(compute=0.5), 1), (64, Speed(memory=0.5), 1 + 1 / 64),
    (64, Speed(compute=0.5), 2 - 1 / 64)])
def test_one_row_waits_for_memory_and_many_compute(rows, now, factor):
    """A product whose time is 8 times as long for 64 rows waits for 1 / 64 of it."""
    rising = [Curve(f"product.Q8_0.int8.{cols}", "s", ((1.0, 1.0), (64.0, 8.0))) for cols in (512, 4096)]
    machine = dataclasses.replace(PLAIN, curves=tuple(rising))
    work = dataclasses.replace(UP, rows=rows, flops=2 * rows * 64 * 32, shape=(64, 32, 0))
    assert predict([work], machine, now=now)[0].seconds == pytest.approx(factor * predict([work], machine)[0].seconds)


def test_attention_by_keys_while_decoding_and_by_pairs_in_a_prefill():
    """Heads of 16 are a quarter of the nearest size that was measured."""
    decode = dataclasses.replace(CORE, useful_flops=4 * 8 * 16 * 300)
    assert predict([decode], CALIBRATED)[0].seconds == pytest.approx(0.04 * 300 * 2 / 4 + 7)
    prefill = dataclasses.replace(CORE, useful_flops=4 * 8 * 16 * 300 * 50)
    assert predict([prefill], CALIBRATED)[0].seconds == pytest.approx(0.01 * 300 * 50 * 8 / 4)


def test_elementwise_work_is_shared_out_by_rows_and_ends_at_a_barrier():
    assert predict([NORM], CALIBRATED)[0].seconds == pytest.approx(0.1 * 400 / 2 + 0.5)
    alone = dataclasses.replace(NORM, rows=1)
    assert predict([alone], CALIBRATED)[0].seconds == pytest.approx(0.1 * 100 + 0.5)


@pytest.mark.parametrize("rows, sequences, seconds", [(1, 1, 3.0), (8, 8, 3.0), (64, 1, 3.0 + (5 - 1) + (6 - 2))])
def test_a_step_costs_something_beside_its_kernels(rows, sequences, seconds):
    works = [Work(None, "embed", "lookup", rows, 0), Work(None, "head", "linear", sequences, 0)]
    last = predict(works, CALIBRATED)[-1]
    assert last.work.key == (None, "dispatch") and last.bound == "overhead" and last.seconds == pytest.approx(seconds)


def test_a_step_takes_what_its_works_take():
    assert step_seconds(predict([UP, CORE, NORM], PLAIN)) == pytest.approx(
        sum(p.seconds for w in (UP, CORE, NORM) for p in predict([w], PLAIN)))
