"""The protocol between a decoding strategy and the engine.

A strategy is a generator. It yields a Run (what it wants run, on which model) and receives a Result; it yields a Commit
(what it keeps) and receives nothing. It never touches caches, batches or page tables; only tokens, counts and a few
scalars reach it. Whatever it must remember across a preemption can be rebuilt from the committed tokens, or lives in
`seq.memory`.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.noise import Purpose
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import TARGET, TokenLogprobs


class Rows:
    """Opaque handle to rows that stay on the device: distributions or hidden states. A strategy passes it on."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor):
        self.tensor = tensor            # (n, width); read by the runner only

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, indexes: Sequence[int]) -> Rows:
        return Rows(self.tensor[list(indexes)])

    def mean(self) -> Rows:
        """One row, summed up in fp32."""
        return Rows(self.tensor.float().mean(0, keepdim=True))       # (n, width) -> (1, width)

    @classmethod
    def joined(cls, parts: Sequence[Tensor]) -> Rows:
        return cls(parts[0] if len(parts) == 1 else torch.cat(list(parts)))


@dataclass(frozen=True)
class Sample:
    """Draw one token from the request's processed distribution at some rows of the run.

    rows: indexes into the run, None = the last; shift: the row of position i speaks about position i + shift;
    salt: tells repeated draws for one position apart; forbid: ids that cannot be drawn; confidence: return the
    probability of each drawn token; keep_q: return the distributions as Rows; greedy: argmax whatever the request says.
    """

    rows: tuple[int, ...] | None = None
    shift: int = 1
    purpose: Purpose = Purpose.SAMPLE
    salt: int = 0
    forbid: tuple[int, ...] = ()
    confidence: bool = False
    keep_q: bool = False
    greedy: bool = False


@dataclass(frozen=True)
class Verify:
    """Accept or reject draft tokens, which are the last len(tokens) of the run; Run.parents makes them a tree.

    q: the distribution each draft token was drawn from, or None for drafts that were not sampled: then the target's own
    seeded draw decides, which is lossless and equal to plain decoding for any drafts. rule: see verify.RULES.
    """

    tokens: tuple[int, ...]
    q: tuple[Rows, ...] | None = None
    rule: str = "lossless"


@dataclass(frozen=True)
class Hidden:
    """Return hidden states of every token of the run: the input of each of `layers`, side by side, or the final ones."""

    layers: tuple[int, ...] = ()


Want = Sample | Verify | Hidden


@dataclass(frozen=True)
class Run:
    """Tokens to run on the model that plays `role`.

    at: None appends after what the role holds, provisional runs included; n overwrites from cache position n.
    write: True keeps the state of all tokens, False of none (they see each other and leave no trace), n of the first n.
    see: "causal", "block" (all of the own block of `align` positions) or "all".
    parents: tree; the index of each token's parent in this run, -1 = the last token held.
    feed: rows fed along with the tokens, aligned at the end; missing leading rows are zero.
    align: a slice of the run may end only on a multiple of this position.
    """

    role: str
    tokens: Sequence[int]
    at: int | None = None
    write: bool | int = True
    see: str = "causal"
    parents: tuple[int, ...] | None = None
    feed: Rows | None = None
    align: int = 1
    want: tuple[Want, ...] = ()

    def written(self) -> int:
        return len(self.tokens) if self.write is True else int(self.write)

    @cached_property
    def tail(self) -> int:
        """How many of the last tokens belong in one slice: drafts with their root, a tree, rows that leave no trace."""
        n = len(self.tokens)
        together = max([1, n - self.written(), *(len(w.tokens) + 1 for w in self.want if isinstance(w, Verify)),
                        *(n - min(w.rows) for w in self.want if isinstance(w, Sample) and w.rows)])
        if self.parents is not None:
            straight = next((i for i, p in enumerate(self.parents) if p != i - 1), n)
            together = max(together, n - straight + 1)
        return min(together, n)


@dataclass
class Result:
    """What a Run gave. tokens: drawn (Sample) or accepted and one more (Verify); keep: indexes into the run (Verify)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    q: Rows | None = None
    hidden: Rows | None = None

    @property
    def token(self) -> int:
        return self.tokens[-1]


@dataclass(frozen=True)
class Commit:
    """Tokens that now belong to the sequence, and which rows of the last target run stay.

    keep: strictly increasing indexes into that run, a prefix or a path of its tree; None = all that were written.
    Every role is rolled back to the longest prefix that agrees with the committed tokens.
    drafted: how many draft tokens were tried, and denoised: how many passes revealed this block, for the metrics.
    embedding: one row that stands for the whole sequence, which the caller gets.
    """

    tokens: Sequence[int]
    keep: Sequence[int] | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    drafted: int = 0
    denoised: int = 0
    embedding: Rows | None = None


class SequenceView(Protocol):
    """What a strategy may know of its sequence."""

    tokens: list[int]                   # prompt and output; read only
    prompt_len: int
    params: SamplingParams
    memory: dict[str, Any]

    @property
    def done(self) -> bool: ...

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""

    def pending(self, role: str) -> list[int]:
        """Committed tokens that `role` does not hold yet."""

    def held(self, role: str) -> int:
        """Committed tokens that `role` holds."""


Steps = Generator[Run | Commit, Result, None]


class Strategy(ABC):
    """One instance serves many sequences; what belongs to one sequence lives in its generator.

    roles: the models it runs, the one whose distribution counts first; domain: what besides tokens decides the content of
    cached keys (part of the prefix key); align: positions per block; reuse_prefix: whether cached prefixes may be
    taken over (not where every row of the prompt must pass through the target); scores: commits no tokens (max_tokens 0).
    """

    roles: tuple[str, ...] = (TARGET,)
    domain: str = "causal"
    align: int = 1
    reuse_prefix: bool = True
    scores: bool = False

    @property
    def target(self) -> str:
        return self.roles[0]

    @abstractmethod
    def lookahead(self) -> int:
        """Upper bound of the rows that the next target run has beyond the pending tokens."""

    @abstractmethod
    def run(self, seq: SequenceView) -> Steps:
        """Decode until seq.done."""

    def check(self, params: SamplingParams) -> None:
        """Refuse what this strategy cannot honour, by raising InvalidParams. Most honour everything."""
        return None
