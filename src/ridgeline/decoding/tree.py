"""Two guesses at once: a tree of look-up continuations verified in one pass under an ancestor mask. arXiv 2305.09781."""
from __future__ import annotations

from ridgeline.decoding.base import Commit, Run, SequenceView, Steps, Strategy, Verify
from ridgeline.decoding.ngram import continuations


class LookupTree(Strategy):
    """branches: continuations with different first tokens; k: tokens in each."""

    def __init__(self, k: int = 3, branches: int = 2, longest: int = 4, shortest: int = 1):
        self.k, self.branches, self.longest, self.shortest = k, branches, longest, shortest

    def lookahead(self) -> int:
        return self.k * self.branches

    def run(self, seq: SequenceView) -> Steps:
        while not seq.done:
            k = min(self.k, seq.remaining - 1)
            pending = seq.pending(self.target)
            parents = list(range(-1, len(pending) - 1))           # the pending tokens are a chain
            drafts: list[int] = []
            for branch in continuations(seq.tokens, k, self.longest, self.shortest, self.branches):
                parents.append(len(pending) - 1)                  # every branch starts at the last pending token
                parents += range(len(parents) - 1, len(parents) + len(branch) - 2)
                drafts += branch
            out = yield Run(self.target, [*pending, *drafts], parents=tuple(parents), want=(Verify(tuple(drafts)),))
            yield Commit(out.tokens, out.keep, out.logprobs, drafted=len(drafts))
