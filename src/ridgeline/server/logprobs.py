"""Log-probabilities in the forms of the interfaces."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ridgeline.frontend import CONTEXT_TOKENS
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.types import Logprob

LEAST = -9999.0        # JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def chat_logprobs(entries: Sequence[Logprob], most: int, *, as_ids: bool) -> dict[str, Any]:
    """most: top_logprobs of the request."""
    def one(entry: Logprob) -> dict[str, Any]:
        token = f"token_id:{entry.token_id}" if as_ids else entry.token
        return {"token": token, "logprob": finite(entry.logprob), "bytes": list(entry.bytes)}

    return {"content": [{**one(entry), "top_logprobs": [one(top) for top in entry.top[:most]]} for entry in entries],
            "refusal": None}


def prompt_logprobs(entries: Sequence[Logprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt the actual one and the most likely, by id."""
    return [None if entry is None else {
        str(one.token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.token}
        for one in (entry, *entry.top)} for entry in entries]


class CompletionLogprobs:
    """The `logprobs` objects of one answer, piece by piece: text offsets go on where the last piece ended.

    A token that is no whole text is spelled `bytes:\\xe6\\xb5`, so that no two of the most likely share a name.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], most: int, *, echo: bool, skip_special: bool,
                 as_ids: bool):
        self._tokenizer, self._decoder = tokenizer, None if tokenizer is None else tokenizer.decoder(skip_special)
        self._most, self._as_ids, self._at = most, as_ids, 0
        if self._decoder is not None and not echo:
            self._decoder.push(prompt[-CONTEXT_TOKENS:])

    def piece(self, entries: Sequence[Logprob | None], tokens: Sequence[int]) -> dict[str, Any]:
        """entries: None for a first token of a prompt; tokens: their ids."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            if self._decoder is not None:
                self._at += len(self._decoder.push([token]))
        return {"text_offset": offsets,
                "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
                "tokens": [self._name(e) if e is not None else self._bare(t) for e, t in zip(entries, tokens)],
                "top_logprobs": [None if e is None else self._top(e) for e in entries]}

    def _top(self, entry: Logprob) -> dict[str, float]:
        return {self._name(one): finite(one.logprob) for one in (*entry.top[:self._most], entry)}

    def _bare(self, token: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._spell(self._tokenizer.token_bytes(token))

    def _name(self, entry: Logprob) -> str:
        return f"token_id:{entry.token_id}" if self._as_ids or self._tokenizer is None else self._spell(entry.bytes)

    @staticmethod
    def _spell(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
