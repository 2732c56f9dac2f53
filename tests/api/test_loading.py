"""From a configuration to an engine: what is opened, how large it becomes, and what is refused before weights are read."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams, loading
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError, CorruptFile, ModelError, ModelNotFound, RidgelineError, UnsupportedModel
from ridgeline.weights.checkpoint import Checkpoint
from tiny_checkpoint import write_checkpoint, write_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The target with some noise, so that it is often right."""
    path = tmp_path_factory.mktemp("drafter")
    shutil.copytree(folder, path, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    tensors = {name: t + 0.02 * t.std() * torch.randn(t.shape, generator=generator) if t.dim() > 1 else t
               for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def hidden_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hidden")
    write_model(path, model_type="hidden_drafter", num_hidden_layers=1)
    return path


def text(llm: LLM, prompt: str = "The sea is calm. The sea is") -> str:
    output = llm.generate(prompt, GREEDY)[0]
    assert output.error is None
    return output.outputs[0].text


def test_each_model_is_opened_once(folder: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    resolved: list[str] = []

    def open_checkpoint(path: Path, *, load_format: str) -> Checkpoint:
        opened.append(path)
        return real(path, load_format=load_format)

    def resolve(name: str, **options: Any) -> Path:
        resolved.append(name)
        return real_resolve(name, **options)

    real, real_resolve = loading.open_checkpoint, loading.resolve
    monkeypatch.setattr(loading, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr(loading, "resolve", resolve)
    names: list[str] = []
    llm = LLM(folder, speculative_config={"model": str(drafter)}, on_load=lambda name, done, total: names.append(name))
    assert opened == [folder, drafter] and resolved == [str(folder), str(drafter)]
    assert list(dict.fromkeys(names)) == [str(folder), str(drafter)]
    assert list(llm.engine.strategies) == ["draft_model", "autoregressive", "score", "embed_last", "embed_mean"]


def test_every_speculative_method_gives_the_plain_text(llm: LLM, folder: Path, drafter: Path, hidden_drafter: Path) -> None:
    expected = text(llm)
    for config in ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2},
                   {"method": "lookup_tree", "branches": 3}, {"model": str(drafter), "num_speculative_tokens": 2},
                   {"method": "draft_model", "model": str(drafter)},
                   {"method": "hidden_drafter", "model": str(hidden_drafter)}):
        speculative = LLM(folder, speculative_config=config)
        assert text(speculative) == expected, config
        if "draft" in config.get("method", "draft"):
            assert speculative.stats.draft_tokens > 0


@pytest.mark.parametrize(("config", "words"), [
    ({"method": "medusa"}, "valid: ngram"), ({"num_speculative_tokens": 2}, "method is None"), ({"method": 3}, "method is 3"),
    ({"method": "ngram", "model": "x"}, 'takes no "model"'), ({"method": "draft_model"}, 'needs "model"'),
    ({"method": "draft_model", "model": 5}, "got 5"), ({"method": "ngram", "k": 3}, "'k' is no option"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
    ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens is '4'"),
    ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min is 3"),
    ({"method": "draft_model", "model": "DRAFTER", "branches": 2}, "'branches' is no option"),
    ({"method": "hidden_drafter", "model": "DRAFTER"}, "use method draft_model"),
    ({"method": "draft_model", "model": "HIDDEN"}, "use method hidden_drafter"),
    ({"method": "draft_model", "model": "SMALL"}, "vocabulary of 300 tokens"),
    ({"method": "hidden_drafter", "model": "NARROW"}, "width 16")], ids=str)
def test_wrong_speculation_is_refused_before_weights_are_read(
        folder: Path, drafter: Path, hidden_drafter: Path, tmp_path: Path, config: dict[str, Any], words: str) -> None:
    write_model(tmp_path, vocabulary=300)
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    write_model(narrow, model_type="hidden_drafter", num_hidden_layers=1, hidden_size=16)
    places = {"DRAFTER": drafter, "HIDDEN": hidden_drafter, "SMALL": tmp_path, "NARROW": narrow}
    given = {k: str(places.get(v, v)) if k == "model" and isinstance(v, str) else v for k, v in config.items()}
    loads: list[str] = []
    with pytest.raises(ConfigError, match=words):
        LLM(folder, speculative_config=given, on_load=lambda name, done, total: loads.append(name))
    assert not loads


def test_a_drafter_alone_is_no_model(hidden_drafter: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_drafter"):
        LLM(hidden_drafter)


def test_block_diffusion(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type="sdar", mask_token_id=319)
    llm = LLM(tmp_path, diffusion_config={"block": 8, "threshold": 0.5})
    assert list(llm.engine.strategies)[:2] == ["block_diffusion", "autoregressive"]
    assert len(llm.generate("The sea", GREEDY)[0].outputs[0].token_ids) == 10
    assert len(llm.generate("The sea", GREEDY, strategy="autoregressive")[0].outputs[0].token_ids) == 10


@pytest.mark.parametrize(("config", "words"), [
    ({"blocks": 4}, "'blocks' is not an option"), ({"mask_token": 320}, "mask_token is 320"), ({}, "mask_token is 151669"),
    ({"mask_token": "x"}, "mask_token is 'x'"), ({"mask_token": 1, "block": 0}, "block is 0"),
    ({"mask_token": 1, "steps": 1.5}, "steps is 1.5"), ({"mask_token": 1, "reveal": "all"}, "valid: threshold"),
    ({"mask_token": 1, "threshold": 2}, "threshold is 2"), ({"mask_token": 1, "block": 12}, "block_size is 16")], ids=str)
def test_wrong_diffusion(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    write_model(tmp_path, model_type="sdar")
    with pytest.raises(ConfigError, match=words):
        LLM(tmp_path, diffusion_config=config)


@pytest.mark.parametrize(("options", "words"), [
    ({"max_model_length": 5}, "did you mean max_model_len"), ({"dtype": "int8"}, "dtype is 'int8'; valid: auto"),
    ({"max_model_len": 0}, "max_model_len is 0"), ({"block_size": None}, "block_size is None"),
    ({"max_num_seqs": True}, "max_num_seqs is True"), ({"seed": 1.5}, "seed is 1.5"),
    ({"max_logprobs": -1}, "max_logprobs is -1"), ({"device": 0}, "a string"),
    ({"speculative_config": "ngram"}, "a mapping"), ({"enable_prefix_caching": 1}, "True or False"),
    ({"tokenizer": 5}, "a string or None"), ({"progress": "yes"}, "True, False or None"),
    ({"tokenizer": "x", "skip_tokenizer_init": True}, "give one of them"),
    ({"num_pages": 5, "kv_cache_memory_bytes": 1 << 20}, "give one of them"), ({"num_states": 5}, "without num_pages"),
    ({"scheduling_policy": "lifo"}, "valid: fcfs, priority, static"), ({"load_format": "pickle"}, "valid: auto"),
    ({"device": "warp"}, "device 'warp' cannot be used"), ({"device": "meta"}, "holds no data"),
    ({"kv_cache_memory_bytes": 100}, "too small"), ({"num_pages": 3, "max_model_len": 200}, "cannot hold"),
    ({"max_model_len": 256, "kv_cache_memory_bytes": 1 << 14}, "cannot hold")], ids=str)
def test_wrong_configurations(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(folder, **options)


def test_sizes(folder: Path) -> None:
    plain = LLM(folder)
    assert plain.engine.max_model_len == 256
    per_token = plain.loaded.layout.kv_bytes_per_token()
    assert per_token == 2 * 2 * 16 * 4                                        # layers, K and V, head, fp32
    small = LLM(folder, kv_cache_memory_bytes=5 * 16 * per_token)
    assert (small.engine.store.num_pages, small.engine.max_model_len) == (5, 80)
    assert "at most 79" in str(small.generate([[5] * 80])[0].error)
    assert LLM(folder, num_pages=4, kv_cache_dtype="bfloat16").engine.max_model_len == 64
    assert LLM(folder, max_model_len=512).engine.max_model_len == 512
    ngram = LLM(folder, num_pages=4, speculative_config={"method": "ngram", "num_speculative_tokens": 5})
    assert ngram.engine.max_model_len == 59 and text(ngram)
    assert len(ngram.generate([[5] * 58], SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids) == 1


def test_the_shorter_context_of_two_models_counts(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path, max_position_embeddings=100)
    assert LLM(folder, speculative_config={"model": str(tmp_path)}).engine.max_model_len == 100


def test_learned_positions_end(tmp_path: Path) -> None:
    raw = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert LLM(tmp_path, load_format="dummy").engine.max_model_len == 32
    with pytest.raises(ConfigError, match="learned positions for 32"):
        LLM(tmp_path, load_format="dummy", max_model_len=33)


def test_dummy_weights_need_a_config_only(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ModelNotFound, match="dummy"):
        LLM(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        llm = LLM(path, load_format="dummy", speculative_config={"model": str(path)})
        assert len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) == 10
    named = LLM(tmp_path, load_format="dummy", tokenizer=str(folder / "tokenizer.json"))
    assert named.generate("The sea", GREEDY)[0].error is None


def test_the_file_of_a_folder_finds_the_tokenizer_beside_it(folder: Path, llm: LLM) -> None:
    assert text(LLM(folder / "model.safetensors")) == text(llm)


def test_a_tokenizer_that_is_not_wanted_is_not_read(folder: Path, tmp_path: Path, llm: LLM) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("damaged")
    bare = LLM(tmp_path, skip_tokenizer_init=True)
    assert bare.tokenizer is None
    ids = [5, 6, 7]
    assert bare.generate(ids, GREEDY)[0].outputs[0].token_ids == llm.generate(ids, GREEDY)[0].outputs[0].token_ids


def test_wrong_files(folder: Path, tmp_path: Path) -> None:
    def broken(name: str, change: Any) -> Path:
        path = tmp_path / name
        shutil.copytree(folder, path)
        change(path)
        return path

    def truncate(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-100])

    def without(path: Path, tensor: str) -> None:
        tensors = load_file(path / "model.safetensors")
        del tensors[tensor]
        save_file(tensors, path / "model.safetensors")

    cases: list[tuple[Any, type[RidgelineError], str]] = [
        (lambda p: truncate(p / "model.safetensors"), CorruptFile, "model.safetensors"),
        (lambda p: truncate(p / "tokenizer.json"), CorruptFile, "tokenizer.json"),
        (lambda p: (p / "config.json").write_text("{"), CorruptFile, "config.json"),
        (lambda p: (p / "config.json").unlink(), ModelNotFound, "config.json"),
        (lambda p: (p / "config.json").write_text('{"model_type": "mamba9"}'), UnsupportedModel, "known: .*llama"),
        (lambda p: without(p, "model.norm.weight"), ModelError, "model.norm.weight"),
        (lambda p: write_model(p, hidden_size=48) or shutil.copy(folder / "config.json", p), CorruptFile, "shape")]
    for number, (change, error, words) in enumerate(cases):
        with pytest.raises(error, match=words):
            LLM(broken(str(number), change))
    with pytest.raises(ModelNotFound, match="tokenizer"):
        LLM(folder, tokenizer=str(tmp_path / "none"))


@pytest.mark.parametrize(("field", "value", "words"), [
    ("vocab_size", -1, "vocab_size is -1; it must be an integer of at least 1"), ("num_hidden_layers", 1.5, "is 1.5"),
    ("hidden_size", "x", "is 'x'"), ("num_key_value_heads", 0, "is 0"), ("head_dim", True, "is True"),
    ("rms_norm_eps", -1, "a number above 0"), ("rms_norm_eps", "x", "a number above 0"), ("sliding_window", [], "integer"),
    ("hidden_act", [], "hidden_act"), ("rope_parameters", 5, "an object"), ("layer_types", 5, "a list"),
    ("eos_token_id", 1.5, "a token id"), ("eos_token_id", ["x"], "a token id"),
    ("rope_parameters", {"rope_type": "linear", "factor": "x"}, "fit no"),
    ("num_attention_heads", 3, "no multiple"), ("hidden_size", None, "lacks 'hidden_size'")], ids=str)
def test_wrong_values_in_a_configuration(folder: Path, tmp_path: Path, field: str, value: Any, words: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_key_value_heads": 2, field: value}))
    with pytest.raises((CorruptFile, UnsupportedModel), match=words):
        LLM(tmp_path, load_format="dummy")


def test_the_configuration_is_kept_as_resolved(llm: LLM) -> None:
    assert llm.config == EngineConfig(threads=1, max_num_seqs=8)
