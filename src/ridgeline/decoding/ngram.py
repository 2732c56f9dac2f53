"""Prompt look-up: what followed the last time these tokens occurred. Costs nothing but the rows to verify.

The longest suffix of the sequence that occurred before is found and what followed it is proposed (arXiv 2304.04487).
"""
from __future__ import annotations

from collections.abc import Sequence

from ridgeline.decoding.base import Commit, Run, SequenceView, Steps, Strategy, Verify


class NGram(Strategy):
    """k: tokens proposed a step; longest, shortest: lengths of the suffix that is looked up."""

    def __init__(self, k: int = 4, longest: int = 4, shortest: int = 1):
        self.k, self.longest, self.shortest = k, longest, shortest

    def lookahead(self) -> int:
        return self.k

    def run(self, seq: SequenceView) -> Steps:
        while not seq.done:
            k = min(self.k, seq.remaining - 1)
            drafts = next(iter(continuations(seq.tokens, k, self.longest, self.shortest, 1)), ())
            out = yield Run(self.target, [*seq.pending(self.target), *drafts], want=(Verify(drafts),))
            yield Commit(out.tokens, out.keep, out.logprobs, drafted=len(drafts))


def continuations(tokens: Sequence[int], k: int, longest: int, shortest: int, branches: int) -> list[tuple[int, ...]]:
    """Up to `branches` continuations of at most k tokens with different first tokens, longest and latest match first."""
    found: dict[int, tuple[int, ...]] = {}
    if k <= 0:
        return []
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[len(tokens) - size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start] == suffix[0] and tokens[start:start + size] == suffix:
                follow = tuple(tokens[start + size:start + size + k])
                found.setdefault(follow[0], follow)
                if len(found) == branches:
                    return list(found.values())
    return list(found.values())
