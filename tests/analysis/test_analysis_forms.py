"""The closed forms against counts of models that run, loops over pairs, and what the cost of a whole model adds up to."""
from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from traced import MultiplyAdds, build, config, run

from ridgeline.analysis import forms
from ridgeline.analysis.cost import count
from ridgeline.analysis.read import plan_of
from ridgeline.analysis.work import Rows, totals
from ridgeline.batch import whole
from ridgeline.cache import RoleLayout
from ridgeline.layers.mlp import MLP, GatedMLP
from ridgeline.memory import TRAINING_BYTES, measure
from ridgeline.models import build_model

MLP_PARTS, PROJECTIONS = ["mlp.up", "mlp.down"], ["attention.qkv", "attention.out"]
SHAPES = [  # d, H, K, h: H h differs from d; one KV head; multi-head
    (20, 4, 2, 6), (20, 4, 1, 6), (24, 4, 4, 6), (40, 6, 3, 8)]


def llama(d: int, H: int, K: int, h: int, **fields: object) -> dict[str, object]:
    return {**config("llama"), "hidden_size": d, "num_attention_heads": H, "num_key_value_heads": K, "head_dim": h, **fields}


def part(works, *components):
    """Operations and bytes of these components of the first layer."""
    return totals(w for w in works if w.layer == 0 and w.component in components)


