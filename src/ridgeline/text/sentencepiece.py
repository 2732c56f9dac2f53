"""Tokenizers made from SentencePiece pieces: the form of GGUF's "llama" model and of tokenizer.model.

A SentencePiece vocabulary is a list of (piece, score, type). Its BPE has no merge table: of all neighbouring
symbols whose concatenation is a piece, the one with the highest score is joined first. `bpe_backend` writes that
down as an explicit merge table, so that the `tokenizers` library can run it. Spaces are U+2581 in the pieces, and
characters without a piece become byte tokens such as <0x0A>.

Source: github.com/google/sentencepiece, sentencepiece_model.proto (field numbers) and bpe_model.cc (merge order).
"""
from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from ridgeline.errors import CorruptFile, UnsupportedModel
from ridgeline.text.build_cache import cached_pairs

SPACE = "\u2581"


class TokenType(IntEnum):
    """The type of a piece; GGUF's tokenizer.ggml.token_type uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary and how it treats text; `source` is the file, for messages."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    source: str
    unk_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    add_space_prefix: bool = True
    rstrip_special: frozenset[str] = field(default_factory=frozenset)


def added_tokens(pieces: Pieces) -> list[AddedToken]:
    """Control and unknown pieces as special tokens, user-defined ones as plain added tokens, in order of id."""
    kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    return [
        AddedToken(pieces.tokens[index], special=pieces.types[index] != TokenType.USER_DEFINED, normalized=False,
                   rstrip=pieces.tokens[index] in pieces.rstrip_special)
        for index in np.flatnonzero(np.isin(pieces.types, kinds)).tolist()
    ]


def merge_table(pieces: Pieces) -> np.ndarray:
    """Every way to split a piece into two pieces, as their ids, (merges, 2) int32.

    Best score first; pieces with equal scores in order of id. Control pieces are never the result of a merge: text alone
    must not be able to spell one.
    """
    usable = {
        token: index for index, (token, kind) in enumerate(zip(pieces.tokens, pieces.types))
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    flat: list[int] = []
    scores = pieces.scores
    # The sort is stable, so ties keep the order of their ids.
    for token in sorted(usable, key=lambda token: scores[usable[token]], reverse=True):
        for cut in range(1, len(token)):
            left = usable.get(token[:cut])
            if left is not None:
                right = usable.get(token[cut:])
                if right is not None:
                    flat += (left, right)
    return np.array(flat, np.int32).reshape(-1, 2)  # (merges, 2)


def backend(pieces: Pieces) -> Backend:
    """The tokenizer of these pieces in the `tokenizers` library."""
    vocab = {token: index for index, token in enumerate(pieces.tokens)}
    if len(vocab) != len(pieces.tokens):
        raise CorruptFile(f"{pieces.source}: {len(pieces.tokens) - len(vocab)} tokens occur more than once "
                          "in the vocabulary; token texts must be unique")
    content = ("\0".join(pieces.tokens).encode(), np.asarray(pieces.scores, np.float32).tobytes(),
               np.asarray(pieces.types, np.int32).tobytes())
    pairs = cached_pairs(content, lambda: merge_table(pieces))
    spelled = np.array(pieces.tokens, dtype=object)[pairs.T]  # (2, merges)
    result = Backend(models.BPE(
        vocab=vocab, merges=list(zip(*spelled.tolist())), fuse_unk=False,
        unk_token=None if pieces.unk_id is None else pieces.tokens[pieces.unk_id],
        byte_fallback=any(kind == TokenType.BYTE for kind in pieces.types),
    ))
    prefix = [normalizers.Prepend(SPACE)] if pieces.add_space_prefix else []
    result.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    result.decoder = decoders.Sequence(steps)
    result.add_tokens(added_tokens(pieces))
    return result


def read_model(path: Path) -> Pieces:
    """Parse a tokenizer.model file.

    Raises CorruptFile if it is not a SentencePiece protobuf and UnsupportedModel for what is not a plain BPE: unigram,
    word and char models, and text normalisation by a character map.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                tokens.append(_as_bytes(piece.get(1, b"")).decode())
                scores.append(struct.unpack("<f", _as_bytes(piece.get(2, b"\0\0\0\0")))[0])
                types.append(_as_int(piece.get(3, TokenType.NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
        kind = _as_int(trainer.get(3, 1))
        unk, bos, eos = (_signed(trainer.get(number, default)) for number, default in ((40, 0), (41, 1), (42, 2)))
        charsmap = _as_bytes(normalizer.get(2, b""))
    except (ValueError, struct.error) as error:
        raise CorruptFile(f"{path}: not a SentencePiece model: {error}") from error
    if not tokens:
        raise CorruptFile(f"{path}: not a SentencePiece model: it holds no pieces")
    names = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
    if kind != 2:
        raise UnsupportedModel(f"{path}: SentencePiece model type {names.get(kind, kind)!r}; supported: 'bpe'. "
                               "A tokenizer.json beside it would be used instead")
    if charsmap:
        raise UnsupportedModel(f"{path}: normalises text by a character map, which is not supported. "
                               "A tokenizer.json beside it would be used instead")

    def inside(index: int) -> int | None:
        return index if 0 <= index < len(tokens) else None

    return Pieces(
        tokens, scores, types, str(path), unk_id=inside(unk), bos_id=inside(bos), eos_id=inside(eos),
        add_space_prefix=bool(normalizer.get(3, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (field number, value) pairs of one protobuf message: varints as int, everything else as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"field {number} needs {size} bytes at byte {position}, {len(data) - position} are left")
        yield number, data[position:position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError(f"a number does not end at byte {position}")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a number ({value}) where bytes were expected")
    return value


def _as_int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number was expected")
    return value


def _signed(value: int | bytes) -> int:
    number = _as_int(value)
    return number - (1 << 64) if number >= 1 << 63 else number
