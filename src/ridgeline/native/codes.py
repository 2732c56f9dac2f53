"""Matrices kept as codes with scales and zeros, packed without loss into the kinds that have kernels."""
from __future__ import annotations

from typing import Any

import torch

from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.mapping import From
from ridgeline.weights.quantised import Form

# Columns that share a scale in the kinds of each width, widest first: a wider group repeats its scale. See csrc/api.h.
_GROUPS = {4: (128, 64, 32), 8: (128, 32)}


def form_of(checkpoint: Checkpoint, source: From) -> Form | None:
    return None if source.transpose else checkpoint.form(source.name)


def native_type(form: Form, cols: int) -> str | None:
    """The kind that holds such a matrix exactly, or None: groups that are no multiple of 32 or not consecutive."""
    if form.order is not None:
        return None
    if form.plain and form.group == 32:
        return "Q4_0" if form.bits == 4 else "Q8_0"          # the fastest kernels; a head can be pruned
    fits = [size for size in _GROUPS[form.bits] if form.group >= cols or form.group % size == 0]
    return f"INT{form.bits}_G{fits[0]}" if fits else None


def why_not(form: Form) -> str:
    """Why a matrix is multiplied as fp32 values instead."""
    if form.order is not None:
        return "its columns are quantised in the order of their activations"
    return f"groups of {form.group} columns, where kernels have multiples of 32"


def stored_bytes(kind: str, rows: int, cols: int) -> int:
    """About what the packed matrix takes: codes and scales."""
    bits, group = (int(kind[3]), int(kind[6:])) if kind.startswith("INT") else (int(kind[1]), 32)
    scale = 5 if kind.startswith("INT") else 2
    return rows * (-(-cols // 32) * 4 * bits + -(-cols // group) * scale)


def fill(engine: Any, matrix: Any, checkpoint: Checkpoint, source: From, rows: int, step: int) -> None:
    """Read and pack `rows` rows, `step` (a multiple of 16) at a time. raises CorruptFile for damaged tensors."""
    first = 0 if source.rows is None else source.rows[0]
    for low in range(0, rows, step):
        high = min(low + step, rows)
        codes = checkpoint.codes(source.name, rows=(first + low, first + high))
        assert codes is not None
        zeros = (codes.zeros - (1 << codes.bits - 1)).to(torch.int8)                # around the middle code
        engine.fill_codes(matrix, codes.codes.contiguous().numpy(), codes.scales.contiguous().numpy(),
                          zeros.contiguous().numpy(), codes.group, low)
        checkpoint.release(source.name)
