"""The residual frame that decoder layers share."""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView


class Part(NamedTuple):
    """One residual step: x + after(inner(before(x))). A norm that a family does not have is None."""

    before: nn.Module | None
    inner: nn.Module
    after: nn.Module | None

    def __call__(self, x: Tensor, *context: Any) -> Tensor:
        """What the step adds to x: (T, hidden)."""
        out: Tensor = self.inner(x if self.before is None else self.before(x), *context)
        return out if self.after is None else self.after(out)


class ResidualBlock(nn.Module, ABC):
    """A mixer, then an MLP, each in a residual step. A family names its modules as its checkpoints do, and its parts.

    Pre-norm (Llama), post-norm (OLMo 2) and both (Gemma 2) differ only in which norms are None.
    """

    @abstractmethod
    def parts(self) -> tuple[Part, Part]:
        """The mixer's step and the MLP's."""

    def mixer(self) -> Any:
        return self.parts()[0].inner

    def forward(self, x: Tensor, batch: Batch, state: CacheView | None) -> Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        mix, feed = self.parts()
        x = x + mix(x, batch, state)
        return x + feed(x, batch)
