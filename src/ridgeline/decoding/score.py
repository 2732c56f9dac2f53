"""No token at all: the prompt is run for its log-probabilities (max_tokens 0)."""
from __future__ import annotations

from ridgeline.decoding.base import Commit, Run, SequenceView, Steps, Strategy


class Score(Strategy):
    scores = True

    def lookahead(self) -> int:
        return 0

    def run(self, seq: SequenceView) -> Steps:
        yield Run(self.target, seq.pending(self.target))
        yield Commit(())
