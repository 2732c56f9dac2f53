"""From runs to results: slices of many sequences become one ragged batch, one forward pass, and small answers."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ridgeline.batch import Batch, PassRow, upper
from ridgeline.cache.view import CacheView
from ridgeline.decoding.base import Hidden, Result, Rows, Run, Sample, Verify
from ridgeline.decoding.verify import VerifyRequest, verify_batch
from ridgeline.errors import EngineError
from ridgeline.likeliest import likeliest
from ridgeline.models.backend import TopHead
from ridgeline.models.base import CausalLM, ModelOutput
from ridgeline.noise import Purpose
from ridgeline.sampling import RowContext, distribution, process, sample, top_logprobs
from ridgeline.top_tokens import top_tokens
from ridgeline.types import TokenLogprobs

if TYPE_CHECKING:
    from ridgeline.cache import Placement
    from ridgeline.sequence import Sequence as LiveSequence

# Rows of prompt log-probabilities computed at once: 64 rows of a 262,144 vocabulary are 67 MB of fp32 logits.
PROMPT_LOGPROB_ROWS = 64


@dataclass
class Slice:
    """Tokens first .. first + count of a sequence's run, and where the cache put them."""

    seq: LiveSequence
    run: Run
    first: int
    count: int
    placement: Placement

    @property
    def last(self) -> bool:
        return self.first + self.count == len(self.run.tokens)

    def tokens(self) -> Sequence[int]:
        return self.run.tokens[self.first:self.first + self.count]

    def positions(self) -> list[int]:
        """RoPE positions: consecutive, but in a tree one more than the parent's."""
        start = self.placement.start
        if self.run.parents is None:
            return list(range(start, start + self.count))
        base = start - self.first                    # cache position of the run's first token
        return [base + d for d in _depths(self.run)[self.first:self.first + self.count]]

    def row(self) -> PassRow:
        place, run = self.placement, self.run
        ends = None
        if run.see != "causal":
            at = torch.arange(place.start, place.start + self.count)
            ends = upper(at, place.start + self.count, run.see, run.align).tolist()
        return (place.start, self.tokens(), place.pages, None if run.parents is None else self.positions(), ends,
                self.parents())

    def parents(self) -> tuple[int, ...] | None:
        """Parents within the slice, or None for a plain chain."""
        if self.run.parents is None:
            return None
        local = tuple(p - self.first if p >= self.first else -1
                      for p in self.run.parents[self.first:self.first + self.count])
        return None if all(p == i - 1 for i, p in enumerate(local)) else local

    def feed(self, width: int, like: Tensor) -> Tensor:
        """(count, width): the rows fed with these tokens; zeros where the run has none."""
        rows = self.run.feed
        out = like.new_zeros(self.count, width)
        if rows is not None:
            lead = len(self.run.tokens) - len(rows)              # tokens without a row
            a, b = max(self.first - lead, 0), max(self.first + self.count - lead, 0)
            if b > a:
                out[self.count - (b - a):] = rows.tensor[a:b].to(out.dtype)
        return out


@dataclass
class SliceResult:
    """result: None until the run's last slice; hidden: rows of this slice where the run wants them; nan: no token could
    be chosen because the model's output is not a number; error: why this request alone cannot go on."""

    result: Result | None
    nan: bool = False
    error: EngineError | None = None
    hidden: Tensor | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class _Wanted:
    """One slice's rows among the rows the model returns, by index into the slice."""

    rows: list[int]
    base: int = 0

    def at(self, row: int) -> int:
        return self.base + bisect_left(self.rows, row)


