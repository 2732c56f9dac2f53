"""Passes of a loaded model, timed: each component of each layer, the pass and the whole step of the engine around it."""
from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.analysis.hooks import ModuleTrace
from ridgeline.analysis.work import Rows
from ridgeline.bench.measure import wanted_rows
from ridgeline.decoding.base import Result
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.runner import Runner, Slice, SliceResult
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import TARGET, EngineRequest

Key = tuple[int | None, str]
Event = tuple[int | None, str, int, int, int]          # layer, component, rows, start and end in ns

DISPATCH: Key = (None, "dispatch")


@dataclass
class TracedPass:
    """One forward pass with the choice of its tokens: its rows, its start and end (ns of the monotonic clock), its events."""

    step: list[Rows]
    start_ns: int
    end_ns: int
    events: list[Event] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def seconds(self) -> dict[Key, float]:
        """Of each (layer, component); what lies between the events is "dispatch", so that the sum is `wall_s`."""
        found: dict[Key, float] = {}
        for layer, component, _, start, end in self.events:
            found[layer, component] = found.get((layer, component), 0.0) + (end - start) / 1e9
        found[DISPATCH] = self.wall_s - sum(found.values())
        return found


@dataclass(frozen=True)
class Measured:
    """Of several like steps: median seconds of each (layer, component), of a pass and of the engine's whole step.

    `step_s` includes scheduling and commits; the difference to `pass_s` is what the engine adds.
    """

    step: Sequence[Rows]
    seconds: Mapping[Key, float]
    pass_s: float
    step_s: float
    best_s: float                   # of the steps
    repeats: int


@contextmanager
def traced(llm: LLM, role: str = TARGET, events: bool = True) -> Iterator[list[TracedPass]]:
    """Every pass of a role's model while the context is open. events=False: only what a pass was and how long it took."""
    runner, passes = llm.engine.runners[role], list[TracedPass]()
    execute, source = runner.execute, Events.of(llm, role) if events else None

    def collect() -> None:
        if source is not None and passes and not passes[-1].events:
            passes[-1].events = source.take()

    def timed(slices: Sequence[Slice]) -> list[SliceResult]:
        collect()                                          # of the pass before, so that a step alone is not charged with it
        start = time.monotonic_ns()
        results = execute(slices)
        if source is not None and source.waits:
            source.finish()
        end = time.monotonic_ns()
        passes.append(TracedPass([Rows(s.placement.start, s.count, wanted_rows(s)) for s in slices], start, end))
        return results

    runner.execute = timed  # type: ignore[method-assign]
    if source is not None:
        source.start()
    try:
        yield passes
    finally:
        collect()
        if source is not None:
            source.stop()
        del runner.execute


class Events:
    """Where the events of a model come from: its native engine, hooks on the modules that torch runs, or both."""

    def __init__(self, engine: Any, hooks: ModuleTrace | None):
        self.engine, self.hooks = engine, hooks
        self.waits = hooks is not None and hooks.device.type != "cpu"

    @classmethod
    def of(cls, llm: LLM, role: str) -> Events:
        runner: Runner = llm.engine.runners[role]
        engine = native_engine(runner.model)
        hooks = ModuleTrace(runner.model, torch.device(runner.device))
        return cls(engine, hooks if hooks.any else None)

    def start(self) -> None:
        if self.engine is not None:
            self.engine.take_trace()
            self.engine.trace(True)
        if self.hooks is not None:
            self.hooks.start()

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.trace(False)
        if self.hooks is not None:
            self.hooks.stop()

    def finish(self) -> None:
        assert self.hooks is not None
        torch.cuda.synchronize(self.hooks.device)

    def take(self) -> list[Event]:
        events: list[Event] = [] if self.engine is None else self.engine.take_trace()
        return sorted(events + self.hooks.take(), key=lambda e: e[3]) if self.hooks is not None else events


def native_engine(model: torch.nn.Module) -> Any:
    """The native engine that runs a model's layers, or None where torch runs all."""
    for module in model.modules():
        for part in (module, getattr(module, "mix", None), getattr(module, "feed", None)):
            engine = getattr(part, "engine", None)
            if engine is not None:
                return engine
    return None


