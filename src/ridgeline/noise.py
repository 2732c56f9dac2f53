"""Counter-based random numbers: what a draw is depends only on what it is for, never on what was drawn before.

A draw is named by (seed, absolute position, purpose, salt). So a seeded request gives the same tokens alone, in any
batch, and when it is computed again after a preemption; and the coins of drafting, acceptance, residual and plain
sampling are independent, which the losslessness of speculative sampling rests on.

The mixing function is the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), applied once for each counter.
"""
from __future__ import annotations

from enum import IntEnum

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64's Weyl sequence


class Purpose(IntEnum):
    """What a draw decides. Draws of different purposes are independent, also at the same seed and position."""

    SAMPLE = 1  # a token from the target's distribution
    DRAFT = 2  # a token from the draft's distribution
    ACCEPT = 3  # the acceptance coin of a draft token
    RESIDUAL = 4  # the token that replaces a rejected draft token


def bits(seed: int, position: int, purpose: int, salt: int = 0) -> int:
    """64 random bits for the four counters, each taken modulo 2**64."""
    z = 0
    for counter in (seed, position, purpose, salt):
        # The Weyl step keeps the all-zero input from being a fixed point of the chain.
        z = ((z ^ (counter & _MASK)) + _GOLDEN) & _MASK
        # A bijection of 64-bit integers in which each input bit flips each output bit with probability ~1/2
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


def uniform(seed: int, position: int, purpose: int, salt: int = 0) -> float:
    """A float in [0, 1) with 53 random bits.

    `position` is the absolute index, in prompt + output, of the token that the draw is about; `purpose` a `Purpose`;
    `salt` tells apart draws that agree in all else (the n choices of one request, siblings in a draft tree).
    """
    return (bits(seed, position, purpose, salt) >> 11) * 2.0**-53


def again(u: float) -> float:
    """A second number in [0, 1), a function of the first (53 bits) alone that has nothing else in common with it."""
    return uniform(int(u * 2.0**53), 0, 0)
