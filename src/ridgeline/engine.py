"""The loop: schedule, run, commit. It knows nothing of text or HTTP, and of strategies only their runs and commits."""
from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ridgeline.cache import CacheStats, CacheStore, OutOfPages
from ridgeline.decoding.base import Commit, Result, Rows, Run, Strategy, Verify
from ridgeline.decoding.embed import Embed
from ridgeline.decoding.score import Score
from ridgeline.errors import ConfigError, EngineError, InvalidParams, InvalidPrompt, OutOfMemory, PromptTooLong, RidgelineError
from ridgeline.runner import Runner, Slice, SliceResult
from ridgeline.scheduling.policies import build_policy
from ridgeline.scheduling.scheduler import Scheduler
from ridgeline.sequence import Sequence
from ridgeline.types import EngineRequest, FinishReason, StepOutput


@dataclass
class EngineStats:
    """Counters since the start, and gauges of this moment. Definitions: docs/metrics.md."""

    steps: int = 0
    prompt_tokens: int = 0          # prompt tokens run through a target, recomputation included
    generation_tokens: int = 0      # tokens committed
    target_rows: int = 0            # rows of target passes, drafts included
    preemptions: int = 0
    drafts: int = 0                 # passes that verified draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)   # by place in the draft
    denoising_steps: int = 0        # passes of block diffusion over the blocks that were committed
    diffusion_blocks: int = 0       # these blocks
    diffusion_tokens: int = 0       # their tokens that were committed
    prefix_queries: int = 0         # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0            # of these, found
    running: int = 0
    waiting: int = 0
    head_rows: int = 0              # output rows of heads in passes that look for the best tokens or for logits
    head_rows_scored: int = 0       # of these, scored from both planes, parts of rows added up
    head_pruning: bool = False      # whether the last such pass of few rows read the head by halves
    kv_usage: float = 0.0           # share of cache pages (or states) that live sequences own, 0 to 1