def measure(llm: LLM, step: Sequence[Rows], *, repeats: int = 5, events: bool = True,
            before: Callable[[], object] = lambda: None) -> Measured:
    """Time steps of this shape: greedy requests with random tokens through the engine.

    What lies before the rows is never computed: its keys and values are random. Decoding rows go on from step to step, so
    that their context grows by one each. `start` of rows with several tokens is rounded down to whole pages. `before` is called
    before each repeat.
    raises ConfigError where the step does not fit one pass or the cache.
    """
    total, budget = sum(r.tokens for r in step), llm.config.max_num_batched_tokens
    if total > budget:
        raise ConfigError(f"a step of {total} rows does not fit max_num_batched_tokens={budget}")
    if len(step) > llm.config.max_num_seqs:
        raise ConfigError(f"a step of {len(step)} sequences does not fit max_num_seqs={llm.config.max_num_seqs}")
    need = sum(-(-(r.start + r.tokens + repeats + 1) // llm.config.block_size) for r in step)
    if need > llm.engine.store.free_pages(TARGET):
        raise ConfigError(f"a step behind {sum(r.start for r in step)} cached tokens needs {need} pages; the cache has "
                          f"{llm.engine.store.free_pages(TARGET)} free ones: give it more --kv-cache-memory-bytes")
    prompts, passes, walls = _Prompts(llm, len(step)), list[TracedPass](), list[float]()
    scheduler = llm.engine.scheduler
    limit, scheduler.max_mixed = scheduler.max_mixed, None     # a whole step is one pass, and the cache is filled in few
    try:
        decoding = [r for r in step if r.tokens == 1 and r.start > 0]
        # Decoding rows also move on while the cache is filled: for each other, and for the prefix of those with more tokens.
        fills = sum(-(-(r.start + 1) // budget) + 1 for r in step if r not in decoding and r.start)
        first = sum(r.start for r in decoding) // budget + len(decoding)
        prompts.decoding([r.start for r in decoding], first + (repeats + 1) * (1 + fills))
        for _ in range(repeats + 1):                    # the first is a warm-up
            prompts.prefill([r for r in step if r not in decoding])
            before()
            with traced(llm, events=events) as found:
                start = time.perf_counter()
                _step(llm)
                walls.append(time.perf_counter() - start)
            assert [len(p.step) for p in found] == [len(step)], "a step of the target is one pass of all its rows"
            passes += found
            prompts.drop_prefill()
    finally:
        scheduler.max_mixed = limit
        prompts.close()
    passes, walls = passes[1:], walls[1:]
    each = [p.seconds() for p in passes]
    keys = dict.fromkeys(key for found in each for key in found)
    return Measured(passes[len(passes) // 2].step, {key: statistics.median(f.get(key, 0.0) for f in each) for key in keys},
                    statistics.median(p.wall_s for p in passes), statistics.median(walls), min(walls), len(passes))


class _Prompts:
    """The requests of a measurement, brought to where it begins without computing anything."""

    def __init__(self, llm: LLM, seed: int):
        self.llm, self.random = llm, random.Random(seed)
        self.open: list[str] = []
        self.passing: list[str] = []

    def decoding(self, contexts: Sequence[int], steps: int) -> None:
        """Sequences that hold so many tokens, and decode for the next steps."""
        for context in contexts:
            self._add(self._tokens(context), steps + 3, self.open)
        self._pretend(self.open)

    def prefill(self, rows: Sequence[Rows]) -> None:
        """Requests whose next step is the prefill of these rows; what is before them comes from the prefix cache."""
        size = self.llm.config.block_size
        for r in rows:
            before = self._tokens(r.start // size * size)
            if before:
                opener = list[str]()
                self._add([*before, 0], 1, opener)
                self._pretend(opener)
                self._drop(opener)
            self._add(before + self._tokens(r.tokens), 2 if r.wanted else 1, self.passing)

    def drop_prefill(self) -> None:
        """Their pages go back, so that the next ones take the same and no step pays for the first touch of a page."""
        self._drop(self.passing)
        self.llm.engine.store.reset_prefix_cache()

    def close(self) -> None:
        self._drop(self.passing)
        self._drop(self.open)
        while self.llm.engine.has_work:                     # what was aborted is told once
            self.llm.engine.step()
        self.llm.engine.store.reset_prefix_cache()          # it holds pages that nothing computed

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.llm.engine.vocab_size) for _ in range(count)]

    def _add(self, prompt: list[int], output: int, to: list[str]) -> None:
        name = f"measure-{self.random.getrandbits(64):x}"
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        self.llm.engine.add_request(EngineRequest(name, prompt, params))
        to.append(name)

    def _pretend(self, names: Sequence[str]) -> None:
        """Step until all of these have their first token, with a model that only fills the cache."""
        runner, left = self.llm.engine.runners[TARGET], set(names)
        runner.execute = _filling(runner)  # type: ignore[assignment]
        try:
            while left:
                left -= {o.request_id for o in _step(self.llm)}
        finally:
            del runner.execute

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self.llm.engine.abort(name)
        names.clear()


def _filling(runner: Runner) -> Callable[[Sequence[Slice]], list[SliceResult]]:
    """Instead of a pass: random keys and values for its rows, and token 0 for each. Pages that were never written would all
    be one page of zeros, which no cache misses."""
    blocks: dict[int, torch.Tensor] = {}

    def execute(slices: Sequence[Slice]) -> list[SliceResult]:
        for s in slices:
            size = runner.view.page_size
            pages = s.placement.pages[s.placement.start // size:-(-s.placement.context // size)]
            for tensors in runner.view._kv.values():
                for x in tensors:
                    if id(x) not in blocks:
                        noise = torch.randint(-9, 9, x.shape[1:]) if x.dtype == torch.int8 else torch.rand(x.shape[1:])
                        blocks[id(x)] = noise.to(x)
                    x[pages] = blocks[id(x)]                                      # (pages, heads, page_size[, d])
        return [SliceResult(Result([0]) if s.last else None) for s in slices]

    return execute


def _step(llm: LLM) -> list[Any]:
    outputs = llm.engine.step()
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs
