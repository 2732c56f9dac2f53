"""Tokenizers embedded in GGUF files: "llama" (SentencePiece BPE), "gpt2" (byte-level BPE) and "gemma4".

Keys: tokenizer.ggml.model, pre, tokens, scores, merges, token_type, *_token_id, add_bos_token, add_eos_token,
add_space_prefix; tokenizer.chat_template. What the file leaves out follows llama.cpp's llama-vocab.cpp, so that the
same file gives the same ids. Three differences are on purpose: merges never make a control token out of plain text;
`</s>` ends a turn only if the file says so, as in some vocabularies it is a tag of HTML; and the patterns of tekken
and gpt-4o are the models' own where llama.cpp approximates them.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ridgeline.errors import CorruptFile, UnsupportedModel
from ridgeline.text.pretokenizers import pre_tokenizer
from ridgeline.text.sentencepiece import SPACE, Pieces, TokenType, added_tokens
from ridgeline.text.sentencepiece import backend as sentencepiece_backend
from ridgeline.text.tokenizer import Tokenizer, wrap_with
from ridgeline.weights.gguf_file import GGUFFile

_PREFIX = "tokenizer.ggml."

# Files rarely name every token that ends a turn; these spellings end one wherever they occur.
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
          "sep_token": "seperator", "mask_token": "mask"}  # "seperator" is how the format spells it


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file; raises CorruptFile or UnsupportedModel, which name the file and the key."""
    return tokenizer_from_metadata(GGUFFile(path).metadata, str(path))


def tokenizer_from_metadata(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that GGUF metadata describes; `source` names the file in messages."""
    fields = _Fields(metadata, source)
    model = fields.string("model", "")
    if not model:
        fields.fail("model", "it is missing: the file holds no tokenizer")
    builders: dict[str, Callable[[_Vocabulary], Backend]] = {"llama": _spm, "gpt2": _bpe, "gemma4": _spaced_bpe}
    build = builders.get(model)
    if build is None:
        raise UnsupportedModel(f"{source}: tokenizer.ggml.model is {model!r}; supported: {', '.join(builders)}")
    vocabulary = _Vocabulary(fields)
    backend = build(vocabulary)

    token_id = vocabulary.token_id
    bos, eos = token_id("bos", 1 if model == "llama" else None), token_id("eos", 2 if model == "llama" else None)
    add_bos, add_eos = fields.get("add_bos_token", _adds_bos(fields)), fields.get("add_eos_token", False)
    wrap_with(backend, bos if add_bos else None, eos if add_eos else None)
    ends = [index for index in (eos, token_id("eot"), token_id("eom"), *vocabulary.ends) if index is not None]
    named = {name: vocabulary.tokens[index] for name, key in _NAMED.items() if (index := token_id(key)) is not None}
    return Tokenizer(backend, bos_token_id=bos, eos_token_ids=tuple(dict.fromkeys(ends)), named_tokens=named,
                     chat_templates=_chat_templates(metadata), source=source)


def _adds_bos(fields: _Fields) -> bool:
    """Whether text begins with the beginning-of-sequence token if the file does not say."""
    if fields.get("model") == "gpt2":
        return pre_tokenizer(fields.string("pre", "default"), fields.source).add_bos
    return True


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": metadata.get("tokenizer.chat_template")}
    names = metadata.get("tokenizer.chat_templates")
    for name in names if isinstance(names, list) else ():
        templates[str(name)] = metadata.get(f"tokenizer.chat_template.{name}")
    return {name: text for name, text in templates.items() if isinstance(text, str)}


class _Fields:
    """Checked access to the tokenizer.ggml.* keys."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CorruptFile(f"{self.source}: {_PREFIX}{key}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + key, default)

    def string(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"expected a string, found {type(value).__name__}")
        return default if value is None else value

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value or set(map(type, value)) != {str}:
            self.fail(key, "expected a list of strings, "
                           + ("it is missing" if value is None else f"found {type(value).__name__}"))
        try:
            "".join(value).encode()
        except UnicodeEncodeError as error:
            bad = next(index for index, item in enumerate(value) if not _is_text(item))
            raise CorruptFile(f"{self.source}: {_PREFIX}{key}[{bad}] is not valid UTF-8") from error
        return value

    def numbers(self, key: str, count: int) -> np.ndarray | None:
        """A numeric array of at least `count` items, (count,); None if the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "biuf" or len(array) < count:
            self.fail(key, f"expected at least {count} numbers, found shape {array.shape} of {array.dtype}")
        return array[:count]  # (count,)


class _Vocabulary:
    """The tokens of a file, their ids and types."""

    def __init__(self, fields: _Fields) -> None:
        self.fields = fields
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.strings("tokens"))]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for token, count in Counter(self.tokens).items() if count > 1)
            fields.fail("tokens", f"{twice!r} occurs more than once; token texts must be unique")
        # Tokens that end a turn are control tokens, whatever the file says.
        self.ends = sorted(self.ids[text] for text in _END_TEXTS if text in self.ids)
        stored = fields.numbers("token_type", len(self.tokens))
        types = np.full(len(self.tokens), TokenType.NORMAL) if stored is None else stored.astype(np.int64)
        types[self.ends] = TokenType.CONTROL
        self.types: list[int] = types.tolist()

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """The value of the key NAME_token_id, if it names a token."""
        index = self.fields.get(f"{name}_token_id", default)
        return int(index) if isinstance(index, int | np.integer) and 0 <= index < len(self.tokens) else None

    def pieces(self, scores: Sequence[float] = ()) -> Pieces:
        fields = self.fields
        return Pieces(self.tokens, scores, self.types, fields.source, unk_id=self.token_id("unknown", 0),
                      add_space_prefix=bool(fields.get("add_space_prefix", True)), rstrip_special=self._rstrip())

    def _rstrip(self) -> frozenset[str]:
        """Phi-3's special tokens swallow the whitespace after them, which no key of the format can say."""
        name = str(self.fields.metadata.get("general.name", "")).lower()
        if "phi-3" not in name and "phi3" not in name:
            return frozenset()
        return frozenset(self.tokens) - {"<unk>", "<s>", "<|endoftext|>"}


def _is_text(item: str) -> bool:
    try:
        item.encode()
    except UnicodeEncodeError:
        return False
    return True


def _spm(vocabulary: _Vocabulary) -> Backend:
    fields = vocabulary.fields
    scores = fields.numbers("scores", len(vocabulary.tokens))
    if scores is None:
        fields.fail("scores", "it is missing; a SentencePiece vocabulary needs one score a token")
    return sentencepiece_backend(vocabulary.pieces(scores.tolist()))


def _bpe(vocabulary: _Vocabulary) -> Backend:
    fields = vocabulary.fields
    rules = pre_tokenizer(fields.string("pre", "default"), fields.source)
    backend = _merging_backend(vocabulary, ignore_merges=rules.ignore_merges)
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _spaced_bpe(vocabulary: _Vocabulary) -> Backend:
    """Explicit merges over text whose spaces are U+2581, cut only at line ends."""
    backend = _merging_backend(vocabulary, byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merging_backend(vocabulary: _Vocabulary, **options: bool) -> Backend:
    fields, ids = vocabulary.fields, vocabulary.ids
    merges = []
    for line in fields.strings("merges"):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1:]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            fields.fail("merges", f"{line!r} does not join two tokens of the vocabulary into a third")
        if vocabulary.types[ids[left + right]] != TokenType.CONTROL:
            merges.append((left, right))
    backend = Backend(models.BPE(vocab=ids, merges=merges, **options))
    backend.add_tokens(added_tokens(vocabulary.pieces()))
    return backend