def build_batch(slices: Sequence[Slice], page_size: int, device: str | torch.device = "cpu", *,
                wanted: Sequence[int] | None = None, taps: tuple[int, ...] = (), feed: Tensor | None = None) -> Batch:
    """One row per slice, in order. wanted: indexes into the flat tokens whose hidden rows are read (None = all)."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    offsets, starts, read, write = [0], [], [], []
    lo: list[int] = []
    hi: list[int] = []
    for s in slices:
        start, pages = s.placement.start, s.placement.pages
        tokens += s.tokens()
        positions += s.positions()
        slots += [pages[i // page_size] * page_size + i % page_size for i in range(start, start + s.count)] \
            if pages else [0] * s.count
        lo += [0] * s.count
        if s.run.see == "causal":
            hi += range(start + 1, start + s.count + 1)
        else:
            hi += upper(torch.arange(start, start + s.count), start + s.count, s.run.see, s.run.align).tolist()
        offsets.append(len(tokens))
        starts.append(start)
        read.append(s.placement.state_read)
        write += s.placement.state_write
    widest = max(len(s.placement.pages) for s in slices)
    table = [[*s.placement.pages, *[0] * (widest - len(s.placement.pages))] for s in slices]
    flat = torch.tensor([tokens, positions, slots, lo, hi], dtype=torch.int64, device=device)      # (5, T)
    return Batch(tokens=flat[0], positions=flat[1], slots=flat[2], lo=flat[3], hi=flat[4], feed=feed,
                 offsets=tuple(offsets), starts=tuple(starts), parents=tuple(s.parents() for s in slices),
                 page_size=page_size, page_table=torch.tensor(table, dtype=torch.int64, device=device),
                 state_read=tuple(read), state_write=tuple(write), taps=taps,
                 wanted=None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=device))


class Runner:
    """Runs slices on one model."""

    def __init__(self, model: CausalLM, view: CacheView, device: str | torch.device = "cpu"):
        self.model, self.view, self.device = model, view, device

    def execute(self, slices: Sequence[Slice]) -> list[SliceResult]:
        """One forward pass over all slices; result i belongs to slice i."""
        tokens = self._likeliest(slices)
        if tokens is None:
            return self._execute(slices)
        return [SliceResult(Result(tokens=own) if s.last else None) for s, own in zip(slices, tokens)]

    def _likeliest(self, slices: Sequence[Slice]) -> list[list[int]] | None:
        return likeliest(self.model, slices, self.view)

    @torch.inference_mode()
    def _execute(self, slices: Sequence[Slice]) -> list[SliceResult]:
        wanted = _collect(slices)
        index, total = list[int](), 0
        for s, w in zip(slices, wanted):
            index += [total + row for row in w.rows]
            total += s.count
        out = self.forward(slices, None if len(index) == total else index)      # all, as in decoding: nothing is to be gathered
        results = [SliceResult(Result() if s.last else None) for s in slices]
        self._hidden(slices, wanted, out.hidden, out.taps, results)
        self._prompt_logprobs(slices, wanted, out.hidden, results)
        self._choose(slices, wanted, out.hidden, results)
        return results

    def forward(self, slices: Sequence[Slice], wanted: list[int] | None) -> ModelOutput:
        """wanted: indexes into the flat tokens whose hidden rows are read, None = all."""
        taps = tuple(sorted({layer for s in slices for w in s.run.want if isinstance(w, Hidden) for layer in w.layers}))
        width = self.model.feed_width
        if self.model.whole is not None and not taps and width is None:
            return ModelOutput(self.model.whole([s.row() for s in slices], wanted, self.view))
        feed = None
        if width is not None:
            like = next(self.model.parameters(), torch.empty(0))
            feed = torch.cat([s.feed(width, like) for s in slices])                              # (T, width)
        batch = build_batch(slices, self.view.page_size, self.device, wanted=wanted, taps=taps, feed=feed)
        out: ModelOutput = self.model(batch, self.view)
        return out

    def _hidden(self, slices: Sequence[Slice], wanted: Sequence[_Wanted], hidden: Tensor, taps: dict[int, Tensor],
                results: list[SliceResult]) -> None:
        for s, w, (offset, count), result in zip(slices, wanted, _spans(slices), results):
            for want in s.run.want:
                if isinstance(want, Hidden):
                    result.hidden = (torch.cat([taps[i][offset:offset + count] for i in want.layers], -1)
                                     if want.layers else hidden[w.base:w.base + count])

    def _prompt_logprobs(self, slices: Sequence[Slice], wanted: Sequence[_Wanted], hidden: Tensor,
                         results: list[SliceResult]) -> None:
        for s, w, result in zip(slices, wanted, results):
            rows = _prompt_rows(s)
            for a in range(0, len(rows), PROMPT_LOGPROB_ROWS):
                part = rows[a:a + PROMPT_LOGPROB_ROWS]
                logits = self.model.logits(hidden[[w.at(row) for row in part]])
                following = torch.tensor([s.seq.tokens[s.placement.start + row + 1] for row in part])
                result.prompt_logprobs += top_logprobs(logits, following.to(logits.device),
                                                       s.seq.params.prompt_logprobs or 0)

    def _choose(self, slices: Sequence[Slice], wanted: Sequence[_Wanted], hidden: Tensor,
                results: list[SliceResult]) -> None:
        """Sample and Verify: all rows of the batch in one go."""
        draws: list[_Draw] = []
        for s, w, result in zip(slices, wanted, results):
            if result.result is not None:
                draws += [_Draw(s, want, w, result.result) for want in s.run.want if not isinstance(want, Hidden)]
        draws = self._take_few(draws, hidden) if draws else draws
        if not draws:
            return
        index = [d.wanted.at(row - d.slice.first) for d in draws for row in d.rows]
        whole = index == list(range(len(hidden)))
        logits = self.model.logits(hidden if whole else hidden[index]).float()               # (N, V)
        contexts = [c for d in draws for c in d.contexts()]
        at = 0
        for d in draws:
            d.at, at = at, at + len(d.rows)
        processed = process(logits, contexts)
        processed = _forbid(processed, logits, draws)
        processed = _obey(processed, logits, draws)
        for group in _alike(draws):
            _draw(group, processed, contexts, self.model.top_head)
        _verify([d for d in draws if isinstance(d.want, Verify)], processed, contexts)
        for d in draws:
            k = d.slice.seq.params.logprobs
            if k is not None:
                rows = [d.at + d.rows.index(row) for row in d.told]
                chosen = torch.tensor(d.result.tokens, device=logits.device)
                if min(d.result.tokens) >= 0:
                    d.result.logprobs = top_logprobs(logits[rows], chosen, k)
        for d in draws:
            if d.error is None and min(d.result.tokens) < 0 and logits[d.at:d.at + len(d.rows)].isnan().any():
                next(r for r in results if r.result is d.result).nan = True
            if d.error is not None:
                next(r for r in results if r.result is d.result).error = d.error

    def _take_few(self, draws: list[_Draw], hidden: Tensor) -> list[_Draw]:
        """Serve the draws that need a few of the logits only, where the model's head finds these without the others; returns
        the rest. The tokens are the same either way."""
        head, few = self.model.top_head, [d for d in draws if d.few]
        if head is None or not few:
            return draws
        index = [d.wanted.at(row - d.slice.first) for d in few for row in d.rows]
        own = hidden if index == list(range(len(hidden))) else hidden[index]
        if all(d.plain for d in few) and not self.model.capped:
            flat: list[int | None] = [token if token >= 0 else None for token in head.argmax(own).tolist()]
        else:
            contexts = [(c, d.purpose) for d in few for c in d.contexts()]
            flat = top_tokens(self.model, own, [c for c, _ in contexts], [c.uniform(purpose) for c, purpose in contexts])
        at, drafts = 0, []
        left = [] if len(few) == len(draws) else [d for d in draws if not d.few]
        for d in few:
            tokens = [token for token in flat[at:at + len(d.rows)] if token is not None]
            at += len(d.rows)
            if len(tokens) < len(d.rows) or not d.may_have(tokens):   # the whole logits tell about these
                left.append(d)
                continue
            d.result.tokens = tokens
            if isinstance(d.want, Verify):
                drafts.append(d)
        _verify(drafts, hidden, ())
        return left


class _Draw:
    """One Sample or Verify of one slice. rows: indexes into the run; told: the rows its resulting tokens come from."""

    def __init__(self, piece: Slice, want: Sample | Verify, wanted: _Wanted, result: Result):
        self.slice, self.want, self.wanted, self.result = piece, want, wanted, result
        self.rows = _choice_rows(piece.run, want)
        self.told = self.rows
        self.at = 0                      # first row in the batch's logits
        self.error: EngineError | None = None

    @property
    def purpose(self) -> Purpose:
        return self.want.purpose if isinstance(self.want, Sample) else Purpose.SAMPLE

    @property
    def sampled_q(self) -> bool:
        return isinstance(self.want, Verify) and self.want.q is not None

    @property
    def plain(self) -> bool:
        """Whether the most likely token of each row is wanted, and nothing changes the order of the logits."""
        seq = self.slice.seq
        return seq.plain_masks and (seq.params.greedy or (isinstance(self.want, Sample) and self.want.greedy))

    @property
    def few(self) -> bool:
        """Whether a few of each row's logits decide."""
        w, seq = self.want, self.slice.seq
        if seq.matcher is not None and not (seq.params.greedy or (isinstance(w, Sample) and w.greedy)):
            return False                 # a grammar changes what is drawn, but not a most likely token that it allows
        if isinstance(w, Verify):
            return w.q is None and seq.few_logits
        return (seq.few_logits or (w.greedy and seq.params.logprobs is None)) and not (w.forbid or w.confidence or w.keep_q)

    def contexts(self) -> list[RowContext]:
        """Each row with its own history: the committed output and the drafts on the way to the row."""
        seq, run = self.slice.seq, self.slice.run
        salt = self.want.salt if isinstance(self.want, Sample) else 0
        shift = self.want.shift if isinstance(self.want, Sample) else 1
        base = self.slice.placement.start - self.slice.first
        params = seq.greedy_params if isinstance(self.want, Sample) and self.want.greedy else seq.params
        depth = _depths(run) if run.parents is not None else None
        out = []
        for row in self.rows:
            position = base + (row if depth is None else depth[row]) + shift
            output: Sequence[int] = ()
            if seq.needs_history:
                output = seq.tokens[seq.prompt_len:] + self._drafts_before(row, base)
            out.append(RowContext(params, seq.seed, position, seq.prompt if seq.needs_history else (), output,
                                  seq.eos_token_ids, salt))
        return out

    def outputs(self) -> list[list[int]]:
        """What each row's token would follow: the committed output and the drafts on the way to the row."""
        seq, base = self.slice.seq, self.slice.placement.start - self.slice.first
        committed = seq.tokens[seq.prompt_len:]
        return [committed + self._drafts_before(row, base) for row in self.rows]

    def may_have(self, tokens: Sequence[int]) -> bool:
        """Whether the request's grammar allows each row its most likely token, which then is the most likely it allows."""
        matcher = self.slice.seq.matcher
        try:
            return matcher is None or all(matcher.allows(*pair) for pair in zip(self.outputs(), tokens))
        except EngineError:
            return False                 # `_obey` meets it again, and tells

    def _drafts_before(self, row: int, base: int) -> list[int]:
        """Tokens of the run on the path to `row`, that row included, which are not committed yet."""
        run, committed = self.slice.run, len(self.slice.seq.tokens)
        if isinstance(self.want, Sample) and self.want.shift == 0:
            return []                    # a row of a block that speaks about its own position
        path = []
        while row >= 0:
            if (base + row if run.parents is None else base + _depths(run)[row]) < committed:
                break
            path.append(run.tokens[row])
            row = row - 1 if run.parents is None else run.parents[row]
        return self._drafts_before_run(base) + path[::-1]

    def _drafts_before_run(self, base: int) -> list[int]:
        """Tokens of earlier runs since the last commit, on which this run builds."""
        seq, role = self.slice.seq, self.slice.run.role
        committed = len(seq.tokens)
        if base <= committed:
            return []
        held = seq.store.held(seq.id, role)
        return seq.store.provisional(seq.id, role)[committed - held:base - held]


