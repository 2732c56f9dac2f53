"""SDAR: a block-diffusion model on Qwen3's weights. arXiv 2510.06303.

Blocks are causal among each other and bidirectional inside. That is the batch's visibility (`see="block"`), so the
model itself is Qwen3 and also runs causally.
"""
from __future__ import annotations

from ridgeline.models.qwen3 import Qwen3


class SDAR(Qwen3):
    pass
