"""Mistakes that other analysers of inference have made; none of them here."""
from __future__ import annotations

import pytest
import torch
from traced import Cached, build, config, run

from ridgeline.analysis.catalogue import HARDWARE, hardware
from ridgeline.analysis.cost import count
from ridgeline.analysis.read import plan_of
from ridgeline.analysis.work import Rows, Work, totals
from ridgeline.batch import whole
from ridgeline.decoding.base import Run
from ridgeline.errors import ConfigError


def core(works: list[Work]) -> Work:
    return next(w for w in works if w.component == "attention.core")


@pytest.mark.parametrize("name, kv_heads", [("llama", 2), ("llama-one-key-head", 1), ("llama-multi-head", 4)])
def test_keys_and_values_are_read_for_kv_heads_not_query_heads(name, kv_heads):
    """LLM-Viewer issue 12."""
    spec = plan_of(config(name))
    assert core(count(spec, [Rows(9, 1, 1)])).kv_bytes == 10 * 2 * kv_heads * 6 * 2


def test_operations_are_two_a_multiply_add():
    """GenZ counts multiply-adds as operations."""
    counted = run(build("llama"), whole([4], torch.ones(4, dtype=torch.int64)))
    assert totals(count(plan_of(config("llama"), kernels="torch"), [Rows(0, 4, 4)])).flops > 1.99 * counted.total()
    products = sum(w.flops for w in count(plan_of(config("llama"), kernels="torch"), [Rows(0, 4, 4)])
                   if w.kind in ("linear", "attention"))
    assert products == 2 * counted.total()


def test_the_masked_half_of_attention_is_not_useful():
    """maxtext issue 1972, torchtitan issue 341: training throughput that counts masked pairs."""
    work = core(count(plan_of(config("llama"), kernels="torch"), [Rows(0, 32, 1)]))
    each = 4 * 4 * 6
    assert work.flops == each * 32 * 32 and work.useful == each * 32 * 33 // 2
    assert core(count(plan_of(config("llama")), [Rows(0, 32, 1)])).flops == work.useful


def test_heads_times_head_size_is_not_the_hidden_size():
    """open-instruct issue 1096: Qwen3 has H h = 2 d."""
    works = {w.component: w for w in count(plan_of(config("qwen3")), [Rows(0, 1, 1)]) if w.layer == 0}
    d, H, K, h = 20, 4, 2, 8
    assert works["attention.qkv"].flops == 2 * d * h * (H + 2 * K) and works["attention.out"].flops == 2 * H * h * d
    assert works["attention.core"].flops == 4 * H * h


def test_a_gated_mlp_has_two_up_matrices():
    """open-instruct issue 1096."""
    gated = {w.component: w for w in count(plan_of(config("llama")), [Rows(0, 1, 1)]) if w.layer == 0}
    plain = {w.component: w for w in count(plan_of(config("gpt2")), [Rows(0, 1, 1)]) if w.layer == 0}
    assert gated["mlp.up"].flops == 2 * gated["mlp.down"].flops == 4 * 20 * 36
    assert plain["mlp.up"].flops == plain["mlp.down"].flops == 2 * 20 * 44


def test_attention_is_counted_and_once():
    """calflops issue 26: not at all; pytorch issue 134804: twice, in the op and in what it is made of."""
    cached = Cached(build("llama"))
    cached.fill("a", 12)
    _, counted = cached.step({"a": Run("target", [1] * 4)})
    works = count(plan_of(config("llama"), kernels="torch"), [Rows(12, 4, 4)])
    assert sum(w.flops for w in works if w.kind == "attention") == 2 * counted.cores() == 3 * 4 * 4 * 6 * 4 * 16
    assert len([w for w in works if w.kind == "attention"]) == 3


def test_the_head_size_is_read_and_not_derived():
    spec = plan_of(config("qwen3"))
    assert {a.head_dim for a in spec.attention_layers()} == {8} != {20 // 4}
    assert spec.kv_bytes_per_token() == 3 * 2 * 2 * 8 * 2


def test_cpus_have_a_peak_for_int8():
    """A table without the key falls back to float peaks, a quarter of what int8 weights run at."""
    cpus = [machine for machine in HARDWARE.values() if machine.device == "cpu"]
    assert len(cpus) > 5
    for machine in cpus:
        assert machine.peaks["int8"] > machine.peaks["float32"]
    zen4 = hardware("EPYC-9654")
    assert zen4.peak("int8") == 4 * zen4.peak("float32") == 2 * zen4.peak("bfloat16")


def test_every_value_of_the_table_has_its_source():
    for machine in HARDWARE.values():
        given = {"bandwidth", "peaks", "memory_bytes"}
        given |= {name for name in ("link_bandwidth", "price_per_hour") if getattr(machine, name) is not None}
        assert given <= set(machine.sources) and all(machine.sources.values()), machine.name
        assert machine.bandwidth > 0 and machine.memory_bytes > 1e9 and not machine.calibrated
    assert hardware("h100 sxm") is hardware("H100") and hardware("rtx_4090").name == "RTX-4090"
    with pytest.raises(ConfigError, match=r"hardware 'H900' is not in the table; it has H100, H100-PCIe"):
        hardware("H900")


def test_peaks_are_dense():
    """Vendors print twice as much, for sparse matrices. Ridge points: 295 of an H100, 153 of an A100, 206 of an H200."""
    for name, ridge in (("H100", 295), ("A100-80GB", 153), ("H200", 206)):
        assert hardware(name).ridge("bfloat16") == pytest.approx(ridge, abs=0.5)
