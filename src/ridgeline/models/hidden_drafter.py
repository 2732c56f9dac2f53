"""A drafter of one or two Llama blocks that reads the target's hidden states. arXiv 2401.15077 (EAGLE), 2503.01840.

Its row at position i takes token i and the target's final hidden row of position i - 1. Where the target has not run
yet, the drafter's own final hidden row stands in for it, so both have one width.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ridgeline.batch import Batch
from ridgeline.cache.view import CacheView
from ridgeline.errors import UnsupportedModel
from ridgeline.layers.norm import RMSNorm
from ridgeline.models.base import ModelConfig, ModelOutput
from ridgeline.models.llama import Llama


class HiddenDrafter(Llama):
    """Llama's config fields, and target_hidden_size (default hidden_size): the width of the rows it is fed with."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"num_hidden_layers": 1}

    def __init__(self, config: ModelConfig):
        hidden = config.hidden_size
        width = config.raw.get("target_hidden_size", hidden)
        if width != hidden:
            raise UnsupportedModel(f"config.json: target_hidden_size is {width!r} and hidden_size {hidden}; a drafter that "
                                   "is fed with its own hidden rows needs both equal")
        super().__init__(config)
        self.feed_width = width
        self.hidden_norm = RMSNorm(width, config.norm_eps)
        self.fc = nn.Linear(hidden + width, hidden, bias=False)

    def forward(self, batch: Batch, state: CacheView | None = None) -> ModelOutput:
        """batch.feed: (T, target_hidden_size), the hidden row before each token; zeros where there is none."""
        assert batch.tokens is not None and batch.feed is not None, "a hidden drafter takes tokens and fed rows"
        x = torch.cat([self.embed(batch.tokens), self.hidden_norm(batch.feed)], -1)          # (T, hidden + width)
        out: ModelOutput = self.model(self.fc(x), batch, state)                              # (T, hidden)
        return out
