"""The head as C++ calls: whole logits, or the best tokens without writing them."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ridgeline.models.backend import HeadRows
from ridgeline.native._native import Engine, Linear, Matrix
from ridgeline.sampling import Candidates, RowContext, distribution, inverse_cdf

_Ids = npt.NDArray[np.int64]


class NativeHead(nn.Module):
    """count: where its passes are counted."""

    def __init__(self, engine: Engine, linear: Linear, matrix: Matrix, count: HeadRows | None = None):
        super().__init__()
        self.engine, self.linear, self.matrix, self.count = engine, linear, matrix, HeadRows() if count is None else count

    def forward(self, hidden: Tensor) -> Tensor:
        """(W, hidden) fp32 -> (W, vocabulary) fp32."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.matrix.rows)
        self.count.scored += self.matrix.rows
        self.count.total += self.matrix.rows
        self.engine.linear(self.linear, hidden.data_ptr(), len(hidden), out.data_ptr())
        return out


class Pruning:
    """Whether reading a split head by halves pays, judged by the share of its low halves that had to be read.

    limit: the share from which reading the whole head is faster.

    The results are the same either way. A head on which it does not pay is tried again after 16 passes, then after twice as
    many each time, up to 4,096: a try costs about one more pass.
    """

    FIRST_PAUSE, LONGEST_PAUSE = 16, 4096

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.mean: float | None = None
        self.pause, self.left = self.FIRST_PAUSE, 0

    def wanted(self) -> bool:
        """Asked once before each pass."""
        if self.left:
            self.left -= 1
        return not self.left

    def saw(self, share: float) -> None:
        self.mean = share if self.mean is None else self.mean + (share - self.mean) / 8
        if self.mean > self.limit:
            self.mean, self.left = None, self.pause + 1
            self.pause = min(2 * self.pause, self.LONGEST_PAUSE)


class NativeTopHead:
    """The best tokens, exactly, without writing the logits. Of a split head few rows read the high nibbles, and those of the
    low ones that can matter, for as long as that pays."""

    MOST_PRUNED = 4
    # For 1 to 4 rows. Gemma 3 270M, running text, ms whole -> pruned (share of the low halves read): greedy 5.3 -> 2.7 (0.6 %),
    # 5.4 -> 3.0 (2.6 %), 6.5 -> 4.4 (3.7 %), 6.3 -> 4.4 (5.0 %); top-10 6.4 -> 3.7 (4 %), 6.9 -> 5.3 (10 %), 6.4 -> 6.3 (13 %),
    # 6.4 -> 7.0 (16 %); top-64 5.3 -> 4.1 (15 %), 5.4 -> 6.4 (27 %). Lines read here and there cost 4 to 5 times those in
    # order, and each row has doubts of its own.
    LIMITS = (0.25, 0.2, 0.14, 0.12)

    def __init__(self, engine: Engine, linear: Linear, matrix: Matrix):
        self.engine, self.linear, self.matrix = engine, linear, matrix
        self.rows = HeadRows()
        self.pruning: dict[tuple[bool, int], Pruning] = {}

    def argmax(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        tokens = torch.empty(len(hidden), dtype=torch.int64)
        judge = self.judge(len(hidden), narrow=False)
        if judge is not None:
            self.counted(self.engine.greedy(self.linear, hidden.data_ptr(), len(hidden), tokens.data_ptr()), judge)
        else:
            self.engine.argmax(self.linear, hidden.data_ptr(), len(hidden), tokens.data_ptr())
            self.counted(self.matrix.rows, None)
        return tokens

    def top(self, hidden: Tensor, k: Sequence[int], offsets: _Ids, touched: _Ids,
            capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = hidden.contiguous()
        count = len(hidden)
        ids, scores = torch.full((count, capacity), -1), torch.full((count, capacity), -torch.inf)
        apart, counts = torch.empty(len(touched)), torch.empty(count, dtype=torch.int64)
        wanted, offsets, touched = np.asarray(k, dtype=np.int64), np.ascontiguousarray(offsets), np.ascontiguousarray(touched)
        judge = self.judge(count, narrow=max(k) > 1) if max(k) else None
        scored = self.engine.top(
            self.linear, hidden.data_ptr(), count, wanted.ctypes.data, offsets.ctypes.data, touched.ctypes.data,
            apart.data_ptr(), capacity, ids.data_ptr(), scores.data_ptr(), counts.data_ptr(), judge is not None)
        self.counted(scored, judge)
        return ids, scores, apart, counts

    def draw(self, logits: Tensor, rows: Sequence[RowContext], u: Sequence[float]) -> Tensor:
        logits = logits.contiguous()
        count, vocab = logits.shape
        tokens = torch.empty(count, dtype=torch.int64)
        self.engine.sample(logits.data_ptr(), count, vocab, _asked(rows, u), tokens.data_ptr())
        for i in (tokens < -1).nonzero()[:, 0].tolist():                       # infinite logits share the whole mass
            tokens[i] = inverse_cdf(distribution(logits[i:i + 1], rows[i:i + 1]), [u[i]])[0]
        return tokens

    def draw_few(self, found: Candidates, rows: Sequence[RowContext], u: Sequence[float], *, cut: bool = True) -> Tensor:
        ids, scores = found.ids.contiguous(), found.scores.contiguous()
        count, capacity = ids.shape
        tokens = torch.empty(count, dtype=torch.int64)
        self.engine.draw_few(ids.data_ptr(), scores.data_ptr(), count, capacity, _asked(rows, u), cut,
                             tokens.data_ptr())
        return tokens                                                          # below 0: the row's `known` is False

    def judge(self, rows: int, *, narrow: bool) -> Pruning | None:
        """Asked once before each pass; None: the whole head is to be read. narrow: more than the best token is wanted."""
        if not self.matrix.split or rows > self.MOST_PRUNED:
            return None
        judge = self.pruning.setdefault((narrow, rows), Pruning(self.LIMITS[rows - 1]))
        self.rows.pruning = judge.wanted()
        return judge if self.rows.pruning else None

    def counted(self, scored: int, judge: Pruning | None) -> None:
        self.rows.scored += scored
        self.rows.total += self.matrix.rows
        if judge is not None:
            judge.saw(scored / self.matrix.rows)


def _asked(rows: Sequence[RowContext], u: Sequence[float]) -> list[tuple[float, int, float, float, float, float]]:
    return [(p.temperature, min(max(p.top_k, 0), 1 << 62), p.top_p, p.min_p, p.typical_p, number)
            for p, number in zip((row.params for row in rows), u)]