def _depths(run: Run) -> list[int]:
    depth: list[int] = []
    for parent in run.parents or ():
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    return depth


def _spans(slices: Sequence[Slice]) -> list[tuple[int, int]]:
    """(first flat token, tokens) of each slice."""
    spans, at = [], 0
    for s in slices:
        spans.append((at, s.count))
        at += s.count
    return spans


def _choice_rows(run: Run, want: Sample | Verify) -> list[int]:
    """Indexes into the run of the rows whose logits a want reads."""
    n = len(run.tokens)
    if isinstance(want, Verify):
        return list(range(n - len(want.tokens) - 1, n))
    return [n - 1] if want.rows is None else list(want.rows)


def _prompt_rows(s: Slice) -> list[int]:
    """Rows of the slice that tell the log-probability of a prompt token not told yet."""
    seq = s.seq
    if seq.params.prompt_logprobs is None or s.run.role != seq.target or s.run.see != "causal":
        return []
    start = s.placement.start
    return [row for row in range(s.count) if len(seq.prompt_logprobs) <= start + row + 1 < seq.prompt_len]


def _collect(slices: Sequence[Slice]) -> list[_Wanted]:
    out, base = [], 0
    for s in slices:
        rows: set[int] = set(_prompt_rows(s))
        for want in s.run.want:
            if isinstance(want, Hidden):
                rows.update(range(s.count) if not want.layers else ())
            elif s.last:
                rows.update(row - s.first for row in _choice_rows(s.run, want))
        out.append(_Wanted(sorted(rows), base))
        base += len(rows)
    return out


