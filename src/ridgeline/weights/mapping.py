"""How a parameter of our model is cut out of a checkpoint's tensors."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class From:
    """Take tensor `name` of the checkpoint, optionally only a half-open range of its rows, then transpose.

    rows       the parameter is this slice of a fused tensor (phi3's qkv_proj, gate_up_proj)
    transpose  the checkpoint stores (in, out) where the parameter is (out, in) (gpt2's Conv1D); `rows` then
               counts rows after the transposition, so that it always means output features
    """

    name: str
    rows: tuple[int, int] | None = None
    transpose: bool = False
