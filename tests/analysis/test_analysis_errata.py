"""docs/chapter-errata.md: what the textbook says, and what a model that runs shows."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_analysis_forms import Moved
from traced import Cached, build, config, run

from ridgeline.analysis import forms
from ridgeline.analysis.cost import count
from ridgeline.analysis.read import plan_of
from ridgeline.analysis.work import Rows, totals
from ridgeline.batch import whole
from ridgeline.decoding.base import Run
from ridgeline.layers.mlp import GatedMLP
from ridgeline.models import build_model
from ridgeline.types import RequestMetrics

DOC = Path(__file__).parents[2] / "docs" / "chapter-errata.md"


def tokens(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.int64)


def test_projections_of_grouped_heads_take_fewer_operations():
    """H h = D = 24, K = 2 of 4 heads."""
    B, T, D, D_kv = 2, 3, 24, 12
    model = build_model({**config("llama"), "hidden_size": D, "num_hidden_layers": 1}).to_empty(device="cpu")
    counted = run(model, whole([T] * B, tokens(B * T)))
    traced = 2 * sum(n for name, n in counted.found.items() if "self_attn." in name)
    assert traced == 4 * B * T * D ** 2 + 4 * B * T * D * D_kv == forms.chapter_projections(B, T, D, D_kv).flops
    assert traced < 8 * B * T * D ** 2                                            # the book's line for both


def test_the_cache_holds_keys_and_values():
    cached = Cached(build("llama"), dtype=torch.bfloat16)
    positions, layers, D_kv = 96 * 4, 3, 12
    k, v = zip(*(cached.view.kv(layer) for layer in range(layers)))
    held = sum(x.numel() * x.element_size() for x in (*k, *v))
    assert held == 2 * 2 * positions * D_kv * layers == positions * plan_of(config("llama")).kv_bytes_per_token()
    assert held == positions * forms.kv_per_token(layers, 2, 6)
    assert held == 2 * (2 * positions * D_kv * layers)                            # twice the book's line, at 2 bytes


def test_limits_of_the_core_depend_on_the_group():
    S, h, far = 4096, 64, 10 ** 8
    for H, K in ((8, 8), (8, 2), (8, 1)):
        prefill = forms.chapter_core(1, S, S, H * h, K * h).intensity
        decode = forms.chapter_core(5, 1, far, H * h, K * h).intensity
        assert prefill == pytest.approx(S / (1 + K / H))
        assert decode == pytest.approx(H / K, rel=1e-4)
        assert (prefill == pytest.approx(S / 2)) is (K == H) is (decode == pytest.approx(1, rel=1e-4))


def test_operations_of_a_token():
    """gpt2's blocks with F = 4 D, counted as they run behind n tokens."""
    D, n = 20, 11
    raw = {**config("gpt2"), "intermediate_size": 4 * D, "num_hidden_layers": 1, "num_attention_heads": 5}
    cached = Cached(build_model(raw).to_empty(device="cpu"))
    cached.fill("a", n)
    _, counted = cached.step({"a": Run("target", [1])})
    layer = 2 * sum(count for name, count in counted.found.items() if "layers.0" in name)
    assert layer == forms.per_token(D, n + 1) == 24 * D ** 2 + 4 * (n + 1) * D    # its own key is one of those it sees
    assert layer > 16 * D ** 2 + 2 * (n + 1) * D


def test_an_mlp_has_intensity_bt_only_below_its_widths():
    D, F = 4096, 14336
    assert forms.chapter_swiglu(8, 1, D, F).intensity == pytest.approx(8, rel=0.01)            # D, F >> B T
    prefill = forms.chapter_swiglu(1, 4096, D, F)                                              # D, F >> B = 1, not >> B T
    assert 0.5 < prefill.intensity / 4096 < 0.6
    assert forms.chapter_swiglu_limit(D, F) < 4096 * 1.2


def test_queueing_is_inside_ttft():
    metrics = RequestMetrics(arrival=10.0, scheduled=13.0, first_token=14.0, last_token=19.0, finished=19.0,
                             token_times=[14.0, 19.0])
    assert metrics.ttft_s == 4.0 and metrics.queue_s == 3.0
    assert metrics.e2e_s == metrics.ttft_s + (metrics.last_token - metrics.first_token) == 9.0
    assert metrics.queue_s + metrics.ttft_s + 5.0 > metrics.e2e_s                 # queueing counted twice


def test_a_linear_attention_step_is_constant_in_length():
    spec = plan_of(config("qwen3.5"))
    short, long = (count(spec, [Rows(start, 1, 1)]) for start in (10, 100_000))
    grown = {a.component for a, b in zip(short, long) if (a.flops, a.bytes) != (b.flops, b.bytes)}
    assert grown == {"attention.core"}
    assert totals(w for w in short if w.component.startswith("mixer.")).state_bytes > 0


def test_a_hidden_state_drafter_is_fed_the_next_token():
    """One hidden row, two tokens that may follow it: two drafts."""
    model = build_model({**config("llama"), "model_type": "hidden_drafter", "num_hidden_layers": 1}).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        row = torch.randn(1, 20, generator=generator)
        one, other = (model(whole([1], torch.tensor([token]), feed=row)).hidden for token in (3, 4))
    assert model.fc.in_features == 2 * model.config.hidden_size
    assert not torch.allclose(one, other)


def test_intermediates_are_written_and_read():
    T, D, F = 7, 20, 36
    with torch.no_grad(), Moved() as found:
        GatedMLP(D, F, "silu")(torch.zeros(T, D), None)
    unfused = 2 * found.elements                                                  # 16 bits
    assert unfused == forms.glu(T, D, F, fused=False).bytes + 2 * 2 * T * F       # the activation is a kernel of its own
    assert unfused > forms.chapter_swiglu(1, T, D, F).bytes
    works = totals(w for w in count(plan_of({**config("llama")}, kernels="torch"), [Rows(0, T, 1)])
                   if w.layer == 0 and w.component in ("mlp.up", "mlp.down"))
    assert works.bytes == unfused


def test_half_of_the_pairs_of_a_causal_prefill_are_useful():
    S = 64
    core = next(w for w in count(plan_of(config("llama"), kernels="torch"), [Rows(0, S, 1)]) if w.component == "attention.core")
    assert core.useful / core.flops == (S + 1) / (2 * S)
    native = count(plan_of(config("llama"), kernels="native"), [Rows(0, S, 1)])
    ours = next(w for w in native if w.component == "attention.core")
    assert core.useful < ours.flops < 1.2 * core.useful < core.flops


def test_the_document_names_tests_that_exist():
    named = {word for line in DOC.read_text().splitlines() if line.startswith("|") for word in line.split("`")
             if word.startswith("test_")}
    assert named and named <= set(globals())
    missing = {name for name in globals() if name.startswith("test_")} - named - {"test_the_document_names_tests_that_exist"}
    assert not missing
