"""What a request asks of sampling and of the end of its output. Plain data, checked once, no torch.

Field names and defaults are vLLM's, so that requests move over unchanged.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

from ridgeline.errors import InvalidParams
from ridgeline.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; raises `InvalidParams` for a wrong value or a contradiction.

    Sequences are normalised to tuples, integers given for floats to floats, and a single `stop` string to a tuple of
    one. Copy with `dataclasses.replace`, which checks again.
    """

    # The distribution
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    repetition_penalty: float = 1.0  # of tokens in prompt or output; 1: off
    presence_penalty: float = 0.0  # of tokens in the output, once
    frequency_penalty: float = 0.0  # of tokens in the output, per occurrence
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    bad_words: Sequence[str] = ()  # turned into bad_words_token_ids where a tokenizer is at hand
    seed: int | None = None
    n: int = 1
    # The end of the output
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16  # None: up to the context length
    # What comes back
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    echo: bool = False
    detokenize: bool = True
    # The form of the output: one of json, json_object, regex, choice, grammar; a mapping is checked and converted
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    # Handling
    priority: int = 0  # lower is served earlier
    cache_salt: str = ""  # prompts share cached prefixes only with prompts of the same salt

    @property
    def greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0.0

    def __post_init__(self) -> None:
        number, integer = self._number, self._integer
        number("temperature", "a finite number >= 0 (0 is greedy)", lambda v: v >= 0)
        number("top_p", "a number in (0, 1]", lambda v: 0 < v <= 1)
        number("min_p", "a number in [0, 1]", lambda v: 0 <= v <= 1)
        number("typical_p", "a number in (0, 1]", lambda v: 0 < v <= 1)
        number("repetition_penalty", "a finite number > 0 (1 is off)", lambda v: v > 0)
        number("presence_penalty", "a number in [-2, 2]", lambda v: -2 <= v <= 2)
        number("frequency_penalty", "a number in [-2, 2]", lambda v: -2 <= v <= 2)
        integer("top_k", "an integer >= 1, or 0 or -1 for off", lambda v: v >= -1)
        integer("n", "an integer >= 1", lambda v: v >= 1)
        integer("min_tokens", "an integer >= 0", lambda v: v >= 0)
        integer("priority", "an integer", lambda v: True)
        integer("max_tokens", "an integer >= 0 or None", lambda v: v >= 0, optional=True)
        integer("logprobs", "an integer >= 0 or None", lambda v: v >= 0, optional=True)
        integer("prompt_logprobs", "an integer >= 0 or None", lambda v: v >= 0, optional=True)
        integer("seed", "an integer of 64 bits or None", lambda v: -(2**63) <= v < 2**64, optional=True)
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "echo", "detokenize"):
            if not isinstance(getattr(self, field), bool):
                self._reject(field, "True or False")
        if not isinstance(self.cache_salt, str):
            self._reject("cache_salt", "a string")
        self._strings("stop")
        self._strings("bad_words")
        self._token_ids("stop_token_ids")
        self._token_ids("allowed_token_ids", optional=True)
        self._normalise_bad_words()
        self._normalise_bias()
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        self._check_combinations()

    def check_vocab(self, vocab_size: int) -> None:
        """Raises `InvalidParams` if a token id, or a number of log-probabilities, does not fit the vocabulary."""
        groups: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words_token_ids", (token for word in self.bad_words_token_ids for token in word)),
        )
        for field, tokens in groups:
            for token in tokens:
                if token >= vocab_size:
                    raise InvalidParams(
                        f"{field}: token id {token} is out of range; allowed: 0 to {vocab_size - 1} "
                        f"(the vocabulary has {vocab_size} tokens)"
                    )
        for field, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise InvalidParams(f"{field}: {count} is too large; allowed: 0 to {vocab_size} (the vocabulary)")

    # Checks of single fields. Each normalises the value, which a frozen dataclass allows only this way.

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _reject(self, field: str, allowed: str) -> NoReturn:
        value = getattr(self, field)
        raise InvalidParams(f"{field}: got {_show(value)}; allowed: {allowed}")

    def _number(self, field: str, allowed: str, valid: Callable[[float], bool]) -> None:
        value = _as_float(getattr(self, field))
        if value is None or not valid(value):
            self._reject(field, allowed)
        self._set(field, value)

    def _integer(
        self, field: str, allowed: str, valid: Callable[[int], bool], optional: bool = False
    ) -> None:
        value = getattr(self, field)
        if optional and value is None:
            return
        if not _is_int(value) or not valid(int(value)):
            self._reject(field, allowed)
        self._set(field, int(value))

    def _strings(self, field: str) -> None:
        value: Any = getattr(self, field)
        if value is None:
            value = ()
        elif isinstance(value, str):
            value = (value,)
        elif not _is_list(value):
            self._reject(field, "a string or a sequence of strings")
        if not all(isinstance(item, str) and item for item in value):
            self._reject(field, "strings that are not empty")
        self._set(field, tuple(value))

    def _token_ids(self, field: str, optional: bool = False) -> None:
        value: Any = getattr(self, field)
        if value is None:
            if not optional:
                self._set(field, ())
            return
        ids = _as_token_ids(value)
        if ids is None:
            self._reject(field, "a sequence of token ids (integers >= 0)")
        if optional and not ids:
            self._reject(field, "at least one token id, or None for no restriction")
        self._set(field, ids)

    def _normalise_bad_words(self) -> None:
        value: Any = () if self.bad_words_token_ids is None else self.bad_words_token_ids
        words = [_as_token_ids(word) for word in value] if _is_list(value) else [None]
        if not all(words):  # neither None nor an empty word
            self._reject("bad_words_token_ids", "a sequence of sequences of token ids (integers >= 0), none empty")
        self._set("bad_words_token_ids", tuple(words))

    def _normalise_bias(self) -> None:
        if self.logit_bias is None:
            return
        value: Any = self.logit_bias
        bias: dict[int, float] = {}
        allowed = "a mapping of token ids (integers >= 0) to finite numbers"
        if not isinstance(value, Mapping):
            self._reject("logit_bias", allowed)
        for token, number in value.items():
            amount = _as_float(number)
            if not _is_int(token) or token < 0 or amount is None:
                raise InvalidParams(f"logit_bias: got {_show(token)}: {_show(number)}; allowed: {allowed}")
            bias[int(token)] = amount
        self._set("logit_bias", bias)

    def _check_combinations(self) -> None:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidParams(
                "max_tokens: got 0 with neither echo nor prompt_logprobs, so nothing would come back; "
                "allowed: an integer >= 1, or 0 to score a prompt with echo=True or prompt_logprobs"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(
                f"min_tokens: got {self.min_tokens} with max_tokens {self.max_tokens}; "
                "allowed: min_tokens <= max_tokens"
            )
        if self.stop and not self.detokenize:
            raise InvalidParams(
                f"stop: got {_show(self.stop)} with detokenize=False, so there is no text to look in; "
                "allowed: detokenize=True, or stop_token_ids"
            )
        if self.allowed_token_ids is not None:
            banned = {word[0] for word in self.bad_words_token_ids if len(word) == 1}
            if self.min_tokens:
                banned |= set(self.stop_token_ids)
            if banned.issuperset(self.allowed_token_ids):
                raise InvalidParams(
                    f"allowed_token_ids: got {_show(self.allowed_token_ids)}, each of which is a bad word or, with "
                    f"min_tokens {self.min_tokens}, a stop token; allowed: at least one id that can be sampled"
                )


def _is_int(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _as_float(value: object) -> float | None:
    """A finite float, or None. A bool is no number, a numeric string neither."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a float
        return None
    return number if math.isfinite(number) else None


def _as_token_ids(value: Any) -> tuple[int, ...] | None:
    """Ids >= 0 as plain integers, or None if `value` is anything else."""
    if not _is_list(value):
        return None
    items = tuple(value)
    if not all(_is_int(item) and item >= 0 for item in items):
        return None
    return tuple(int(item) for item in items)


def _show(value: object) -> str:
    """`repr`, shortened so that a message stays one readable line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