def _forbid(processed: Tensor, logits: Tensor, draws: Sequence[_Draw]) -> Tensor:
    for d in draws:
        if isinstance(d.want, Sample) and d.want.forbid:
            if processed is logits:
                processed = logits.clone()
            processed[d.at:d.at + len(d.rows), list(d.want.forbid)] = float("-inf")
    return processed


def _obey(processed: Tensor, logits: Tensor, draws: Sequence[_Draw]) -> Tensor:
    """Every row of a request with a grammar keeps the tokens that may follow the row's own output. A row behind a draft that
    the grammar refuses is left alone: that draft has no probability, so the row's token is never used."""
    for d in draws:
        matcher = d.slice.seq.matcher
        if matcher is None:
            continue
        if processed is logits:
            processed = logits.clone()
        try:
            masks = [matcher.mask(output) for output in d.outputs()]
        except EngineError as error:
            d.error = error
            continue
        for i, mask in enumerate(masks, d.at):
            if mask is not None:
                bits = np.unpackbits(mask.view(np.uint8), count=processed.shape[1], bitorder="little")      # (V,)
                _blank(processed[i], bits == 0)
    return processed


def _blank(row: Tensor, where: npt.NDArray[np.bool_]) -> None:
    if row.device.type == "cpu":
        np.copyto(row.numpy(), -np.inf, where=where)      # 100 us for 262,144 logits, torch's masked_fill_ 270
    else:
        row.masked_fill_(torch.from_numpy(where).to(row.device), float("-inf"))


