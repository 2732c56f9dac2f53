"""One token a step."""
from __future__ import annotations

from ridgeline.decoding.base import Commit, Run, Sample, SequenceView, Steps, Strategy

_ONE = (Sample(),)


class Autoregressive(Strategy):
    def lookahead(self) -> int:
        return 0

    def run(self, seq: SequenceView) -> Steps:
        while not seq.done:
            out = yield Run(self.target, seq.pending(self.target), want=_ONE)
            yield Commit(out.tokens, logprobs=out.logprobs)
