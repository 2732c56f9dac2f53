"""Every RoPE scaling against transformers, wholly below and wholly above the switch, and its errors."""
from __future__ import annotations

import model_families as mf
import pytest
import torch
from model_families import Family, tokens

from ridgeline.batch import whole
from ridgeline.errors import UnsupportedModel
from ridgeline.layers.rope import build_rotary

ORIGINAL = 32
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [1.5 + 0.5 * i for i in range(8)]
TRAINED = {"original_max_position_embeddings": ORIGINAL}
# family, rope_parameters, max_position_embeddings
CASES = {
    "linear": ("LlamaConfig", {"rope_type": "linear", "factor": 3.0}, ORIGINAL),
    "dynamic": ("LlamaConfig", {"rope_type": "dynamic", "factor": 2.0}, ORIGINAL),
    "yarn": ("LlamaConfig", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, **TRAINED}, 4 * ORIGINAL),
    "yarn, mscale": ("LlamaConfig", {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                                     "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False, **TRAINED}, 4 * ORIGINAL),
    "yarn, attention factor": ("LlamaConfig", {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **TRAINED},
                               4 * ORIGINAL),
    "llama3": ("LlamaConfig", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               **TRAINED}, 8 * ORIGINAL),
    "longrope": ("LlamaConfig", {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **TRAINED},
                 4 * ORIGINAL),
    "longrope, factor": ("LlamaConfig", {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                                         "factor": 6.0, **TRAINED}, 4 * ORIGINAL),
    "longrope, phi3": ("Phi3Config", {"rope_type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6],
                                      "partial_rotary_factor": 0.75}, 4 * ORIGINAL),
    "partial": ("Phi3Config", {"rope_type": "default", "partial_rotary_factor": 0.5}, 4 * ORIGINAL),
}


@pytest.mark.parametrize("length", [ORIGINAL - 8, ORIGINAL + 16], ids=["below", "above"])
@pytest.mark.parametrize("case", CASES)
def test_scaling_equals_transformers(case, length, tmp_path):
    kind, parameters, max_position = CASES[case]
    options = {"rope_parameters": {"rope_theta": 10000.0, **parameters}, "max_position_embeddings": max_position}
    if kind == "Phi3Config":
        options.update(TRAINED)
    oracle = mf.reference(Family(kind, options))
    mf.save(oracle, tmp_path)
    prompt = tokens(length)
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
        model = mf.load(tmp_path, max_model_len=length)
        got = model.logits(model(whole([length], torch.tensor(prompt))).hidden)
        # The same sequence, if its scaling were another: the case must be able to tell.
        model = mf.load(tmp_path, max_model_len=ORIGINAL if length > ORIGINAL else 2 * ORIGINAL)
        other = model.logits(model(whole([length], torch.tensor(prompt))).hidden)
    assert (got - expected).abs().max() <= 1e-4
    assert ("longrope" in case or case == "dynamic") == ((other - expected).abs().max() > 1e-2)


def test_frequencies_do_not_change_while_a_sequence_grows():
    """A short sequence in an engine for long ones uses the long factors, so that its keys stay valid."""
    parameters = {"rope_theta": 1e4, **CASES["longrope"][1]}
    rotary = build_rotary(parameters, 16, max_position=128, max_model_len=128)
    short, long = (rotary.tables(whole([n]), torch.float32) for n in (4, 100))
    assert torch.equal(short[0], long[0][:4])
    assert torch.allclose(rotary.inv_freq * torch.tensor(LONG), 1e4 ** (-torch.arange(0, 16, 2) / 16))


def test_kept_rotations_are_the_computed_ones_bit_for_bit():
    rotary = build_rotary({"rope_theta": 1e4, **CASES["llama3"][1]}, 22, max_position=128, max_model_len=70_000)
    for length in (1, 7, 600, 1500, rotary.MOST_KEPT + 1, 40):
        batch = whole([length])
        angle = batch.positions[:, None].float() * rotary.inv_freq
        cos, sin = rotary.tables(batch, torch.float32)
        assert torch.equal(cos, angle.cos()) and torch.equal(sin, angle.sin())


def test_tables_of_an_fp64_model_are_fp64():
    rotary = build_rotary({"rope_theta": 1e4}, 16, max_position=128, max_model_len=128)
    cos, _ = rotary.tables(whole([100]), torch.float64)
    exact = (torch.arange(100.0, dtype=torch.float64)[:, None] * rotary.inv_freq.double()).cos()
    assert torch.equal(cos, exact)


def test_explicit_factors_divide_the_frequencies():
    plain, scaled = (build_rotary({"rope_theta": 1e4, **p}, 8, max_position=64, max_model_len=64)
                     for p in ({}, {"rope_type": "factors", "factors": [1.0, 2.0, 4.0, 8.0]}))
    assert torch.allclose(plain.inv_freq / scaled.inv_freq, torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_errors_name_what_is_wrong():
    with pytest.raises(UnsupportedModel, match=r"'spiral' is not known; known: default, dynamic"):
        build_rotary({"rope_type": "spiral"}, 8, max_position=64, max_model_len=64)
    with pytest.raises(UnsupportedModel, match=r"'llama3' needs the field 'low_freq_factor'"):
        build_rotary({"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, **TRAINED}, 8, max_position=64,
                     max_model_len=64)