def _alike(draws: Sequence[_Draw]) -> list[list[_Draw]]:
    """Draws that can share one call: the same purpose, and keeping q or not. Verification against q draws by itself."""
    groups: dict[tuple[Purpose, bool], list[_Draw]] = {}
    for d in draws:
        if not d.sampled_q:
            groups.setdefault((d.purpose, isinstance(d.want, Sample) and d.want.keep_q), []).append(d)
    return list(groups.values())


def _draw(group: Sequence[_Draw], processed: Tensor, contexts: Sequence[RowContext], head: TopHead | None) -> None:
    rows = [d.at + i for d in group for i in range(len(d.rows))]
    keep = isinstance(group[0].want, Sample) and group[0].want.keep_q
    logits = processed if len(rows) == len(processed) else processed[rows]
    wide, few = (None, None) if head is None else (head.draw, head.draw_few)
    tokens, probs = sample(logits, [contexts[r] for r in rows], group[0].purpose, keep_probs=keep, wide=wide, few=few)
    flat, at = tokens.tolist(), 0
    for d in group:
        n = len(d.rows)
        d.result.tokens = flat[at:at + n]
        if probs is not None:
            d.result.q = Rows(probs[at:at + n])
        if isinstance(d.want, Sample) and d.want.confidence:
            own = logits[at:at + n]                                                       # (n, V)
            chosen = own.gather(1, tokens[at:at + n].clamp(min=0)[:, None])[:, 0]
            d.result.confidence = (chosen - own.logsumexp(-1)).exp().tolist()
        at += n


def _verify(draws: Sequence[_Draw], processed: Tensor, contexts: Sequence[RowContext]) -> None:
    """Accepted drafts and the token after them; keep names the rows of the run that stay."""
    if not draws:
        return
    requests = [_request(d, processed, contexts) for d in draws]
    for d, verdict in zip(draws, verify_batch(requests)):
        assert isinstance(d.want, Verify)
        first = len(d.slice.run.tokens) - len(d.want.tokens)       # index of the first draft in the run
        accepted = [first + i for i in verdict.path]
        d.result.tokens = [d.slice.run.tokens[i] for i in accepted] + [verdict.token]
        d.result.keep = [*range(first), *accepted]
        d.told = [first - 1, *accepted]


def _request(d: _Draw, processed: Tensor, contexts: Sequence[RowContext]) -> VerifyRequest:
    want, run = d.want, d.slice.run
    assert isinstance(want, Verify)
    n = len(want.tokens)
    first = len(run.tokens) - n
    parents = None if run.parents is None else [p - first if p >= first else -1 for p in run.parents[first:]]
    if want.q is None:
        return VerifyRequest(tokens=want.tokens, parents=parents, sampled=d.result.tokens, rule=want.rule)
    own = contexts[d.at:d.at + n + 1]
    finals = [c.uniform(Purpose.RESIDUAL) for c in own[:-1]] + [own[-1].uniform(Purpose.SAMPLE)]
    return VerifyRequest(tokens=want.tokens, parents=parents, p=(distribution(processed[d.at:d.at + n + 1], own), 0),
                         q=[(rows.tensor, 0) for rows in want.q], rule=want.rule,
                         accept_u=[c.uniform(Purpose.ACCEPT) for c in own[:-1]], final_u=finals)
