"""From the model's logits to tokens: processors, distributions, sampling, log-probabilities.

    logits --process--> processed logits --distribution--> probabilities --inverse_cdf--> tokens
                                        \\------------------ sample ------------------/
"""
from __future__ import annotations

from ridgeline.sampling.context import RowContext
from ridgeline.sampling.distribution import distribution
from ridgeline.sampling.logprobs import TokenLogprobs, top_logprobs
from ridgeline.sampling.processors import process
from ridgeline.sampling.sampler import inverse_cdf, sample

__all__ = [
    "RowContext",
    "TokenLogprobs",
    "distribution",
    "inverse_cdf",
    "process",
    "sample",
    "top_logprobs",
]
