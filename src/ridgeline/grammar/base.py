"""What the engine knows of a grammar."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]       # (ceil(V / 32),): bit t % 32 of word t // 32 says whether token t may come next


class Matcher(Protocol):
    """The state of one sample."""

    def mask(self, output: Sequence[int]) -> Mask | None:
        """Tokens that may follow `output`; None where the grammar does not lead there. raises EngineError.

        Fast where `output` has most tokens in common with that of the call before.
        """

    def allows(self, output: Sequence[int], token: int) -> bool:
        """Whether `token` may follow; True, too, where the grammar does not lead to `output`. raises EngineError."""


class Grammar(Protocol):
    """A compiled grammar, shared by many samples."""

    def matcher(self) -> Matcher:
        """A fresh state."""
