"""Reading config.json: fields of new and old transformers, what follows where a field is missing, and refusals."""
from __future__ import annotations

import json

import model_families as mf
import pytest
import torch
from model_families import FAMILIES

from ridgeline.errors import ConfigError, UnsupportedModel
from ridgeline.models import MODELS, build_model

FULL, SLIDING = "full_attention", "sliding_attention"


def aged(config, family):
    """The config as older versions of transformers wrote it."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types", "dtype")}
    old["torch_dtype"] = "bfloat16"
    if family.options.get("sliding_window_pattern"):
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern")
    new = config.get("rope_parameters")
    if new and FULL in new:
        old["rope_local_base_freq"], new = new[SLIDING]["rope_theta"], new[FULL]
    if new:
        scaling = {k: v for k, v in new.items() if k not in ("rope_type", "rope_theta", "partial_rotary_factor")}
        old["rope_theta"] = new["rope_theta"]
        old["rope_scaling"] = {"type": new["rope_type"], **scaling} if new["rope_type"] != "default" else None
        if "partial_rotary_factor" in new:
            old["partial_rotary_factor"] = new["partial_rotary_factor"]
    return old


def meaning(config):
    """What the model makes of it: kind, window and frequencies of each layer."""
    model = build_model(config)
    rotaries = [layer.self_attn.rotary for layer in model.model.layers]
    return (model.config.layer_types, [spec.window for spec in model.state_spec()],
            [None if r is None else (r.inv_freq.tolist(), r.scaling) for r in rotaries])


@pytest.mark.parametrize("name", FAMILIES)
def test_old_fields_mean_the_same_as_new_ones(name, tiny):
    config = json.loads((tiny(name)[1] / "config.json").read_text())
    old = aged(config, FAMILIES[name])
    assert "layer_types" not in old and "rope_parameters" not in old
    assert meaning(old) == meaning(config)


def build(model_type, **options):
    return build_model({"model_type": model_type, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
                        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
                        "max_position_embeddings": 128, **options})


@pytest.mark.parametrize("model_type, options, expected", [
    ("llama", {"sliding_window": 8}, [FULL] * 8),
    ("mistral", {"sliding_window": 8}, [SLIDING] * 8),
    ("mistral", {}, [SLIDING] * 8),
    ("mistral", {"sliding_window": None}, [FULL] * 8),
    ("mistral", {"sliding_window": 8, "layer_types": [FULL, SLIDING] * 4}, [FULL, SLIDING] * 4),
    ("phi3", {}, [FULL] * 8),
    ("phi3", {"sliding_window": 8}, [SLIDING] * 8),
    ("qwen2", {"sliding_window": 8}, [FULL] * 8),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [FULL] * 3 + [SLIDING] * 5),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, [FULL] * 8),
    ("gemma2", {}, [SLIDING, FULL] * 4),
    ("gemma3_text", {}, [SLIDING] * 5 + [FULL] + [SLIDING] * 2),
    ("gemma3_text", {"_sliding_window_pattern": 4}, ([SLIDING] * 3 + [FULL]) * 2),
])
def test_layer_types_follow_from_other_fields(model_type, options, expected):
    model = build(model_type, **options)
    assert list(model.config.layer_types) == expected
    for kind, spec in zip(expected, model.state_spec()):
        assert (spec.window is not None) == (kind == SLIDING)


def test_a_window_that_is_switched_off_stays_off_with_layer_types():
    model = build("qwen2", sliding_window=8, layer_types=[SLIDING] * 8)
    assert all(spec.window is None for spec in model.state_spec())


@pytest.mark.parametrize("given, expected", [({"head_dim": None}, 16), ({}, 16), ({"head_dim": 24}, 24)])
def test_head_dim_may_be_null_or_missing(given, expected):
    spec = build("llama", **given).state_spec()[0]
    assert (spec.heads, spec.key_dim, spec.value_dim) == (2, expected, expected)


def test_rope_of_gemma3_by_default():
    model = build("gemma3_text", head_dim=16, rope_scaling={"rope_type": "linear", "factor": 8.0})
    sliding, full = (model.model.layers[i].self_attn.rotary.inv_freq for i in (0, 5))
    index = torch.arange(0, 16, 2) / 16
    torch.testing.assert_close(sliding, 1e4 ** -index)
    torch.testing.assert_close(full, 1e6 ** -index / 8)


@pytest.mark.parametrize("early_name", ["su", "yarn"])
def test_phi3_knows_early_names_of_longrope(early_name):
    factors = [2.0] * 8
    scaling = {"type": early_name, "short_factor": factors, "long_factor": factors}
    rotary = build("phi3", rope_scaling=scaling, original_max_position_embeddings=64).model.layers[0].self_attn.rotary
    torch.testing.assert_close(rotary.inv_freq, 1e4 ** -(torch.arange(0, 16, 2) / 16) / 2)
    assert rotary.scaling > 1


def test_building_takes_no_memory():
    model = build("llama")
    assert all(p.is_meta for p in model.parameters()) and not model.training


def test_tied_embeddings_are_one_parameter(tiny):
    model = mf.load(tiny("llama-multi-head")[1])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert mf.load(tiny("llama")[1]).lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.parametrize("options, message", [
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ({"layer_types": [FULL]}, "layer_types has 1 entries for 8 layers"),
    ({"layer_types": ["chunked_attention"] * 8}, r"layer_types names \['chunked_attention'\]; known: full_attention"),
    ({"vocab_size": None}, "lacks 'vocab_size'"),
    ({"hidden_act": "sine"}, "activation 'sine' is not known; known: gelu"),
])
def test_refusals_name_the_field(options, message):
    with pytest.raises(UnsupportedModel, match=message):
        build("llama", **options)


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(UnsupportedModel, match=r"'bert' has no implementation; known: gemma2, .*llama, .*sdar"):
        build_model({"model_type": "bert"})
    with pytest.raises(UnsupportedModel, match="model_type None"):
        build_model({})
    assert {mf.model_type(family) for family in FAMILIES.values()} <= set(MODELS)


def test_variants_without_an_implementation_are_refused():
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention is True; gemma3_text supports False"):
        build("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="add_cross_attention is True"):
        build("gpt2", add_cross_attention=True, num_key_value_heads=None)


def test_gpt2_has_only_its_learned_positions():
    raw = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    assert build_model(raw, max_model_len=32).config.max_model_len == 32
    with pytest.raises(ConfigError, match="max_model_len is 33; this gpt2 has 32 learned positions"):
        build_model(raw, max_model_len=33)
