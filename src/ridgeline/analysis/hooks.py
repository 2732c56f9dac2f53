"""Events of the layers that torch runs, under the names of the native ones: hooks on modules, set while a model is traced."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ridgeline.layers.attention import Attention
from ridgeline.layers.block import ResidualBlock
from ridgeline.layers.mlp import MLP, GatedMLP
from ridgeline.models.base import CausalLM
from ridgeline.native.layers import NativeBlock, NativeEmbedding, NativeNorm


@dataclass
class _Mark:
    """A moment: the end of a component of a layer, or (component "") the beginning of the next."""

    layer: int | None
    component: str
    rows: int
    at: Any


class ModuleTrace:
    """Marks at the edges of modules; from one to the next is a component. On a GPU marks are events of its stream, so that they
    cost no waiting.

    Components without a module of their own lie between two that have one: an activation is of "mlp.up", rotation and the
    store to the cache are of "attention.core", a residual sum goes with the component after it.
    """

    def __init__(self, model: CausalLM, device: torch.device):
        self.device = device
        self.marks: list[_Mark] = []
        self.handles: list[Any] = []
        self.plan: list[tuple[nn.Module, int | None, str, str]] = []   # module, layer, what ends before it, what it ends
        self._walk(model)

    @property
    def any(self) -> bool:
        return bool(self.plan)

    def start(self) -> None:
        for module, layer, before, own in self.plan:
            self.handles.append(module.register_forward_pre_hook(self._marker(layer, before)))
            if own:
                self.handles.append(module.register_forward_hook(self._after(layer, own)))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.marks.clear()

    def take(self) -> list[tuple[int | None, str, int, int, int]]:
        """(layer, component, rows, start, end) in ns. On a GPU the clock starts at the first mark."""
        events = []
        first = self.marks[0].at if self.marks else None
        stamps = [self._ns(first, m.at) for m in self.marks]
        for mark, start, end in zip(self.marks[1:], stamps, stamps[1:]):
            if mark.component:
                events.append((mark.layer, mark.component, mark.rows, start, end))
        self.marks.clear()
        return events

    def _ns(self, first: Any, at: Any) -> int:
        return at if isinstance(at, int) else round(first.elapsed_time(at) * 1e6)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _marker(self, layer: int | None, component: str) -> Callable[..., None]:
        def mark(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.marks.append(_Mark(layer, component, len(inputs[0]), self._now()))
        return mark

    def _after(self, layer: int | None, component: str) -> Callable[..., None]:
        def mark(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.marks.append(_Mark(layer, component, len(inputs[0]), self._now()))
        return mark

    def _walk(self, model: CausalLM) -> None:
        embed, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
        if not isinstance(embed, NativeEmbedding):
            self.plan.append((embed, None, "", "embed"))
        for index, block in enumerate(model.model.layers):
            if isinstance(block, ResidualBlock):
                self._block(index, block)
            elif isinstance(block, NativeBlock):
                for part in (block.own_mix, block.own_feed):
                    if part is not None:
                        self._part(index, part, own_end=True)
        if not isinstance(norm, NativeNorm):
            self.plan.append((norm, None, "", "final_norm"))
        if isinstance(head, nn.Linear):
            self.plan.append((head, None, "", "head"))

    def _block(self, index: int, block: ResidualBlock) -> None:
        mix, feed = block.parts()
        self._part(index, mix, own_end=True)
        # What lies between the mixer's end and the MLP's beginning is the residual sum; the last one ends with the block.
        self._part(index, feed, own_end=True, gap=f"{_prefix(mix.inner)}.residual")
        self.handles_of_block(index, block, f"{_prefix(feed.inner)}.residual")

    def handles_of_block(self, index: int, block: nn.Module, component: str) -> None:
        """The block's end; its beginning ends nothing."""
        self.plan.append((block, index, "", component))

    def _part(self, index: int, part: Any, *, own_end: bool, gap: str = "") -> None:
        before, inner, after = part
        name = _prefix(inner)
        if before is not None:
            self.plan.append((before, index, gap, f"{name}.norm"))
            gap = ""
        if isinstance(inner, Attention):
            for leaf in ("q_proj", "k_proj", "v_proj"):
                self.plan.append((getattr(inner, leaf), index, gap if leaf == "q_proj" else "", "attention.qkv"))
            if inner.norm_over is not None:
                self.plan += [(inner.q_norm, index, "", "attention.heads"), (inner.k_norm, index, "", "attention.heads")]
            self.plan.append((inner.o_proj, index, "attention.core", "attention.out"))
        elif isinstance(inner, (GatedMLP, MLP)):
            if isinstance(inner, GatedMLP):
                self.plan.append((inner.gate_proj, index, gap, "mlp.up"))
                gap = "mlp.up"
            self.plan.append((inner.up_proj, index, gap, "mlp.up"))
            self.plan.append((inner.down_proj, index, "mlp.up", "mlp.down"))
        else:
            self.plan.append((inner, index, gap, f"{name}.core"))
        if after is not None:
            self.plan.append((after, index, "", f"{name}.residual"))


def _prefix(inner: Any) -> str:
    return "attention" if isinstance(inner, Attention) else "mlp" if isinstance(inner, (GatedMLP, MLP)) else "mixer"
