"""Text to token ids and back.

Encoding is the `tokenizers` library's. Decoding is our own where a token stands for fixed bytes (byte-level and
SentencePiece vocabularies, which is nearly all): the bytes of the tokens are concatenated and decoded as UTF-8, so that
whole, streamed and per-token views of the same ids can never disagree.
"""
from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from ridgeline.errors import InvalidPrompt
from ridgeline.text.detokenize import ByteDecoder, IncrementalDecoder, WindowDecoder
from ridgeline.text.sentencepiece import SPACE

# Characters from which on a text is encoded without the interpreter's lock: `encode` holds it (0.45 us a character, so
# that a text of a million would stop every other thread for half a second), `encode_batch_fast` does not, and costs
# 10 us more.
LONG_TEXT = 2000


def load_tokenizer(path: Path, *, override: str | None = None) -> Tokenizer:
    """The tokenizer of a model: a folder, a .gguf file, a tokenizer.json or a tokenizer.model.

    `override` is the path of another tokenizer to use instead. Raises ModelNotFound, CorruptFile or UnsupportedModel,
    each naming the file.
    """
    # These modules build Tokenizers, so they import this one.
    from ridgeline.text.folder import load_folder_tokenizer
    from ridgeline.text.gguf_tokenizer import load_gguf_tokenizer

    path = Path(path if override is None else override)
    if path.suffix == ".gguf":
        return load_gguf_tokenizer(path)
    return load_folder_tokenizer(path)


class Tokenizer:
    """A tokenizer with its special tokens and chat templates.

    `vocab_size` counts the tokens, added ones included; a model's embedding may have more rows. An id without a token
    contributes nothing to the text. `also_special` names added tokens that are special although the vocabulary file
    does not flag them. Safe to use from several threads.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        also_special: Iterable[str] = (),
        source: str = "",
    ) -> None:
        self._backend = backend
        self._plain: Backend | None = None
        self._lock = threading.Lock()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.named_tokens = dict(named_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.source = source
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        also = set(also_special)
        self._special = frozenset(
            index for index, token in added.items() if token.special or token.content in also)
        self.special_tokens = {self._added[index]: index for index in sorted(self._special)}
        self.vocab_size = max(backend.get_vocab_size(), max(self._added, default=-1) + 1)
        self._rules = _decoding_rules(backend)
        self._bytes: dict[int, bytes] = {}

    @property
    def has_fixed_bytes(self) -> bool:
        """Whether a token stands for the same bytes wherever it is."""
        return self._rules is not None

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if the model has one."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text.

        `add_special_tokens` adds what the model expects around a text (beginning of sequence, ...). With
        `parse_special` the spelling of a special token in the text becomes that token; without, it stays plain text.
        Raises InvalidPrompt for anything that is not valid Unicode text.
        """
        if not isinstance(text, str):
            raise InvalidPrompt(f"the prompt is {type(text).__name__}; expected str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt(f"the prompt is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} "
                                f"at character {error.start}") from error
        backend = self._backend if parse_special else self._plain_backend()
        if len(text) < LONG_TEXT:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _plain_backend(self) -> Backend:
        """The same tokenizer with the switch set that reads special tokens as plain text; it belongs to the backend."""
        with self._lock:
            if self._plain is None:
                self._plain = Backend.from_str(self._backend.to_str())
                self._plain.encode_special_tokens = True
            return self._plain

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids. Bytes that are no UTF-8 become U+FFFD."""
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(list(ids)) + decoder.flush()

    def decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A fresh incremental decoder."""
        rules = self._rules
        if rules is None:
            return WindowDecoder(
                partial(self._backend.decode, skip_special_tokens=False),
                skip=lambda id: (skip_special_tokens and id in self._special) or self._spelling(id) is None,
            )
        skip = self.is_special if skip_special_tokens else None
        first = self._first_bytes if rules.strip == "first token" else None
        return ByteDecoder(self.token_bytes, strip_space=rules.strip == "space", first_bytes_of=first, skip=skip)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token contributes to the text; a special token gives its own spelling.

        For tokenizers whose tokens depend on their neighbours: the bytes of the token decoded alone.
        """
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._find_bytes(id)
        return found

    def token_text(self, id: int) -> str:
        """A token for display; bytes that are not whole characters are shown as U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary."""
        index = self._backend.token_to_id(token)
        return None if index is None else int(index)

    def is_special(self, id: int) -> bool:
        return id in self._special

    def _spelling(self, id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without a token."""
        if not 0 <= id < 1 << 32:
            return None
        spelling = self._added.get(id)
        return self._backend.id_to_token(id) if spelling is None else spelling

    def _find_bytes(self, id: int) -> bytes:
        spelling = self._spelling(id)
        if spelling is None:
            return b""
        if self._rules is None:
            return str(self._backend.decode([id], skip_special_tokens=False)).encode()
        if id in self._special:
            return spelling.encode()
        return self._rules.bytes_of(spelling, added=id in self._added)

    def _first_bytes(self, id: int) -> bytes:
        spelling = self._spelling(id)
        if spelling is None or id in self._special:
            return self.token_bytes(id)
        return spelling.replace(SPACE, "").encode()


@dataclass(frozen=True)
class _Rules:
    """How the spelling of a token becomes bytes, read from the backend's decoder."""

    byte_level: bool = False
    byte_fallback: bool = False
    spaces: bool = False     # U+2581 stands for a space
    strip: str = ""          # "space": one space at the start of the text; "first token": all of the first token's

    def bytes_of(self, spelling: str, *, added: bool) -> bytes:
        if self.byte_level:
            if added:
                return spelling.encode()
            mapped = [_BYTE_OF.get(character) for character in spelling]
            return spelling.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if self.byte_fallback and len(spelling) == 6 and spelling.startswith("<0x") and spelling[5] == ">":
            try:
                return bytes([int(spelling[3:5], 16)])
            except ValueError:
                pass  # a token that only looks like a byte
        return (spelling.replace(SPACE, " ") if self.spaces else spelling).encode()


def _decoding_rules(backend: Backend) -> _Rules | None:
    """The rules of this backend's decoder; None if tokens have no fixed bytes."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = tuple(step["type"] for step in steps)
    space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip_one = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds in (("ByteLevel",), ("ByteLevel", "Fuse")):
        return _Rules(byte_level=True)
    if kinds == ("Metaspace",) and steps[0]["replacement"] == SPACE:
        stripped = steps[0].get("prepend_scheme", "always") != "never"
        return _Rules(spaces=True, strip="first token" if stripped else "")
    if kinds[:3] == ("Replace", "ByteFallback", "Fuse") and steps[0] == space and steps[3:] in ([], [strip_one]):
        return _Rules(byte_fallback=True, spaces=True, strip="space" if steps[3:] else "")
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins to bytes: printable Latin-1 is itself, the rest counts up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def wrap_with(backend: Backend, bos: int | None, eos: int | None) -> None:
    """Make `backend` put these tokens around a text when it adds special tokens."""
    parts: Sequence[Any] = [bos, eos]
    spelled = [None if index is None else backend.id_to_token(index) for index in parts]
    single = [*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[
            {"id": label, "ids": [index], "tokens": [token]}
            for label, index, token in zip(("bos", "eos"), parts, spelled) if index is not None
        ],
    )
