"""What sampling must know about one row of logits."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.noise import Purpose, uniform
from ridgeline.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowContext:
    """One row of logits, that is one token to be chosen.

    `prompt` and `output` are this row's own history: with speculation, `output` is the committed output plus the
    draft tokens before this row. Both may be any sequence of ids; those with a buffer (`array('q')`, numpy) are read
    without a copy per element. Ids outside the vocabulary (placeholders of rows without a token) are ignored.
    """

    params: SamplingParams
    seed: int  # resolved: the request's own, or one drawn for it
    position: int  # absolute index, in prompt + output, of the token to be chosen
    prompt: Sequence[int]
    output: Sequence[int]
    eos_token_ids: Sequence[int] = ()
    salt: int = 0  # which of the n choices of a request

    def uniform(self, purpose: Purpose) -> float:
        """This row's own random number in [0, 1) for `purpose`."""
        return uniform(self.seed, self.position, purpose, self.salt)
