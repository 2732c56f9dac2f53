"""No token at all: the prompt is run for its hidden states, which become one vector (max_tokens 0)."""
from __future__ import annotations

from ridgeline.decoding.base import Commit, Hidden, Run, SequenceView, Steps, Strategy

POOLINGS = ("last", "mean")


class Embed(Strategy):
    """pooling: the last row of the final hidden states, or the mean of all rows."""

    scores = True
    reuse_prefix = False       # a row that the target does not run gives no hidden state

    def __init__(self, pooling: str = "last"):
        if pooling not in POOLINGS:
            raise TypeError(f"pooling is {pooling!r}; valid: {', '.join(POOLINGS)}")
        self.pooling = pooling

    def lookahead(self) -> int:
        return 0

    def run(self, seq: SequenceView) -> Steps:
        out = yield Run(self.target, seq.pending(self.target), want=(Hidden(),))
        assert out.hidden is not None
        yield Commit((), embedding=out.hidden.take([-1]) if self.pooling == "last" else out.hidden.mean())
