"""A compiled grammar and the state of one sample in it, by llguidance."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import llguidance
import numpy as np

from ridgeline.errors import EngineError
from ridgeline.grammar.base import Mask


class LLGrammar:
    """start: a matcher that has seen nothing; it is only copied."""

    def __init__(self, start: llguidance.LLMatcher, vocab_size: int):
        self._start, self._words = start, (vocab_size + 31) // 32

    def matcher(self) -> LLState:
        return LLState(self._start.deep_copy(), self._words)


class LLState:
    """Follows an output: whatever it has consumed beyond what an output shares with the one before is rolled back, so that
    rejected drafts, the branches of a tree and a preempted sample need no care."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int):
        self._matcher, self._words = matcher, words
        self._consumed: list[int] = []
        self._mask: Mask | None = None                   # behind what is consumed, if it was made

    def mask(self, output: Sequence[int]) -> Mask | None:
        if not self._go_to(list(output)):
            return None
        if self._mask is None:
            mask = np.empty(self._words, dtype=np.uint32)  # (ceil(V / 32),)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
            self._mask = mask
        return self._mask

    def allows(self, output: Sequence[int], token: int) -> bool:
        # Not by the library's check of a token: where the text is forced, a mask has only its usual tokens, the check has all.
        mask = self.mask(output)
        return mask is None or bool(mask[token // 32] >> (token % 32) & 1)

    def _go_to(self, output: list[int]) -> bool:
        """Make `output` what has been consumed; False, with as much of it as possible, if the grammar refuses a token."""
        common = len(self._consumed)
        if self._consumed != output[:common]:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._consumed, output)))
            self._matcher.rollback(len(self._consumed) - common)
            self._check()
            self._mask = None
            del self._consumed[common:]
        rest = output[common:]
        if not rest:
            return True
        count = self._matcher.try_consume_tokens(rest)
        self._check()
        self._consumed += rest[:count]
        if count:
            self._mask = None
        return count == len(rest)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"structured_outputs: the grammar cannot be followed any further: {self._matcher.get_error()}")
