"""Data that crosses module borders. No torch here, so that the command line starts quickly.

State specifications are what a model declares per layer (`model.state_spec()`) and what the cache store builds from.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from ridgeline.grammar.base import Grammar
    from ridgeline.sampling_params import SamplingParams

TARGET = "target"
T = TypeVar("T")


class Beginning(Sequence[T]):
    """The first items of a list that only grows: to take one costs the same however long the list is."""

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[T]):
        self._items, self._length = items, len(items)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._items[start:stop:step] if step > 0 else [self._items[i] for i in range(start, stop, step)]
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} of {self._length} items")
        return self._items[index % self._length]

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._length)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, (list, Beginning)) and list(self) == list(other)

    __hash__ = None                                      # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one softmax-attention layer, one row a token.

    heads: KV heads; key_dim, value_dim: width of one head; window: keys a query sees, itself included (None = all).
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def elements_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Recurrent:
    """State of fixed size: for each named tensor its shape for one sequence and its dtype (a torch dtype's name)."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Shared:
    """This layer keeps nothing of its own; it reads the cache of `layer` in the model that plays `role`."""

    role: str
    layer: int


LayerState = PagedKV | Recurrent | Shared


class FinishReason(StrEnum):
    STOP = "stop"          # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"      # max_tokens or the context is used up
    ABORT = "abort"        # the caller went away
    ERROR = "error"        # this request failed; `error` says why


@dataclass
class TokenLogprobs:
    """Log-probability of one token under the unprocessed distribution, its rank (1 = most likely) and the best k."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class RequestMetrics:
    """Times in seconds on the monotonic clock of the engine's process; None until the event has happened."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    target_steps: int = 0
    token_times: Sequence[float] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival

    @property
    def itl_s(self) -> list[float]:
        """One value a token after the first: a step with k tokens, D seconds after the last, gives k values D/k."""
        gaps: list[float] = []
        times, i = self.token_times, 1
        while i < len(times):
            j = i
            while j + 1 < len(times) and times[j + 1] == times[i]:
                j += 1
            if times[i] > times[i - 1]:
                gaps += [(times[i] - times[i - 1]) / (j - i + 1)] * (j - i + 1)
            i = j + 1
        return gaps

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - tokens that came together with the first)."""
        if self.first_token is None or self.last_token is None:
            return None
        together = sum(1 for t in self.token_times if t == self.first_token)
        rest = len(self.token_times) - together
        return (self.last_token - self.first_token) / rest if rest else None


@dataclass
class EngineRequest:
    """One prompt and what is wanted of it, already tokenised. `request_id` is unique among live requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    strategy: str | None = None    # name in the engine's strategies; None = the engine's default
    arrival: float | None = None
    grammar: Grammar | None = None    # of params.structured_outputs, compiled


@dataclass
class StepOutput:
    """What one engine step adds to one sample of a request."""

    request_id: str
    index: int
    new_tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: Exception | None = None
    metrics: RequestMetrics | None = None
    embedding: list[float] | None = None


@dataclass(frozen=True)
class Logprob:
    """One token as people and programs read it. `bytes` are exact; `token` shows incomplete characters as U+FFFD."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int
    top: tuple[Logprob, ...] = ()


@dataclass
class CompletionOutput:
    """One sample. stop_reason: the stop string or token id that ended it.

    pieces: what `text` is made of; delta: what was added to `text` since the caller last took it. In a stream the sequences
    are views of what goes on growing; those of a request that has finished are lists.
    """

    index: int
    pieces: Sequence[str] = field(default_factory=list)
    token_ids: Sequence[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[Logprob] | None = None
    metrics: RequestMetrics | None = None
    delta: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def __repr__(self) -> str:
        return (f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
                f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})")


@dataclass
class RequestOutput:
    """The answer to one prompt: whole, or in a stream as far as it is known. `error` is set when it failed.

    embedding: the prompt's pooled final hidden states, of the strategies embed_last and embed_mean.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: Sequence[Logprob | None] | None = None
    error: Exception | None = None
    embedding: list[float] | None = None

    @property
    def metrics(self) -> RequestMetrics:
        """Of the first sample; before it was first scheduled, an empty record."""
        return self.outputs[0].metrics or RequestMetrics(arrival=0.0, prompt_tokens=len(self.prompt_token_ids))

    def take(self) -> RequestOutput:
        """A copy that no longer changes, with the deltas so far; the next ones begin here.

        Costs the same however much has been said, so that a long stream is not slower than a short one.
        """
        taken = replace(self, outputs=[])
        for sample in self.outputs:
            copy = replace(sample, metrics=sample.metrics and replace(sample.metrics))
            if not self.finished:                        # else nothing grows any more
                copy.pieces, copy.token_ids = _so_far(sample.pieces), _so_far(sample.token_ids)
                copy.logprobs = None if sample.logprobs is None else _so_far(sample.logprobs)
                if copy.metrics is not None:
                    copy.metrics.token_times = _so_far(copy.metrics.token_times)
            taken.outputs.append(copy)
            sample.delta = ""
        return taken


def _so_far(items: Sequence[T]) -> Sequence[T]:
    return Beginning(items) if isinstance(items, list) else items