class Engine:
    """Serves many sequences at once on one or more models.

    runners: role -> model; strategies: name -> strategy, the first is the default. All methods must be called from one
    thread; AsyncEngine and the server see to that.
    """

    def __init__(self, runners: Mapping[str, Runner], store: CacheStore, strategies: Mapping[str, Strategy], *,
                 max_model_len: int, max_num_seqs: int = 64, max_num_batched_tokens: int = 512,
                 max_mixed_prefill_tokens: int | None = None, scheduling_policy: str = "fcfs",
                 eos_token_ids: tuple[int, ...] = (), vocab_size: int, max_logprobs: int = 20, seed: int = 0):
        self.runners, self.store, self.strategies = dict(runners), store, dict(strategies)
        for name, strategy in (("score", Score()), ("embed_last", Embed("last")), ("embed_mean", Embed("mean"))):
            self.strategies.setdefault(name, strategy)
        self.default_strategy = next(iter(strategies))
        self.max_model_len, self.eos_token_ids, self.vocab_size = max_model_len, eos_token_ids, vocab_size
        self.max_logprobs = max_logprobs
        self.scheduler = Scheduler(build_policy(scheduling_policy), max_num_seqs=max_num_seqs,
                                   max_num_batched_tokens=max_num_batched_tokens,
                                   max_mixed_prefill_tokens=max_mixed_prefill_tokens)
        self.stats = EngineStats()
        # Told of each pass: its role, its slices and its seconds.
        self.on_pass: Callable[[str, Seq[Slice], float], None] | None = None
        self._random = random.Random(seed)
        self._requests: dict[str, list[Sequence]] = {}
        self._order = 0
        self._outputs: list[StepOutput] = []
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name, strategy in self.strategies.items():
            missing = [role for role in strategy.roles if role not in self.runners]
            if missing:
                raise ConfigError(f"strategy {name!r} needs a model for {', '.join(missing)}; "
                                  f"loaded: {', '.join(self.runners)}")
            longest = self.max_model_len + strategy.lookahead()
            if not self.store.can_hold(longest):
                raise ConfigError(f"the cache of {self.store.num_pages} pages of {self.store.page_size} tokens cannot hold "
                                  f"one sequence of {longest} tokens (max_model_len {self.max_model_len} and drafts); give "
                                  "it more memory or a smaller max_model_len")
            if self.scheduler.max_tokens < strategy.lookahead() + strategy.align:
                raise ConfigError(f"max_num_batched_tokens is {self.scheduler.max_tokens}; strategy {name!r} needs at least "
                                  f"{strategy.lookahead() + strategy.align}")
            if self.store.page_size % strategy.align:
                raise ConfigError(f"block_size is {self.store.page_size}; strategy {name!r} needs a multiple of "
                                  f"{strategy.align}")

    # Requests come and go.

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. raises InvalidPrompt, InvalidParams or ConfigError; nothing else is disturbed."""
        params, prompt = request.params, request.prompt_token_ids
        if request.request_id in self._requests:
            raise InvalidParams(f"request_id {request.request_id!r} is in use by a live request")
        if not prompt:
            raise InvalidPrompt("the prompt is empty; it needs at least one token")
        longest = self.max_model_len - (params.max_tokens != 0)
        if len(prompt) > longest:
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens; at most {longest} fit the context of "
                                f"{self.max_model_len} tokens")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < self.vocab_size)
            raise InvalidPrompt(f"token id {wrong} in the prompt is out of range; valid: 0 to {self.vocab_size - 1}")
        params.check_vocab(self.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                raise InvalidParams(f"{name} is {getattr(params, name)}; at most {self.max_logprobs} (max_logprobs)")
        strategy = self._strategy(request)
        strategy.check(params)
        if params.structured_outputs is not None and request.grammar is None and params.max_tokens != 0:
            raise InvalidParams("structured_outputs: the request comes without its compiled grammar")
        arrival = time.monotonic() if request.arrival is None else request.arrival
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        samples: list[Sequence] = []
        for index in range(params.n):
            seq = Sequence(request, index, (seed + index) % 2**64, strategy, self.store, arrival=arrival,
                           order=self._order, max_model_len=self.max_model_len, eos_token_ids=self.eos_token_ids)
            seq.parent = samples[0] if samples else None
            self._order += 1
            samples.append(seq)
            self.scheduler.add(seq)
        self._requests[request.request_id] = samples

    def _strategy(self, request: EngineRequest) -> Strategy:
        name = request.strategy or self.default_strategy
        if name not in self.strategies:
            raise InvalidParams(f"strategy {name!r} is not loaded; loaded: {', '.join(self.strategies)}")
        chosen = self.strategies[name]
        return self.strategies["score"] if request.params.max_tokens == 0 and not chosen.scores else chosen

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or one of its samples, now. An unknown id is no error: it may just have finished."""
        for seq in list(self._requests.get(request_id, ())):
            if index is None or seq.index == index:
                self._finish(seq, reason)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._outputs)

    def cache_stats(self) -> CacheStats:
        return self.store.stats()

    # One step.

    def step(self) -> list[StepOutput]:
        """Give every scheduled sequence one pass over its target. Returns what each of them gained."""
        grants = self.scheduler.schedule(self._admit, self._preempt)
        scheduled = list(grants)
        for seq in scheduled:
            if seq.run is None:
                self._advance(seq, None)
        self._run_drafts(grants)
        self._run_targets(grants)
        self.stats.steps += 1
        now = time.monotonic()
        for seq in scheduled:
            if seq.new_tokens or seq.done:
                self._report(seq, now)
        self.stats.running, self.stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self.stats.kv_usage = self.store.stats().usage
        heads = [runner.model.top_head.rows for runner in self.runners.values() if runner.model.top_head is not None]
        self.stats.head_rows, self.stats.head_rows_scored = sum(h.total for h in heads), sum(h.scored for h in heads)
        self.stats.head_pruning = any(h.pruning for h in heads)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _run_drafts(self, grants: dict[Sequence, int]) -> None:
        """Runs on other roles, batched by role, until every sequence waits on its target or has used its grant."""
        stalled: set[Sequence] = set()
        while True:
            by_role: dict[str, list[Sequence]] = {}
            for seq in grants:
                if seq.run is not None and seq.run.role != seq.target and seq not in stalled:
                    by_role.setdefault(seq.run.role, []).append(seq)
            if not by_role:
                return
            for role, seqs in by_role.items():
                for piece in self._execute(role, seqs, grants):
                    if not piece.last:
                        stalled.add(piece.seq)
                stalled.update(seq for seq in seqs if seq.run is not None and seq.run.role == role and
                               seq.slice_end(grants.get(seq, 0)) == seq.offset)

    def _run_targets(self, grants: dict[Sequence, int]) -> None:
        by_role: dict[str, list[Sequence]] = {}
        for seq in grants:
            if seq.run is not None and seq.run.role == seq.target:
                by_role.setdefault(seq.target, []).append(seq)
        for role, seqs in by_role.items():
            pieces = self._execute(role, [s for s in seqs if s in grants], grants)
            self.stats.target_rows += sum(p.count for p in pieces)

    def _execute(self, role: str, seqs: list[Sequence], grants: dict[Sequence, int]) -> list[Slice]:
        """One forward pass of a role over the next slice of each sequence; results go to their strategies."""
        pieces: dict[Sequence, Slice] = {}
        for seq in seqs:
            if seq in grants and seq.run is not None:
                piece = self._place(seq, seq.slice_end(grants[seq]), grants)
                if piece is not None:
                    pieces[seq] = piece
        ready = [piece for seq, piece in pieces.items() if seq in grants]     # a later one may have preempted it
        if not ready:
            return []
        started = time.monotonic()
        try:
            results = self.runners[role].execute(ready)
        except Exception as error:  # a failing pass must not take the requests of other passes with it
            for piece in ready:
                self._fail(piece.seq, error)
            return []
        if self.on_pass is not None:
            self.on_pass(role, ready, time.monotonic() - started)
        for piece, result in zip(ready, results):
            self._receive(piece, result)
        return ready

    def _place(self, seq: Sequence, end: int, grants: dict[Sequence, int]) -> Slice | None:
        """Reserve cache for the run's next slice, preempting others, or itself, where memory is short."""
        run = seq.run
        assert run is not None
        if end == seq.offset:
            return None
        tokens = run.tokens[seq.offset:end]
        written = max(0, min(run.written() - seq.offset, len(tokens)))
        at = run.at if seq.offset == 0 else None
        rollback = max((len(w.tokens) for w in run.want if isinstance(w, Verify)), default=0)
        while True:
            try:
                placement = self.store.reserve(
                    seq.id, run.role, tokens, at=at, write=written, offset=seq.offset,
                    rollback=rollback if end == len(run.tokens) else 0, publishable=run.feed is None,
                    parents=None if run.parents is None else run.parents[seq.offset:end])
                return Slice(seq, run, seq.offset, len(tokens), placement)
            except OutOfPages as error:
                victim = self.scheduler.victim()
                if len(self.scheduler.running) == 1:       # to be put back and start again would never end
                    self._fail(seq, OutOfMemory(f"the cache cannot hold this request even alone: {error}"))
                    return None
                grants.pop(victim, None)
                self._preempt(victim)
                if victim is seq:
                    return None

    def _receive(self, piece: Slice, result: SliceResult) -> None:
        seq = piece.seq
        seq.offset += piece.count
        seq.prompt_logprobs += result.prompt_logprobs
        if piece.run.role == seq.target:
            self.stats.prompt_tokens += max(0, min(seq.prompt_len, piece.placement.context) - piece.placement.start)
        if result.hidden is not None:
            seq.hidden.append(result.hidden)
        if result.result is None:
            return
        if result.error is not None:
            self._fail(seq, result.error)
            return
        if result.nan:
            self.store.reset_prefix_cache()         # pages that this sequence has published may be broken as well
            self._fail(seq, EngineError("the model's output is not a number (NaN)"))
            return
        if any(token < 0 for token in result.result.tokens):
            self._fail(seq, InvalidParams("no token can be chosen: the request's masks exclude every token"))
            return
        if seq.hidden:
            result.result.hidden = Rows.joined(seq.hidden)
        seq.offset, seq.hidden, seq.run = 0, [], None
        self._advance(seq, result.result)

    def _advance(self, seq: Sequence, result: Result | None) -> None:
        """Let the strategy go on to its next run; commits on the way take effect."""
        try:
            if seq.steps is None:
                seq.steps = seq.strategy.run(seq)
                wanted = next(seq.steps, None)
            else:
                assert result is not None
                wanted = self._send(seq, result)
            while isinstance(wanted, Commit) and not seq.done:
                self._commit(seq, wanted)
                wanted = None if seq.done else next(seq.steps, None)
        except RidgelineError as error:
            self._fail(seq, error)
            return
        except Exception as error:  # a fault in one strategy is that request's error, not the engine's end
            self._fail(seq, error)
            return
        if isinstance(wanted, Run) and wanted.tokens:
            seq.run = wanted
        elif not seq.done:
            fault = "yielded a run without tokens" if wanted is not None else "ended before the sequence did"
            self._fail(seq, EngineError(f"{type(seq.strategy).__name__} {fault}"))

    @staticmethod
    def _send(seq: Sequence, result: Result) -> Run | Commit | None:
        assert seq.steps is not None
        try:
            return seq.steps.send(result)
        except StopIteration:
            return None

    def _commit(self, seq: Sequence, commit: Commit) -> None:
        """Append tokens up to the first that ends the sequence, and let the cache keep what agrees with them."""
        logprobs = list(commit.logprobs)
        before = len(seq.tokens)
        for token in commit.tokens:
            seq.tokens.append(token)
            self._check_end(seq, token)
            if seq.done:
                break
        added = len(seq.tokens) - before
        if seq.remaining <= 0 and not seq.done:
            seq.finish_reason = FinishReason.LENGTH
        seq.new_tokens += seq.tokens[before:]
        seq.new_logprobs += logprobs[:added]
        self.stats.generation_tokens += added
        if commit.denoised:
            self.stats.denoising_steps += commit.denoised
            self.stats.diffusion_blocks += 1
            self.stats.diffusion_tokens += added
        accepted = min(max(0, len(commit.tokens) - 1), added) if commit.drafted else 0
        if commit.drafted:
            self._count_drafts(commit.drafted, accepted)
        seq.metrics.draft_tokens += commit.drafted
        seq.metrics.accepted_tokens += accepted
        seq.metrics.target_steps += 1
        if commit.embedding is not None:
            seq.embedding = commit.embedding.tensor[0].float().tolist()
        self.store.commit(seq.id, commit.keep, seq.target)

    def _count_drafts(self, drafted: int, accepted: int) -> None:
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += drafted
        stats.accepted_tokens += accepted
        stats.accepted_per_pos += [0] * (accepted - len(stats.accepted_per_pos))
        for place in range(accepted):
            stats.accepted_per_pos[place] += 1

    @staticmethod
    def _check_end(seq: Sequence, token: int) -> None:
        params = seq.params
        if seq.output_len >= params.min_tokens:
            if token in params.stop_token_ids:
                seq.finish_reason, seq.stop_token = FinishReason.STOP, token
            elif token in seq.eos_token_ids and not params.ignore_eos:
                seq.finish_reason = FinishReason.STOP
        if seq.remaining <= 0 and not seq.done:
            seq.finish_reason = FinishReason.LENGTH

    # Joining, leaving, being put back.

    def _admit(self, seq: Sequence) -> bool:
        """Make a sequence resident if there is room for its first rows; take over what the prefix cache holds."""
        parent, params = seq.parent, seq.params
        lookup = seq.strategy.reuse_prefix and params.prompt_logprobs is None    # those need every row of the prompt
        if parent is not None and parent.resident and seq.strategy.reuse_prefix:
            length = (seq.prompt_len - 1) // seq.strategy.align * seq.strategy.align
            self.store.fork(parent.id, seq.id, seq.tokens, length=min(length, parent.held(parent.target)))
        else:
            self.store.add(seq.id, seq.tokens, domain=seq.strategy.domain, salt=params.cache_salt,
                           publish=seq.strategy.reuse_prefix, align=seq.strategy.align)
        seq.resident = True
        lookup = lookup and not seq.held(seq.target)       # a parent with recurrent layers may have no state to fork
        for role in seq.strategy.roles if lookup else ():
            if not seq.held(role):
                self.store.match_prefix(seq.id, role)
        cached = seq.held(seq.target)
        rows = min(seq.wanted_rows()[1], self.scheduler.max_tokens)
        need = -(-rows // self.store.page_size) + 1
        short = any(self.store.free_pages(role) < need + len(self.scheduler.running)
                    or (self.store.num_states and self.store.free_states(role) < 2) for role in seq.strategy.roles)
        if short and self.scheduler.running:       # running ones may each need a page soon; alone it always fits
            self.store.free(seq.id)
            seq.restart()
            return False
        if seq.metrics.scheduled is None:
            seq.metrics.scheduled = time.monotonic()
            seq.metrics.cached_tokens = cached
            if lookup:
                self.stats.prefix_queries += seq.prompt_len
                self.stats.prefix_hits += cached
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take the cache away; the sequence waits and is recomputed from its committed tokens."""
        self.store.free(seq.id)
        seq.restart()
        seq.metrics.preemptions += 1
        self.stats.preemptions += 1
        self.scheduler.requeue(seq)

    def _fail(self, seq: Sequence, error: Exception) -> None:
        seq.error = error if isinstance(error, RidgelineError) else EngineError(f"{type(error).__name__}: {error}")
        if seq.error is not error:
            seq.error.__cause__ = error
        self._finish(seq, FinishReason.ERROR)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence from outside its strategy, and report it at once."""
        seq.finish_reason = reason
        self._report(seq, time.monotonic())

    def _report(self, seq: Sequence, now: float) -> None:
        samples = self._requests.get(seq.request_id)
        if samples is None or seq not in samples:
            return                                       # reported before, by a failure or an abort
        metrics = seq.metrics
        if seq.new_tokens:
            metrics.first_token = now if metrics.first_token is None else metrics.first_token
            metrics.last_token = now
            metrics.completion_tokens = seq.output_len
            seq.token_times += [now] * len(seq.new_tokens)
        told = seq.params.prompt_logprobs is not None and (
            metrics.first_token == now or (seq.done and metrics.first_token is None))
        if seq.done:
            metrics.finished = now
            if seq.resident:
                self.store.free(seq.id)
            seq.restart()
            self.scheduler.remove(seq)
            samples.remove(seq)
            if not samples:
                del self._requests[seq.request_id]
        self._outputs.append(StepOutput(
            seq.request_id, seq.index, seq.new_tokens, seq.new_logprobs,
            seq.prompt_logprobs if told and seq.index == 0 else None, seq.finish_reason, seq.stop_token, seq.error, metrics,
            seq.embedding))
        seq.new_tokens, seq.new_logprobs = [], []

