"""What a backend may set in a model: faster ways to its tokens than through all modules and all logits."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ridgeline.batch import PassRow
from ridgeline.cache.view import CacheView
from ridgeline.sampling.candidates import Candidates
from ridgeline.sampling.context import RowContext


@dataclass
class HeadRows:
    """Output rows of a head: scored from all their bytes (parts of rows added up), and all, in the passes so far; pruning:
    whether the last pass of few rows tried to leave some out."""

    scored: int = 0
    total: int = 0
    pruning: bool = False


class TopHead(Protocol):
    """Finds the best tokens without writing all logits, before `CausalLM.cap`, and draws from logits."""

    rows: HeadRows

    def argmax(self, hidden: Tensor) -> Tensor:
        """(W, hidden) -> (W,) int64: the most likely tokens, the lowest id of equals, -1 where a logit is not finite."""

    def top(self, hidden: Tensor, k: Sequence[int], offsets: npt.NDArray[np.int64],
            touched: npt.NDArray[np.int64], capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The k[i] largest logits of row i, those that tie with the last one included, and the logits of touched tokens.

        hidden: (W, hidden); k: 0 to 72, with 0 only touched tokens are scored; offsets: (W + 1,) into touched (N,), ids that
        ascend within a row and are no candidates. Returns ids (W, capacity) int64 ascending and -1 behind the last, scores
        (W, capacity) fp32 and -inf behind the last, touched scores (N,), and how many candidates each row has (W,) int64;
        negative: not known, since a logit is not finite or more than `capacity` tie.
        """

    def draw(self, logits: Tensor, rows: Sequence[RowContext], u: Sequence[float]) -> Tensor:
        """Tokens drawn from processed fp32 logits (R, V), none of them greedy: (R,) int64; see `ridgeline.sampling.sample`."""

    def draw_few(self, found: Candidates, rows: Sequence[RowContext], u: Sequence[float], *, cut: bool = True) -> Tensor:
        """What `ridgeline.sampling.draw` does: (R,) int64, of rows that are `known`."""


class WholePass(Protocol):
    """Everything from token ids on in one call. wanted: indexes into all the rows' tokens, None = all."""

    def __call__(self, rows: Sequence[PassRow], wanted: Sequence[int] | None, state: CacheView) -> Tensor:
        """(W, hidden): the rows behind the final norm."""

    def argmax(self, rows: Sequence[PassRow], wanted: Sequence[int] | None, state: CacheView) -> list[int]:
        """What `TopHead.argmax` would give for these rows."""
