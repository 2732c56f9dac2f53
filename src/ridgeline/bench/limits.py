"""The least time that a forward pass can take on a machine, from the shapes and the stored bytes of the loaded model."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ridgeline.bench.machine import Machine
from ridgeline.cache.view import kv_bytes
from ridgeline.loading import LoadedModel
from ridgeline.types import PagedKV


class Rows(NamedTuple):
    """One sequence's share of a pass: `tokens` rows behind `start` cached ones; `wanted` of them go through the head."""

    start: int
    tokens: int
    wanted: int


Pass = Sequence[Rows]


@dataclass(frozen=True)
class Shape:
    """What a pass reads and computes. Parameters are those of matrices; bytes are as the weights lie in memory."""

    layer_parameters: int
    head_parameters: int
    layer_bytes: int
    head_bytes: int
    heads: int                                 # of queries
    attention: tuple[PagedKV, ...]
    kv_dtype: torch.dtype
    state_bytes: int                           # of one sequence, recurrent layers

    @classmethod
    def of(cls, loaded: LoadedModel, shapes: LoadedModel) -> Shape:
        """loaded: with its weights; shapes: the same model before loading, where every matrix is still a torch module."""
        layers = [m.weight.numel() for m in shapes.model.model.layers.modules() if isinstance(m, nn.Linear)]
        native = {} if loaded.report is None else {layer.name: layer for layer in loaded.report.layers}
        layer_bytes = _torch_bytes(loaded.model.model.layers) + sum(
            layer.nbytes for name, layer in native.items() if name.startswith("model.layers."))
        head = native.get("lm_head")
        if head is None or head.reason is not None:
            head_bytes = _torch_bytes(loaded.model.lm_head)
        else:                                  # a tied head's bytes are counted as the embedding's
            head_bytes = head.nbytes or native["model.embed_tokens"].nbytes
        return cls(sum(layers), shapes.model.lm_head.weight.numel(), layer_bytes, head_bytes, shapes.model.config.num_heads,
                   tuple(spec for spec in loaded.layout.layers if isinstance(spec, PagedKV)), loaded.layout.kv_dtype,
                   loaded.layout.state_bytes())

    def bytes_read(self, rows: Pass) -> int:
        """Weights once, the head only if some row needs it; each cached key and value that a sequence's rows see, once."""
        total = self.layer_bytes + (self.head_bytes if any(r.wanted for r in rows) else 0)
        for spec in self.attention:
            width = kv_bytes(spec, self.kv_dtype)
            for r in rows:
                seen = r.start + r.tokens
                total += width * (seen if spec.window is None else min(seen, spec.window + r.tokens - 1))
        return total + self.state_bytes * len(rows)

    def operations(self, rows: Pass) -> int:
        """Two a multiply-add of the matrices, and of the scores and sums of attention over the keys that are seen."""
        total = 2 * self.layer_parameters * sum(r.tokens for r in rows)
        total += 2 * self.head_parameters * sum(r.wanted for r in rows)
        for spec in self.attention:
            width = 2 * self.heads * (spec.key_dim + spec.value_dim)
            total += width * sum(_visible(r.start, r.tokens, spec.window) for r in rows)
        return total

    def seconds(self, passes: Iterable[Pass], machine: Machine) -> float:
        """Each pass takes the longer of its reading and its computing."""
        return sum(max(self.bytes_read(p) / machine.bandwidth, self.operations(p) / machine.peak) for p in passes)


def _visible(start: int, count: int, window: int | None) -> int:
    """Keys that `count` causal queries behind `start` tokens see, in all."""
    most = start + count if window is None else window
    growing = max(0, min(count, most - start))             # queries that see everything before them
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * most


def _torch_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
