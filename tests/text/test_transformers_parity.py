"""Encoding and decoding equal transformers' fast tokenizers, for tokenizer.json files trained here."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from ridgeline.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The river bends twice before it reaches the old mill, and each bend has its own weather.",
    "def f(x):\n    return x ** 2  # 12345 6789\n\n\n", "Größe, café, naïve: ünïcödé",
    "今天天气很好。日本語の文章。", "😀 👩‍👩‍👧 🎉",
    "Привет, как дела? it's we've DON'T",
] * 3
TEXTS = [
    *CORPUS[:6], "", " ", "  two leading", "trailing  ", "\n\n\n", "\t x",
    "a<|end|>b", "<|end|>", " <|end|> ", "x<tool>y", "龘ꙮ𐍈",
    "e\u0301", "don't stop", "<|start|>user<|end|>", "1234567890",
]


def byte_level(**config: Any) -> tuple[Backend, dict[str, Any]]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return backend, config


def metaspace_spm(**config: Any) -> tuple[Backend, dict[str, Any]]:
    """As the converted LLaMA tokenizers: spaces as U+2581, bytes for unknown characters, one leading space stripped."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False, limit_alphabet=60))
    model = json.loads(trained.to_str())["model"]
    vocab = {token: index for index, token in enumerate(
        ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(model["vocab"], key=model["vocab"].get)])}
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return backend, config


def metaspace(**config: Any) -> tuple[Backend, dict[str, Any]]:
    """The Metaspace pre-tokenizer and decoder, which drop the first token's spaces."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>"]))
    return backend, config


BUILDERS = {"byte-level": byte_level, "spm": metaspace_spm, "metaspace": metaspace}


def pair(folder: Path, backend: Backend, config: dict[str, Any]) -> tuple[Tokenizer, Any]:
    """Save with special and added tokens; load with ridgeline and with transformers."""
    from transformers import AutoTokenizer

    backend.add_special_tokens([AddedToken("<|start|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    if "template" in config:
        index = backend.token_to_id("<|start|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", index)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "clean_up_tokenization_spaces": False,
    } | {key: value for key, value in config.items() if key != "template"}))
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=BUILDERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    backend, config = BUILDERS[request.param](template=True)
    return pair(tmp_path_factory.mktemp(request.param), backend, config)


def same(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text(both: tuple[Tokenizer, Any], text: str) -> None:
    same(*both, text)


def test_any_text(both: tuple[Tokenizer, Any]) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.text(max_size=40))
    def check(text: str) -> None:
        same(*both, text)

    check()


def test_special_tokens_and_ids(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert {"<|start|>", "<|end|>"} <= set(ours.special_tokens)
    assert "<tool>" not in ours.special_tokens


def test_without_parsing_special_tokens(both: tuple[Tokenizer, Any]) -> None:
    ours, _ = both
    ids = ours.encode("a<|end|>b<tool>", parse_special=False, add_special_tokens=False)
    assert ours.special_tokens["<|end|>"] not in ids
    assert ours.token_id("<tool>") in ids
    assert ours.special_tokens["<|end|>"] in ours.encode("a<|end|>b")  # the switch does not stick


@pytest.mark.parametrize("config, special", [
    ({"extra_special_tokens": ["<tool>"]}, False), ({"additional_special_tokens": ["<tool>"]}, False),
    ({"pad_token": "<tool>"}, True), ({"extra_special_tokens": {"tool_token": "<tool>"}}, True),
])
def test_special_tokens_that_the_vocabulary_does_not_flag(
    tmp_path: Path, config: dict[str, Any], special: bool
) -> None:
    ours, theirs = pair(tmp_path, *byte_level(**config))
    same(ours, theirs, "a<tool>b<|end|>")
    assert ("<tool>" in ours.special_tokens) == special


@pytest.mark.parametrize("config", [
    {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False, "template": True}, {"add_eos_token": True},
])
def test_flags_do_not_override_a_tokenizer_json(tmp_path: Path, config: dict[str, Any]) -> None:
    ours, theirs = pair(tmp_path, *byte_level(**config))
    for text in ("hello world", ""):
        same(ours, theirs, text)
