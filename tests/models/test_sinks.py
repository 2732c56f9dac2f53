"""Attention with sinks: layer by layer against GptOssAttention of transformers, over a cache, in slices of its heads."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import PAGE, Cached, tokens
from torch import nn
from transformers import GptOssConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

import sinks_family
from ridgeline.batch import whole
from ridgeline.cli import main
from ridgeline.layers.attention import Attention
from ridgeline.layers.rope import build_rotary
from ridgeline.models import build_model
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.load import load_weights
from tiny_checkpoint import write_model

HIDDEN, WINDOW, LENGTHS = 40, 6, (29, 1, 13)
HEADS = pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 10), (5, 1, 16), (3, 3, 8), (8, 2, 64)])
KIND = pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(heads: int, kv_heads: int, head_dim: int, kind: str) -> tuple[GptOssConfig, GptOssAttention, Attention]:
    """The layer of transformers with random weights, and ours with the same under the same names."""
    config = GptOssConfig(hidden_size=HIDDEN, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
                          sliding_window=WINDOW, layer_types=[kind], num_hidden_layers=1, max_position_embeddings=2048,
                          rope_parameters=YARN, attn_implementation="eager")
    oracle = GptOssAttention(config, 0).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(oracle.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * (parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.5))
    rotary = build_rotary(YARN, head_dim, max_position=2048, max_model_len=2048)
    ours = Attention(0, HIDDEN, heads, kv_heads, head_dim, rotary=rotary, bias=True, out_bias=True, sinks=True,
                     window=WINDOW if kind == "sliding_attention" else None)
    ours.load_state_dict(oracle.state_dict())
    return config, oracle, ours


def expected_rows(config: GptOssConfig, oracle: GptOssAttention, x: torch.Tensor) -> torch.Tensor:
    """Of one sequence: (T, hidden) -> (T, hidden)."""
    positions = torch.arange(len(x))[None]
    sliding = config.layer_types[0] == "sliding_attention"
    mask = (create_sliding_window_causal_mask if sliding else create_causal_mask)(config, x[None], None, None, positions)
    rotation = GptOssRotaryEmbedding(config)(x[None], positions)
    out: torch.Tensor = oracle(x[None], rotation, mask)[0][0]
    return out


@HEADS
@KIND
def test_the_layer_equals_that_of_gpt_oss(heads: int, kv_heads: int, head_dim: int, kind: str) -> None:
    config, oracle, ours = pair(heads, kv_heads, head_dim, kind)
    x = randn(sum(LENGTHS), HIDDEN, seed=99)
    expected = torch.cat([expected_rows(config, oracle, part) for part in x.split(LENGTHS)])
    found = ours(x, whole(LENGTHS), None)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    weights = randn(*x.shape, seed=98)
    for out in (found, expected):
        (out * weights).sum().backward()
    gradients = {name: p.grad for name, p in oracle.named_parameters()}
    assert gradients["sinks"] is not None and gradients["sinks"].abs().min() > 1e-4
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-5, rtol=1e-4)


@HEADS
@KIND
def test_slices_of_the_heads_add_up_to_the_layer(heads: int, kv_heads: int, head_dim: int, kind: str) -> None:
    """As tensor parallelism cuts them: rows of q, k, v and the sinks, columns of o; the layer reads its counts from them."""
    ours = pair(heads, kv_heads, head_dim, kind)[2].requires_grad_(False)
    x, batch = randn(sum(LENGTHS), HIDDEN, seed=97), whole(LENGTHS)
    expected = ours(x, batch, None)
    total = torch.zeros_like(expected)
    for part in range(kv_heads):
        cut = pair(heads, kv_heads, head_dim, kind)[2].requires_grad_(False)
        for leaf in ("q_proj", "k_proj", "v_proj"):
            own = getattr(cut, leaf)
            own.weight, own.bias = (nn.Parameter(t.chunk(kv_heads)[part], False) for t in (own.weight, own.bias))
        assert cut.sinks is not None
        cut.sinks = nn.Parameter(cut.sinks.chunk(kv_heads)[part], False)
        cut.o_proj.weight = nn.Parameter(cut.o_proj.weight.chunk(kv_heads, 1)[part], False)
        cut.o_proj.bias = nn.Parameter(cut.o_proj.bias / kv_heads, False)
        assert cut.state_spec().heads == 1
        total += cut(x, batch, None)
    torch.testing.assert_close(total, expected, atol=2e-6, rtol=0)


def test_chunks_over_a_cache_equal_the_whole(tmp_path: Path) -> None:
    with sinks_family.registered():
        folder = sinks_family.write_with_sinks(tmp_path, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=3,
                                               sliding_window=WINDOW)
        checkpoint = open_checkpoint(folder)
        model = build_model(checkpoint.config)
    load_weights(model, checkpoint, dtype=torch.float64)
    assert [layer.self_attn.window for layer in model.model.layers] == [WINDOW, None, WINDOW]
    prompt, cached = tokens(3 * PAGE + 3), Cached(model)
    with torch.no_grad():
        expected = model.logits(model(whole([len(prompt)], torch.tensor(prompt))).hidden)
    for chunk in (1, 2, PAGE, PAGE + 1, len(prompt)):
        torch.testing.assert_close(cached.prefill(f"in chunks of {chunk}", prompt, chunk), expected, atol=1e-9, rtol=0)


def test_sinks_far_below_every_score_change_nothing(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2}
    with sinks_family.registered():
        sinks_family.write_with_sinks(tmp_path / "none", sinks=-1e30, **shape)
        sinks_family.write_with_sinks(tmp_path / "some", sinks=0.0, **shape)
        models = {}
        for name in ("none", "some"):
            checkpoint = open_checkpoint(tmp_path / name)
            models[name] = build_model(checkpoint.config)
            load_weights(models[name], checkpoint, dtype=torch.float32)
    (tmp_path / "llama").mkdir()
    write_model(tmp_path / "llama", sharpness=1.0, **shape)
    plain = build_model(open_checkpoint(tmp_path / "llama").config)
    tensors = {name: t for name, t in models["none"].state_dict().items() if not name.endswith("sinks")}
    plain.load_state_dict(tensors, assign=True)
    batch = whole([20], torch.tensor(tokens(20)))
    with torch.no_grad():
        logits = {name: m.logits(m(batch).hidden) for name, m in {**models, "llama": plain}.items()}
    torch.testing.assert_close(logits["none"], logits["llama"], atol=1e-6, rtol=0)
    assert (logits["some"] - logits["llama"]).abs().max() > 0.1


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_info_counts_the_parameter(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3}
    found = {}
    with sinks_family.registered():
        sinks_family.write_with_sinks(tmp_path / "sinks", **shape)
        (tmp_path / "llama").mkdir()
        write_model(tmp_path / "llama", **shape)
        for name in ("sinks", "llama"):
            assert main(["info", str(tmp_path / name), "--json", "--backend", backend, "--dtype", "float32"]) == 0
            found[name] = json.loads(capsys.readouterr().out)
    assert found["sinks"]["parameters"] - found["llama"]["parameters"] == 3 * 6
    assert found["sinks"]["weight_bytes"] - found["llama"]["weight_bytes"] == 3 * 6 * 4