class Moved(TorchDispatchMode):
    """Elements that kernels read and write, views left out."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("mm", "addmm", "mul", "silu", "gelu"):
            self.elements += out.numel() + sum(x.numel() for x in args if isinstance(x, torch.Tensor))
        return out


def moved(module: nn.Module, T: int, d: int) -> int:
    with torch.no_grad(), Moved() as found:
        module(torch.zeros(T, d), None)
    return found.elements


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("d, f", [(20, 36), (12, 5)])
def test_linear_glu_and_ffn_against_modules_that_run(T, d, f):
    with torch.no_grad(), Moved() as found:
        nn.Linear(d, f, bias=False)(torch.zeros(T, d))
    assert forms.linear(T, d, f, w=1, a=1) == (2 * T * d * f, found.elements)

    gated = GatedMLP(d, f, "silu")
    # The activation and the product with the other factor are one kernel in the form, two in torch: 2 T f more.
    assert forms.glu(T, d, f, w=1, a=1, fused=False).bytes == moved(gated, T, d) - 2 * T * f
    assert forms.glu(T, d, f, fused=False).flops == forms.glu(T, d, f).flops == 2 * multiply_adds(gated, T, d)

    plain = MLP(d, f, "gelu")
    for layer in (plain.up_proj, plain.down_proj):
        layer.bias = None
    # The activation is part of the first product in the form; in torch it reads and writes.
    assert forms.ffn(T, d, f, w=1, a=1).bytes == moved(plain, T, d) - 2 * T * f
    assert forms.ffn(T, d, f).flops == 2 * multiply_adds(plain, T, d)


def multiply_adds(module: nn.Module, T: int, d: int) -> int:
    with torch.no_grad(), MultiplyAdds(module) as counted:
        module(torch.zeros(T, d), None)
    return counted.total()


@pytest.mark.parametrize("d, H, K, h", SHAPES)
@pytest.mark.parametrize("B, S", [(1, 1), (2, 5)])
def test_attention_forms_against_a_model_that_runs(d, H, K, h, B, S):
    """One layer: its projections, and the pairs that its mask lets through."""
    raw = llama(d, H, K, h, num_hidden_layers=1)
    model = build_model(raw).to_empty(device="cpu")
    batch = whole([S] * B, torch.ones(B * S, dtype=torch.int64))
    counted = run(model, batch)
    projections = sum(n for name, n in counted.found.items() if "self_attn." in name)
    assert forms.attention_projections(B * S, d, H, K, h).flops == 2 * projections
    seen = sum(int(batch.mask(row, None).sum()) for row in range(B))
    assert B * forms.pairs(S) == seen
    assert forms.attention_core(S, 0, H, K, h, B=B).flops == 2 * counted.cores() * seen / (B * S * S)


@pytest.mark.parametrize("S, P", [(1, 0), (1, 9), (5, 0), (4, 7)])
def test_pairs_against_a_loop(S, P):
    assert forms.pairs(S, P) == sum(1 for q in range(P, P + S) for k in range(P + S) if k <= q)


@pytest.mark.parametrize("d, H, K, h", SHAPES)
@pytest.mark.parametrize("B, S, P", [(1, 1, 0), (3, 1, 9), (2, 5, 4)])
def test_forms_are_what_a_model_of_fused_16_bit_kernels_costs(d, H, K, h, B, S, P):
    works = count(plan_of(llama(d, H, K, h)), [Rows(P, S, 1)] * B)
    f, T = 36, B * S
    mlp, one, core = (part(works, *names) for names in (MLP_PARTS, PROJECTIONS, ["attention.core"]))
    assert forms.glu(T, d, f) == (mlp.flops, mlp.bytes)
    assert forms.attention_projections(T, d, H, K, h) == (one.flops, one.bytes)
    assert forms.attention_core(S, P, H, K, h, B=B) == (core.flops, core.bytes)
    assert forms.kv_write(T, K, h) == part(works, "attention.heads").kv_bytes
    assert forms.lm_head(B, d, 59) == totals(w for w in works if w.component == "head").flops
    norm = part(works, "mlp.norm")
    assert forms.rms_norm(T, d) == (norm.flops, norm.bytes)


def test_a_plain_mlp_costs_what_its_form_says():
    works = count(plan_of(config("gpt2")), [Rows(0, 5, 1)])
    mlp = part(works, "mlp.up", "mlp.down")
    assert forms.ffn(5, 20, 44) == (mlp.flops, mlp.bytes)


@pytest.mark.parametrize("d, H, K, h", SHAPES)
@pytest.mark.parametrize("B, T, P", [(1, 1, 0), (3, 1, 9), (2, 5, 0), (2, 5, 4)])
def test_chapter_forms_are_what_the_chapter_count_adds_up_to(d, H, K, h, B, T, P):
    works = count(plan_of(llama(d, H, K, h), quantization="int4", kv_dtype="int8"), [Rows(P, T, 1)] * B, "chapter")
    f, S = 36, P + T
    mlp, one, core = (part(works, *names) for names in (MLP_PARTS, PROJECTIONS, ["attention.core"]))
    assert forms.chapter_swiglu(B, T, d, f) == (mlp.flops, mlp.bytes)
    assert forms.chapter_projections(B, T, d, K * h, H * h) == (one.flops, one.bytes)
    assert forms.chapter_core(B, T, S, H * h, K * h) == (core.flops, core.bytes)
    if H * h == d and K == H:
        assert forms.chapter_projections(B, T, d) == (8 * B * T * d * d, 4 * B * d * T + 8 * d * d)
        assert forms.chapter_core(B, T, S, d).intensity == pytest.approx(T * S / (T + S))
        whole_form = forms.chapter_attention(B, T, S, d)
        assert whole_form == (8 * B * T * d * d + 4 * B * T * S * d, 8 * B * d * T + 8 * d * d + 4 * B * d * S)


def test_a_chapter_ffn():
    works = count(plan_of(config("gpt2")), [Rows(0, 5, 1)] * 2, "chapter")
    mlp = part(works, "mlp.up", "mlp.down")
    assert forms.chapter_ffn(2, 5, 20, 44) == (mlp.flops, mlp.bytes)


def test_limits_are_where_the_forms_go():
    far = 10 ** 9
    assert forms.linear(3, far, far).intensity == pytest.approx(2 * 3 / 2, rel=1e-6)
    assert forms.chapter_swiglu(far, far, 64, 160).intensity == pytest.approx(forms.chapter_swiglu_limit(64, 160), rel=1e-6)
    assert forms.chapter_swiglu(4, 1, far, far).intensity == pytest.approx(4, rel=1e-6)              # decode: about B
    assert forms.chapter_ffn(4, 1, far, far).intensity == pytest.approx(4, rel=1e-6)
    assert forms.chapter_projections(2, 3, far).intensity == pytest.approx(6, rel=1e-6)              # B T
    assert forms.chapter_projections(far, far, 64).intensity == pytest.approx(2 * 64, rel=1e-6)      # 2 D
    for H, K in ((32, 32), (32, 8), (32, 1)):
        prefill, decode = forms.chapter_core(1, 4096, 4096, 64 * H, 64 * K), forms.chapter_core(7, 1, far, 64 * H, 64 * K)
        assert prefill.intensity == pytest.approx(forms.chapter_core_limit(H, K, 4096, decode=False))
        assert decode.intensity == pytest.approx(forms.chapter_core_limit(H, K, far, decode=True), rel=1e-6)
        exact = forms.attention_core(far, 0, H, K, 64).intensity
        assert exact == pytest.approx(forms.core_limit(H, K, S=far, decode=False), rel=1e-6)
        for q, c in ((1, 2), (5, 1)):
            rows = forms.attention_core(q, far, H, K, 64, B=9, c=c).intensity
            assert rows == pytest.approx(forms.core_limit(H, K, S=q, decode=True, c=c), rel=1e-6)
    assert forms.chapter_core_limit(8, 8, 512, decode=False) == 256 and forms.core_limit(8, 8, S=512, decode=False) == 128


def test_turning_points():
    d, f, H, K, h = 64, 160, 8, 2, 16
    n = forms.layer_parameters(d, f, H, K, h)
    assert n == forms.attention_projections(1, d, H, K, h).flops / 2 + forms.glu(1, d, f).flops / 2
    S = forms.prefill_overtakes(n, H, h)
    assert forms.attention_core(round(S * 1000), 0, H, K, h).flops / (2 * n * S * 1000) == pytest.approx(1000, rel=1e-3)
    L = forms.core_overtakes(n, H, h)
    assert 4 * H * h * L == pytest.approx(2 * n)
    B, w, c = 3, 0.5625, 2
    assert B * forms.kv_overtakes(n, K, h, B=B, w=w, c=c) * forms.kv_per_token(1, K, h, c) == pytest.approx(w * n)
    assert forms.ridge(989e12, 4.8e12) == pytest.approx(206, abs=0.5)
    assert forms.turning_tokens(206, 2) == 206
    # On the ridge both roofs of a matrix without activations take as long.
    peak, bandwidth, T = 1e12, 1e10, forms.turning_tokens(100, w)
    assert 2 * T * n / peak == pytest.approx(w * n / bandwidth)


def test_the_step_time_turns_where_batching_stops_helping():
    how = {"N": 7e9, "w": 0.5625, "kappa": 131072.0, "bandwidth": 1e12, "peak": 200e12}
    limits = forms.batch_limits(2048, memory=24e9, **how)
    assert limits.stops == min(limits.compute, limits.kv, limits.memory)
    below, above = int(limits.compute), math.ceil(limits.compute) + 1
    assert forms.step_seconds(below, 0, **how) == forms.step_seconds(1, 0, **how)
    assert forms.step_seconds(above, 0, **how) > forms.step_seconds(1, 0, **how)
    at = forms.step_seconds(1, round(limits.kv * 2048), overhead=1e-3, **how)
    assert at == pytest.approx(1e-3 + 2 * 7e9 * 0.5625 / 1e12, rel=1e-4)         # keys and values as many bytes as weights
    assert forms.inference_bytes(7e9, 0.5625, 131072, round(limits.memory * 2048)) == pytest.approx(24e9, rel=1e-4)


def test_mixture_of_experts_touches_the_experts_that_some_token_chose():
    E, k, T = 8, 2, 5
    generator = torch.Generator().manual_seed(0)
    chosen = [len({int(e) for _ in range(T) for e in torch.randperm(E, generator=generator)[:k]}) for _ in range(4000)]
    assert forms.experts_touched(E, k, T) == pytest.approx(sum(chosen) / len(chosen), rel=0.01)
    assert forms.experts_touched(E, k, 1) == pytest.approx(k)


def test_a_ring_sends_each_part_twice_but_for_its_own():
    """Reduce-scatter, then all-gather: in each of n - 1 steps a device sends one of n parts."""
    for devices in (2, 4, 8):
        assert forms.all_reduce(devices, 1024) == sum(1024 / devices for _ in range(2 * (devices - 1)))
    assert forms.all_reduce(1, 1024) == 0


def test_gains():
    assert forms.weights_gain(1.0, 2, 0.5) == 4 and forms.weights_gain(0.0, 2, 0.5) == 1
    assert forms.tokens_per_pass(0.0, 4) == 1 and forms.tokens_per_pass(1, 4) == 5
    assert forms.tokens_per_pass(0.5, 2) == sum(0.5 ** i for i in range(3))
    assert forms.speculation_gain(0.5, 2, 1.0, 1.25, 0.25) == 1


def test_training_memory_is_many_times_that_of_inference():
    model = build_model(llama(20, 4, 2, 6))
    layout = RoleLayout(model.state_spec(), torch.bfloat16, "")
    memory = measure(model, layout, weight_itemsize=2, training_tokens=64)
    assert sum(TRAINING_BYTES.values()) == 16
    assert forms.training_bytes(memory.parameters, memory.training["activations"]) == sum(memory.training.values())
    assert forms.inference_bytes(memory.parameters, 2, layout.kv_bytes_per_token(), 64) == \
        memory.weight_bytes + 64 * memory.kv_bytes_per_token
    assert plan_of(llama(20, 4, 2, 6)).kv_bytes_per_token() == layout.kv_bytes_per_token()


def test_per_token():
    """f = 4 d, a plain MLP, multi-head: one token behind n."""
    d, n = 24, 100
    assert forms.per_token(d, n) == (forms.attention_projections(1, d, 4, 4, 6).flops + forms.ffn(1, d, 4 * d).flops
                                     + 4 * 4 * 6 * n)


def test_the_delta_rule_costs_each_token_the_same():
    assert forms.delta_rule(1, 4, 8, 16) * 7 == forms.delta_rule(7, 4, 8, 16)
    assert forms.activation_operations(2, 3) == 30 and forms.softmax_operations(2, 3, 4) == 5 * 4 * forms.pairs(2, 3)


def test_the_models_that_are_traced_have_odd_shapes():
    assert build("llama").model.layers[0].self_attn.o_proj.in_features != 20
