from __future__ import annotations

import pytest
import torch
from traced import Cached, build

from ridgeline.analysis.work import COMPONENTS, Rows, Totals, Work, decode, depths, keys_read, prefill, totals, visible_pairs
from ridgeline.batch import Batch, upper
from ridgeline.decoding.base import Run


def masked(rows: Rows, window: int | None) -> torch.Tensor:
    """What the model's own mask lets these rows see: (tokens, context) bool."""
    at = torch.arange(rows.start, rows.context)
    positions = torch.tensor([rows.start + d for d in depths(rows.parents)]) if rows.parents else at
    batch = Batch(positions=positions, offsets=(0, rows.tokens), starts=(rows.start,), lo=torch.zeros_like(at),
                  hi=upper(at, rows.context, rows.see, rows.block), parents=(rows.parents or None,))
    return batch.mask(0, window)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 64])
@pytest.mark.parametrize("rows", [
    Rows(0, 1, 1), Rows(0, 7, 1), Rows(5, 1, 1), Rows(2, 6, 0), Rows(20, 9, 9),
    Rows(0, 8, 8, "block", 4), Rows(3, 6, 6, "block", 4), Rows(8, 4, 4, "block", 4), Rows(0, 5, 1, "all"), Rows(9, 3, 3, "all"),
    Rows(6, 5, 5, parents=(-1, 0, 0, 1, 3)), Rows(0, 4, 4, parents=(-1, -1, 1, 2))])
def test_pairs_are_those_of_the_mask(rows, window):
    mask = masked(rows, window)
    assert visible_pairs(rows, window) == mask.sum()
    if not rows.parents:                       # the nodes of a wide tree do not reach as far back as a chain of as many would
        assert keys_read(rows, window) == mask.any(0).sum()
    assert keys_read(rows, window) >= mask.any(0).sum()


@pytest.mark.parametrize("run, rows", [
    (Run("target", [1] * 5), Rows(6, 5, 5)),
    (Run("target", [1] * 4, see="block", align=4), Rows(4, 4, 4, "block", 4)),
    (Run("target", [1] * 5, parents=(-1, 0, 0, 2, 2)), Rows(7, 5, 5, parents=(-1, 0, 0, 2, 2)))])
@pytest.mark.parametrize("window", [None, 4])
def test_rows_describe_what_the_engine_runs(run, rows, window):
    """The batch that the runner builds for a chunk, a block of a diffusion model and a tree of drafts."""
    cached = Cached(build("llama"))
    cached.fill("a", rows.start)
    batch, _ = cached.step({"a": run})
    assert visible_pairs(rows, window) == batch.mask(0, window).sum()


def test_steps():
    assert prefill(12, batch=2, start=4) == [Rows(4, 12, 1)] * 2
    assert prefill(12, last=False) == [Rows(0, 12, 0)]
    assert decode(100, batch=3) == [Rows(100, 1, 1)] * 3
    assert decode(100, drafts=4) == [Rows(100, 5, 5, states=5)]


def test_a_work_and_its_totals():
    work = Work(2, "attention.core", "attention", 4, 100, 1, 2, 3, 4, useful_flops=60)
    plain = Work(None, "head", "linear", 4, 50, 40)
    assert work.key == (2, "attention.core") and work.bytes == 10 and work.intensity == 10.0
    assert (work.useful, plain.useful) == (60, 50)
    assert Work(0, "mlp.norm", "elementwise", 0, 0).intensity == 0.0
    assert totals([work, plain]) == Totals(150, 110, 41, 2, 3, 4)
    assert totals([work, plain]).bytes == 50 and totals([work, plain]).intensity == 3.0
    assert totals([]).intensity == 0.0
    assert len(set(COMPONENTS)) == len(COMPONENTS)
