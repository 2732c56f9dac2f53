"""Block diffusion: the tokens of a block are revealed over a few steps, in the order of confidence.

Masked positions of the block see each other and everything before it. A finished block is final: its keys are written
by the forward pass over the final tokens, which is the first pass of the next block as well. arXiv 2503.09573, 2510.06303.
"""
from __future__ import annotations

from ridgeline.decoding.base import Commit, Run, Sample, SequenceView, Steps, Strategy
from ridgeline.errors import InvalidParams
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import TARGET, TokenLogprobs


class BlockDiffusion(Strategy):
    """block: positions a block; steps: passes a block at most; threshold: reveal every token above this probability.

    reveal="low_confidence" reveals a fixed share of the block each step, the most confident first;
    reveal="threshold" reveals all above `threshold`, and that share at least.
    """

    def __init__(self, mask_token: int, block: int = 4, steps: int | None = None, reveal: str = "threshold",
                 threshold: float = 0.9, target: str = TARGET):
        self.mask_token, self.align, self.roles = mask_token, block, (target,)
        self.steps, self.reveal, self.threshold = steps or block, reveal, threshold
        self.domain = f"block {block}"

    def lookahead(self) -> int:
        return self.align

    def check(self, params: SamplingParams) -> None:
        if params.prompt_logprobs is not None:
            raise InvalidParams("prompt_logprobs: not defined for block diffusion, whose rows see later tokens")
        if params.structured_outputs is not None:
            raise InvalidParams("structured_outputs: block diffusion does not write from left to right, so no grammar holds")

    def run(self, seq: SequenceView) -> Steps:
        size = self.align
        while not seq.done:
            start = len(seq.tokens) // size * size
            given = seq.tokens[start:]                            # the end of the prompt shares the first block
            block = given + [self.mask_token] * (size - len(given))
            masked = list(range(len(given), size))
            logprobs: dict[int, TokenLogprobs] = {}
            shares = _shares(len(masked), self.steps)
            for step, share in enumerate(shares):
                final = seq.tokens[seq.held(self.target):start]
                want = Sample(rows=tuple(len(final) + i for i in masked), shift=0, salt=step, confidence=True,
                              forbid=(self.mask_token,))
                out = yield Run(self.target, [*final, *block], write=len(final), see="block", align=size, want=(want,))
                order = sorted(range(len(masked)), key=lambda i: (-out.confidence[i], masked[i]))
                above = sum(c > self.threshold for c in out.confidence) if self.reveal == "threshold" else 0
                for i in order[:max(share, above)]:
                    block[masked[i]] = out.tokens[i]
                    if out.logprobs:
                        logprobs[masked[i]] = out.logprobs[i]
                masked = [i for i in masked if i not in {masked[j] for j in order[:max(share, above)]}]
                if not masked:
                    break
            yield Commit(block[len(given):], logprobs=[logprobs[i] for i in sorted(logprobs)], denoised=step + 1)


def _shares(tokens: int, steps: int) -> list[int]:
    """How many tokens each step reveals at least: equal shares, the remainder first."""
    steps = max(1, min(steps, tokens))
    return [tokens // steps + (i < tokens % steps) for i in range(steps)]
