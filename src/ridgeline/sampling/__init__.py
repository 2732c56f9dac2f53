"""From the model's logits to tokens: processors, distributions, sampling, log-probabilities.

    logits --process--> processed logits --distribution--> probabilities --inverse_cdf--> tokens
                                        \\------------------ sample ------------------/
"""
from __future__ import annotations

from ridgeline.sampling.candidates import CAPACITY, MOST, Apart, Candidates, draw, narrow
from ridgeline.sampling.context import RowContext
from ridgeline.sampling.distribution import distribution
from ridgeline.sampling.inverse import inverse_cdf
from ridgeline.sampling.logprobs import TokenLogprobs, top_logprobs
from ridgeline.sampling.processors import process
from ridgeline.sampling.sampler import Draw, sample

__all__ = [
    "CAPACITY",
    "MOST",
    "Apart",
    "Candidates",
    "Draw",
    "RowContext",
    "TokenLogprobs",
    "distribution",
    "draw",
    "inverse_cdf",
    "narrow",
    "process",
    "sample",
    "top_logprobs",
]
