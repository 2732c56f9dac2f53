"""Passes that want nothing but most likely tokens: one call of the backend, and no tensor.

Each of the dozen small tensor operations between a pass and its tokens finds its code pushed out of the caches by the weights.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ridgeline.cache.view import CacheView
from ridgeline.decoding.base import Sample
from ridgeline.models.base import CausalLM

if TYPE_CHECKING:
    from ridgeline.runner import Slice


def likeliest(model: CausalLM, slices: Sequence[Slice], view: CacheView) -> list[list[int]] | None:
    """The tokens of each slice, none for one that is not its run's last. None: this is no such pass, or a logit is not finite;
    the slices may then be run in the usual way, also once more, since whole passes keep no state but keys and values."""
    whole = model.whole
    if whole is None or model.capped or model.feed_width is not None:
        return None
    index, counts, total = list[int](), list[int](), 0
    for s in slices:
        rows = _rows(s)
        if rows is None:
            return None
        index += [total + row - s.first for row in rows]
        counts.append(len(rows))
        total += s.count
    if not index or any(a >= b for a, b in pairwise(index)):
        return None
    tokens = whole.argmax([s.row() for s in slices], None if len(index) == total else index, view)
    if min(tokens) < 0:
        return None
    found, at = list[list[int]](), 0
    for count in counts:
        found.append(tokens[at:at + count])
        at += count
    return found


def _rows(s: Slice) -> Sequence[int] | None:
    """Indexes into the run of the rows whose most likely tokens are wanted; None: something else is wanted too."""
    seq, want = s.seq, s.run.want[0] if len(s.run.want) == 1 else None
    if not isinstance(want, Sample) or want.forbid or want.confidence or want.keep_q:
        return None
    if not (seq.params.greedy or want.greedy) or not seq.plain_masks or seq.matcher is not None:
        return None
    if seq.params.prompt_logprobs is not None:
        return None
    if not s.last:
        return ()
    return (len(s.run.tokens) - 1,) if want.rows is None else want.rows
