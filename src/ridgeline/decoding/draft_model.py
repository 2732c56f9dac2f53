"""A smaller model drafts, the target verifies all its tokens in one pass. arXiv 2211.17192, 2302.01318."""
from __future__ import annotations

from ridgeline.decoding.base import Commit, Rows, Run, Sample, SequenceView, Steps, Strategy, Verify
from ridgeline.noise import Purpose
from ridgeline.types import TARGET


class DraftModel(Strategy):
    """k: tokens drafted a step. Sampled drafts keep their distribution q; greedy ones need none."""

    def __init__(self, k: int = 4, draft: str = "draft", target: str = TARGET):
        self.k, self.draft, self.roles = k, draft, (target, draft)

    def lookahead(self) -> int:
        return self.k

    def run(self, seq: SequenceView) -> Steps:
        sampled = not seq.params.greedy
        want = Sample(purpose=Purpose.DRAFT, keep_q=sampled)
        while not seq.done:
            drafts: list[int] = []
            q: list[Rows] = []
            # The prompt passes through the target first: drafting before it would only delay the first token.
            k = min(self.k, seq.remaining - 1) if len(seq.tokens) > seq.prompt_len else 0
            for _ in range(k):
                out = yield Run(self.draft, [*seq.pending(self.draft), *drafts[-1:]], want=(want,))
                drafts.append(out.token)
                if sampled:
                    assert out.q is not None
                    q.append(out.q)
            verify = Verify(tuple(drafts), tuple(q) if q else None)
            out = yield Run(self.target, [*seq.pending(self.target), *drafts], want=(verify,))
            yield Commit(out.tokens, out.keep, out.logprobs, drafted=k)
