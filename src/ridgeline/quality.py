"""How well a model predicts a text, alone or against a reference: the meter that every optimisation quotes.

The text runs through the engine itself, cache, chunks and kernels included, so what is measured is what is served.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.decoding.base import Commit, Hidden, Run, SequenceView, Steps, Strategy
from ridgeline.errors import ConfigError, InvalidPrompt
from ridgeline.llm import LLM
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import EngineRequest

ROWS = 64                # rows of logits held at once: 64 x 262,144 in fp32 are 67 MB


@dataclass(frozen=True)
class Quality:
    """tokens: scored tokens; perplexity: exp of their mean negative log-probability.

    Against a reference also its perplexity, KL(reference || model) a token in nats (mean and 99th percentile) and the
    share of tokens where both find the same token most likely.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    mean_kl: float | None = None
    p99_kl: float | None = None
    top1_agreement: float | None = None


class _Collect(Strategy):
    """Runs a text through the target and keeps the final hidden state of every token."""

    reuse_prefix = False     # every row is wanted
    scores = True

    def __init__(self) -> None:
        self.hidden: Tensor | None = None

    def lookahead(self) -> int:
        return 0

    def run(self, seq: SequenceView) -> Steps:
        out = yield Run(self.target, seq.pending(self.target), want=(Hidden(),))
        assert out.hidden is not None
        self.hidden = out.hidden.tensor
        yield Commit(())


def measure(llm: LLM, text: str, *, reference: LLM | None = None, context: int | None = None, stride: int | None = None,
            on_progress: Callable[[int, int], None] | None = None) -> Quality:
    """Score `text` in windows of `context` tokens that advance by `stride`; each token is scored once.

    A token's context is everything before it in its window, so at least context - stride tokens after the first
    window. A model whose texts begin with a beginning-of-text token sees one at the start of every window; it counts
    as context and is not scored. raises InvalidPrompt for a text with no token to score, ConfigError for sizes that do
    not fit.
    """
    if llm.tokenizer is None:
        raise ConfigError("perplexity is measured on a text, and this model has no tokenizer; name one with --tokenizer")
    ids = llm.tokenizer.encode(text)
    longest = min(m.engine.max_model_len for m in (llm, reference) if m is not None)
    context = min(longest, 2048) if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if not 2 <= context <= longest:
        raise ConfigError(f"context is {context}; valid: 2 to {longest} (the models' context)")
    if not 1 <= stride < context:
        raise ConfigError(f"stride is {stride}; valid: 1 to {context - 1} (less than the context)")
    if len(ids) < 2:
        raise InvalidPrompt(f"the text has {len(ids)} tokens; at least 2 are needed, one to predict from the other")
    if reference is not None and reference.tokenizer is not None and reference.tokenizer.encode(text) != ids:
        raise ConfigError("the reference splits the text into other tokens; both models need the same tokenizer")
    nll: list[Tensor] = []
    reference_nll: list[Tensor] = []
    kl: list[Tensor] = []
    agree = 0
    begin = ids[:1] if ids[:1] == [llm.tokenizer.bos_token_id] else []
    total = len(ids) - 1
    for window, first in windows(ids, context, stride, begin):
        rows = range(first - 1, len(window) - 1)          # the row before each scored token
        hidden, other = hidden_states(llm, window), None if reference is None else hidden_states(reference, window)
        for a in range(rows.start, rows.stop, ROWS):
            b = min(a + ROWS, rows.stop)
            following = torch.tensor(window[a + 1:b + 1])[:, None]
            logp = log_probs(llm, hidden[a:b])                                              # (rows, V)
            nll.append(-logp.gather(1, following)[:, 0])
            if reference is not None and other is not None:
                logq = log_probs(reference, other[a:b])
                reference_nll.append(-logq.gather(1, following)[:, 0])
                kl.append((logq.exp() * (logq - logp)).sum(-1))
                agree += int((logq.argmax(-1) == logp.argmax(-1)).sum())
        if on_progress is not None:
            on_progress(sum(map(len, nll)), total)
    scored = torch.cat(nll)
    if reference is None:
        return Quality(len(scored), math.exp(scored.mean()))
    divergence = torch.cat(kl).clamp(min=0)               # rounding can leave -1e-9
    return Quality(len(scored), math.exp(scored.mean()), math.exp(torch.cat(reference_nll).mean()),
                   float(divergence.mean()), float(torch.quantile(divergence, 0.99)), agree / len(scored))


def windows(ids: Sequence[int], context: int, stride: int, begin: Sequence[int] = ()) -> Iterator[tuple[list[int], int]]:
    """(tokens of the window, index of the first token that it scores). begin: what `ids` and every window begin with."""
    lead = len(begin)
    start, scored = 0, 1                 # in ids; a window from n > 0 on has `begin` in place of ids[n:n + lead]
    while scored < len(ids):
        end = min(start + context, len(ids))
        yield [*begin, *ids[start + lead:end]], scored - start
        scored = end
        start += stride


def hidden_states(llm: LLM, ids: list[int]) -> Tensor:
    collect = _Collect()
    engine = llm.engine
    engine.strategies["collect"] = collect
    engine.add_request(EngineRequest("quality", ids, SamplingParams(max_tokens=0, echo=True), strategy="collect"))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
    assert collect.hidden is not None
    return collect.hidden


@torch.inference_mode()
def log_probs(llm: LLM, hidden: Tensor) -> Tensor:
    """(rows, hidden) -> (rows, vocabulary) in fp64 on the CPU."""
    # In fp64: a sum over 262,144 fp32 terms would itself be off by more than the differences that count.
    return torch.log_softmax(llm.loaded.model.logits(hidden).double(), -1).cpu()
