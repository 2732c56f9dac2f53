"""Text from token ids, a few at a time, exactly as if they had been decoded at once.

A token is a piece of bytes, not of text: a character may begin in one token and end three tokens later. `ByteDecoder`
holds such bytes back until the character is whole. Its one rule about spaces is that of SentencePiece tokenizers,
which put a space in front of the text on the way in and take it off on the way out.
"""
from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class IncrementalDecoder(Protocol):
    """What `push` and finally `flush` return, concatenated, is `Tokenizer.decode` of all ids, however they are cut."""

    def push(self, ids: Sequence[int]) -> str:
        """The new text that is safe to show: whole characters only."""

    def flush(self) -> str:
        """The rest; the bytes of a character that never ended become U+FFFD. The decoder then starts afresh."""


class ByteDecoder:
    """For tokenizers whose ids stand for fixed bytes.

    `bytes_of(id)` gives a token's bytes, empty if it shows nothing; `strip_space` drops one space at the start of the
    text; `first_bytes_of` replaces `bytes_of` for the first token that is shown.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        *,
        strip_space: bool = False,
        first_bytes_of: Callable[[int], bytes] | None = None,
        skip: Callable[[int], bool] | None = None,
    ) -> None:
        self._bytes_of = bytes_of
        self._first_bytes_of = first_bytes_of or bytes_of
        self._strip_space = strip_space
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._no_token_yet = True
        self._no_text_yet = True

    def push(self, ids: Sequence[int]) -> str:
        data = bytearray()
        for index in ids:
            if self._skip is not None and self._skip(index):
                continue
            data += self._first_bytes_of(index) if self._no_token_yet else self._bytes_of(index)
            self._no_token_yet = False
        return self._show(self._utf8.decode(bytes(data)))

    def flush(self) -> str:
        text = self._show(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._no_token_yet = self._no_text_yet = True
        return text

    def _show(self, text: str) -> str:
        if text and self._no_text_yet:
            self._no_text_yet = False
            if self._strip_space and text[0] == " ":
                return text[1:]
        return text


class WindowDecoder:
    """For tokenizers where a token's text depends on its neighbours (WordPiece and the like).

    Decodes a window of the latest tokens before and after each new one and shows the difference. Ids are taken one
    by one, so the result does not depend on how they are cut; `Tokenizer.decode` goes the same way.
    """

    _HOLD = 4  # tokens; a UTF-8 character has at most four bytes, so a longer wait would be for nothing

    def __init__(self, decode: Callable[[list[int]], str], *, skip: Callable[[int], bool] | None = None) -> None:
        self._decode = decode
        self._skip = skip
        self._shown: list[int] = []   # the last tokens whose text is out: the left context
        self._held: list[int] = []    # tokens whose text may still change

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(index) for index in ids if self._skip is None or not self._skip(index))

    def _push_one(self, index: int) -> str:
        self._held.append(index)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._held) < self._HOLD:
            return ""
        if text:  # tokens that show nothing are no context for the next one
            self._shown = self._held
        self._held = []
        return text

    def _new_text(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)):]

    def flush(self) -> str:
        text = self._new_text() if self._held else ""
        self._shown, self._held = [], []
        return text
