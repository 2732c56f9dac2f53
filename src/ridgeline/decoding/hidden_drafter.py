"""A tiny drafter that reads the target's hidden states and so needs only a layer or two. arXiv 2401.15077 (EAGLE).

The drafter's row at position i is fed with token i and the target's hidden state of position i - 1. Rows drafted with
the drafter's own hidden states are run again with the target's once these are known.
"""
from __future__ import annotations

from ridgeline.decoding.base import Commit, Hidden, Rows, Run, Sample, SequenceView, Steps, Strategy, Verify
from ridgeline.noise import Purpose
from ridgeline.types import TARGET


class HiddenDrafter(Strategy):
    """k: tokens drafted a step. Drafts are greedy, so the target's own draw decides and nothing is lost."""

    reuse_prefix = False       # a row that the target does not run gives no hidden state to feed

    def __init__(self, k: int = 3, draft: str = "draft", target: str = TARGET):
        self.k, self.draft, self.roles = k, draft, (target, draft)

    def lookahead(self) -> int:
        return self.k

    def run(self, seq: SequenceView) -> Steps:
        wants = (Sample(purpose=Purpose.DRAFT, greedy=True), Hidden())
        known: Rows | None = None      # hidden states of the target's last kept rows
        start = 0                      # where the drafter's rows fed with true hidden states end
        while not seq.done:
            drafts: list[int] = []
            if known is not None:
                feed, tokens, at = known, seq.tokens[start:], start
                start = len(seq.tokens)
                for _ in range(min(self.k, seq.remaining - 1)):
                    out = yield Run(self.draft, tokens, at=at, feed=feed, want=wants)
                    drafts.append(out.token)
                    assert out.hidden is not None
                    feed, tokens, at = out.hidden.take([-1]), drafts[-1:], start + len(drafts) - 1
            pending = seq.pending(self.target)
            out = yield Run(self.target, [*pending, *drafts], want=(Verify(tuple(drafts)), Hidden()))
            assert out.hidden is not None
            yield Commit(out.tokens, out.keep, out.logprobs, drafted=len(drafts))
            known = out.hidden.take(out.keep)
