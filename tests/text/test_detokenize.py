"""Streamed text, concatenated, is the text of all ids at once, for any ids and any chunks."""
from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ridgeline.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world", " leading space", "  two", "", "👩‍👩‍👧 family 🏳️‍🌈",
    "今天天气很好，我们去公园散步吧。", "a\n\n\nb\tc", "龘ꙮ𐍈", "e\u0301\u0302",
    "x" * 50, "\ufffd literal replacement", "مرحبا", "<s> and </s>",
]
KINDS = ["spm", "spm_without_prefix", "bpe", "wordpiece"]
BYTE_KINDS = KINDS[:3]


def survives(kind: str, text: str) -> bool:
    """Whether encoding keeps this text: SentencePiece writes spaces as U+2581, so that character becomes a space, and
    with a prefix also puts a space after each token that is matched before the text is normalised."""
    return "spm" not in kind or ("\u2581" not in text and (kind != "spm" or "\n\n" not in text))


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(places)]


def stream(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool) -> str:
    decoder = tokenizer.decoder(skip_special_tokens=skip)
    return "".join(decoder.push(chunk) for chunk in chunks) + decoder.flush()


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_in_any_chunks(kind: str, skip: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(-2, tokenizer.vocab_size + 3), max_size=40), st.lists(st.integers(0, 50), max_size=8))
    def check(ids: list[int], cuts: list[int]) -> None:
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert stream(tokenizer, chunked(ids, cuts), skip) == whole
        assert stream(tokenizer, [[index] for index in ids], skip) == whole

    check()


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_text_survives_in_any_chunks(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)

    @settings(max_examples=150, deadline=None)
    @given(st.text(max_size=60) | st.sampled_from(TEXTS), st.lists(st.integers(0, 50), max_size=8))
    def check(text: str, cuts: list[int]) -> None:
        assume(survives(kind, text))
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert stream(tokenizer, chunked(ids, cuts), True) == text

    check()


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_what_is_shown_is_never_half_a_character(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = "😀 👩‍👩‍👧 龘 今天"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert any("\ufffd" in tokenizer.token_text(index) for index in ids)  # characters do span tokens here
    decoder = tokenizer.decoder()
    shown = ""
    for index in ids:
        shown += decoder.push([index])
        assert "\ufffd" not in shown
        assert text.startswith(shown)
    assert shown == text
    assert decoder.flush() == ""


def test_an_unfinished_character_becomes_a_replacement_at_the_end_only(spm: Tokenizer) -> None:
    ids = spm.encode("a龘", add_special_tokens=False)[:-1]
    decoder = spm.decoder()
    assert decoder.push(ids) == "a"
    assert decoder.flush() == "\ufffd"
    assert spm.decode(ids) == "a\ufffd"


def test_flush_makes_the_decoder_fresh(tokenizer: Tokenizer) -> None:
    ids = [index for index in range(20, 30) if index < tokenizer.vocab_size] or [1, 2, 3]
    decoder = tokenizer.decoder()
    first = decoder.push(ids) + decoder.flush()
    assert decoder.push(ids) + decoder.flush() == first


def test_special_tokens_are_shown_or_skipped(spm: Tokenizer, bpe: Tokenizer) -> None:
    ids = bpe.encode("a<|im_end|>b", add_special_tokens=False)
    assert bpe.decode(ids) == "ab"
    assert bpe.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert spm.decode(spm.encode("a")) == "a"
    assert spm.decode(spm.encode("a"), skip_special_tokens=False) == "<s> a"


def test_user_defined_tokens_are_text(bpe: Tokenizer) -> None:
    ids = bpe.encode("x<tool>y", add_special_tokens=False, parse_special=False)
    assert bpe.token_id("<tool>") in ids
    assert bpe.decode(ids) == "x<tool>y"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_token_bytes_concatenate_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    for text in TEXTS:
        if survives(kind, text):
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            joined = b"".join(map(tokenizer.token_bytes, ids))
            assert joined == (b" " if kind == "spm" and text else b"") + text.encode()


def test_bytes_of_single_tokens(spm: Tokenizer, bpe: Tokenizer) -> None:
    assert bpe.token_bytes(bpe.special_tokens["<|im_end|>"]) == b"<|im_end|>"
    assert spm.token_bytes(spm.token_id("<0xE9>") or 0) == b"\xe9"
    assert spm.token_text(spm.token_id("<0xE9>") or 0) == "\ufffd"
    assert spm.token_bytes(10**6) == spm.token_bytes(-1) == b""


def test_wordpiece_equals_its_library(wordpiece: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(wordpiece.source) + "/tokenizer.json")
    for text in ["the river bends , no bending .", "café 今天", "abc the"]:
        ids = wordpiece.encode(text)
        assert wordpiece.decode(ids) == backend.decode(ids)
