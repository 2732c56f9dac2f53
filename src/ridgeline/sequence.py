"""One sample of one request while it lives in the engine."""
from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from ridgeline.cache.store import CacheStore
from ridgeline.decoding.base import Run, Steps, Strategy
from ridgeline.sampling import narrow
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import EngineRequest, FinishReason, RequestMetrics, TokenLogprobs


class Sequence:
    """Tokens, progress and metrics. Strategies see it as `SequenceView`; only the engine changes it.

    run, offset: the run that waits for execution and how many of its tokens are done.
    """

    def __init__(self, request: EngineRequest, index: int, seed: int, strategy: Strategy, store: CacheStore, *,
                 arrival: float, order: int, max_model_len: int, eos_token_ids: tuple[int, ...]):
        params = request.params
        # One sample tells the prompt's log-probabilities for all of them.
        self.params = params if index == 0 else replace(params, prompt_logprobs=None, echo=params.max_tokens == 0)
        self.request_id, self.index, self.seed, self.strategy, self.store = request.request_id, index, seed, strategy, store
        self.id = f"{request.request_id}/{index}"
        self.prompt = request.prompt_token_ids
        self.tokens = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.arrival, self.order = arrival, order
        self.max_len = min(max_model_len, self.prompt_len + (max_model_len if params.max_tokens is None
                                                             else params.max_tokens))
        self.eos_token_ids = eos_token_ids
        # Follows the committed tokens, so a preemption leaves it alone.
        self.matcher = None if request.grammar is None else request.grammar.matcher()
        self.memory: dict[str, Any] = {}
        self.token_times: list[float] = []
        self.metrics = RequestMetrics(arrival=arrival, prompt_tokens=self.prompt_len, token_times=self.token_times)
        self.parent: Sequence | None = None          # the sample that runs the common prompt
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.error: Exception | None = None
        self.embedding: list[float] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.new_tokens: list[int] = []
        self.new_logprobs: list[TokenLogprobs] = []
        self.resident = False                        # known to the cache store
        self.steps: Steps | None = None
        self.run: Run | None = None
        self.offset = 0
        self.hidden: list[Any] = []                  # hidden rows of the run's slices so far

    # What a strategy sees.

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        return self.max_len - len(self.tokens)

    def held(self, role: str) -> int:
        return self.store.held(self.id, role)

    def pending(self, role: str) -> list[int]:
        return self.tokens[self.store.held(self.id, role):]

    # What the scheduler, the engine and the runner see.

    @property
    def target(self) -> str:
        return self.strategy.roles[0]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @cached_property
    def needs_history(self) -> bool:
        """Whether some processor reads the tokens so far."""
        p = self.params
        return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty or p.bad_words_token_ids
                    or p.min_tokens)

    @cached_property
    def plain_masks(self) -> bool:
        """Whether nothing changes the order of the logits, and nobody asks for them."""
        p = self.params
        return not self.needs_history and not p.logit_bias and p.allowed_token_ids is None and p.logprobs is None

    @cached_property
    def few_logits(self) -> bool:
        """Whether a few of the largest logits, and those that a processor touches, decide."""
        return self.params.logprobs is None and (self.params.greedy or narrow(self.params))

    @cached_property
    def greedy_params(self) -> SamplingParams:
        return self.params if self.params.greedy else replace(self.params, temperature=0.0)

    def wanted_rows(self) -> tuple[int, int]:
        """(fewest rows with which a step gets this sequence any further, most it can use)."""
        ahead, align = self.strategy.lookahead(), self.strategy.align
        held = self.store.held(self.id, self.target) if self.resident else 0
        most = len(self.tokens) - held + ahead
        if self.run is None:
            return min(most, ahead + align), most
        left, align = len(self.run.tokens) - self.offset, self.run.align
        return left if left < self.run.tail + align else align, max(left, most)

    def slice_end(self, rows: int) -> int:
        """Where a slice of at most `rows` tokens of the run may end: index into the run, `offset` if nowhere."""
        assert self.run is not None
        n, align = len(self.run.tokens), self.run.align
        if n - self.offset <= rows:
            return n
        end = min(self.offset + rows, n - self.run.tail)
        if align > 1:
            start = self.store.length(self.id, self.run.role) - self.offset if self.run.at is None else self.run.at
            end -= (start + end) % align
        return max(end, self.offset)

    def restart(self) -> None:
        """Forget everything that the committed tokens do not tell; after a preemption the strategy starts again."""
        if self.steps is not None:
            self.steps.close()
        self.steps, self.run, self.offset, self.hidden, self.resident = None, None, 0, [], False
