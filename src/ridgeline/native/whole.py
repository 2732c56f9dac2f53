"""A whole pass as one C++ call: the interpreter's lock is free from the tokens to the rows that the head takes.

A step of one row spent more time in Python between the kernels than in some of them: the weights push Python's own code and
data out of the caches, so that each small tensor operation takes 10 to 20 us.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.batch import PassRow
from ridgeline.cache.view import CacheView
from ridgeline.layers.rope import Rotary
from ridgeline.native import _native
from ridgeline.native._native import Engine, Matrix, Norm
from ridgeline.native.head import NativeTopHead
from ridgeline.native.layers import NativeAttention, NativeBlock, NativeMLP, kv_addresses


class NativeWhole:
    """Embedding, all decoder layers and the final norm; for the most likely tokens the head too."""

    def __init__(self, engine: Engine, embedding: Matrix, scale: float, blocks: Sequence[NativeBlock], norm: Norm,
                 head: NativeTopHead):
        """scale: of embedded rows; blocks: both parts of each are native."""
        self.engine, self.model, self.hidden = engine, _native.Model(embedding, scale, norm), embedding.cols
        self.head = head
        self.mixers = list[NativeAttention]()
        for block in blocks:
            assert isinstance(block.mix, NativeAttention) and isinstance(block.feed, NativeMLP)
            self.model.add(block.mix.block, block.feed.block)
            self.mixers.append(block.mix)
        self.rotaries = list(dict.fromkeys(mixer.rotary for mixer in self.mixers if mixer.rotary is not None))
        self.state: CacheView | None = None
        self.kv, self.dtype = list[int](), ""
        self.tables = list[tuple[Tensor, Tensor]]()        # of positions 0 to rope_end; held, since `rope` points into them
        self.rope, self.rope_end = list[int](), -1

    def __call__(self, rows: Sequence[PassRow], wanted: Sequence[int] | None, state: CacheView) -> Tensor:
        """wanted: indexes into all the rows' tokens, None = all -> (W, hidden) fp32."""
        held = list[tuple[Tensor, Tensor]]()
        rope, kept = self._rope(rows, held)
        self._at(state)
        out = torch.empty(_count(rows, wanted), self.hidden)
        self.engine.forward(self.model, _native.Batch.of(rows, state.page_size), self.dtype, self.kv, rope, kept, wanted,
                            out.data_ptr())
        return out

    def argmax(self, rows: Sequence[PassRow], wanted: Sequence[int] | None, state: CacheView) -> list[int]:
        """The most likely token of each wanted row; -1 where a logit is not finite."""
        held = list[tuple[Tensor, Tensor]]()
        rope, kept = self._rope(rows, held)
        self._at(state)
        judge = self.head.judge(_count(rows, wanted), narrow=False)
        tokens, scored = self.engine.best(self.model, _native.Batch.of(rows, state.page_size), self.dtype, self.kv, rope, kept,
                                          wanted, self.head.linear, judge is not None)
        self.head.counted(scored, judge)
        return tokens

    def _at(self, state: CacheView) -> None:
        if state is not self.state:                        # its tensors stay where they are
            self.kv = [address for mixer in self.mixers for address in kv_addresses(state, mixer.layer)]
            self.state, self.dtype = state, str(state.layout.kv_dtype).removeprefix("torch.")

    def _rope(self, rows: Sequence[PassRow], held: list[tuple[Tensor, Tensor]]) -> tuple[list[int], bool]:
        """Addresses of cos and sin of each layer, and whether they are by position; what must outlive the call goes to held."""
        end = max(row[0] + len(row[1]) for row in rows)    # no RoPE position reaches it
        kept = end <= Rotary.MOST_KEPT
        return self._kept(end) if kept else self._made(rows, held), kept

    def _kept(self, end: int) -> list[int]:
        if end > self.rope_end:
            self.tables = [rotary.kept(end) for rotary in self.rotaries]
            self.rope = self._addresses(self.tables)
            self.rope_end = min((len(cos) for cos, _ in self.tables), default=Rotary.MOST_KEPT)
        return self.rope

    def _made(self, rows: Sequence[PassRow], held: list[tuple[Tensor, Tensor]]) -> list[int]:
        """Behind a long context: rotations of this pass's tokens alone, which `held` keeps for the call."""
        positions = list[int]()
        for start, tokens, _, at, _, _ in rows:
            positions += range(start, start + len(tokens)) if at is None else at
        held += [rotary.of(torch.tensor(positions), torch.float32) for rotary in self.rotaries]
        return self._addresses(held)

    def _addresses(self, tables: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Of cos and sin of each layer; 0 for one without a rotation."""
        found = {id(rotary): (cos.data_ptr(), sin.data_ptr()) for rotary, (cos, sin) in zip(self.rotaries, tables)}
        return [address for mixer in self.mixers for address in found.get(id(mixer.rotary), (0, 0))]


def _count(rows: Sequence[PassRow], wanted: Sequence[int] | None) -> int:
    return sum(len(row[1]) for row in rows) if wanted is None else len(wanted)
