"""Run workloads through the engine and time them."""
from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.analysis.work import Rows
from ridgeline.bench.limits import Pass, Shape
from ridgeline.bench.machine import Machine
from ridgeline.bench.work import TEXT, TEXT_TOKENS, Work, random_prompts
from ridgeline.decoding.base import Hidden, Sample
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.runner import Slice
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import TARGET, EngineRequest, RequestMetrics


@dataclass(frozen=True)
class Timed:
    """Of one run: tokens and the seconds they took; passes: the target's forward passes within that time; head_rows: of
    passes through a pruned head, the rows that were scored exactly and all."""

    tokens: int
    seconds: float
    passes: Sequence[Pass]
    head_rows: tuple[int, int]


@dataclass(frozen=True)
class Result:
    """Rates are tokens a second over the repeats; the limit is that of the same passes on this machine."""

    work: str
    tokens_per_s: float
    lowest_tokens_per_s: float
    highest_tokens_per_s: float
    limit_tokens_per_s: float
    share_of_limit: float
    bound: str                # "memory" or "compute": what most of the limit's time goes to
    sequences: int
    prompt_tokens: int        # of each sequence
    tokens: int               # that a run counts
    passes: int
    bytes_per_pass: int       # on average, read
    operations_per_pass: int
    head_rows_scored: float | None     # share of a pruned head's rows that were scored exactly; None: no pass was pruned
    repeats: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(llm: LLM, work: Work, shape: Shape, machine: Machine, repeats: int) -> Result:
    """One warm-up, then `repeats` runs. raises ConfigError where the cache is too small for the work."""
    prompts = prompts_of(llm, work)
    run_once(llm, work, prompts)
    runs = [run_once(llm, work, prompts) for _ in range(repeats)]
    return summarise(work.name, runs, shape, machine, sequences=work.sequences, prompt_tokens=len(prompts[0]))


def summarise(name: str, runs: Sequence[Timed], shape: Shape, machine: Machine, *, sequences: int,
              prompt_tokens: int) -> Result:
    rates = [run.tokens / run.seconds for run in runs]
    last = runs[-1]                            # all runs make the same passes
    read, computed = ([count(p) for p in last.passes] for count in (shape.bytes_read, shape.operations))
    least = shape.seconds(last.passes, machine)
    memory = sum(b / machine.bandwidth for b, o in zip(read, computed)
                 if b / machine.bandwidth >= o / machine.peak)
    scored, total = (sum(run.head_rows[i] for run in runs) for i in range(2))
    rate, limit = statistics.median(rates), last.tokens / least
    return Result(name, rate, min(rates), max(rates), limit, rate / limit, "memory" if 2 * memory >= least else "compute",
                  sequences, prompt_tokens, last.tokens, len(read), round(statistics.fmean(read)),
                  round(statistics.fmean(computed)), scored / total if total else None, len(runs))


def prompts_of(llm: LLM, work: Work) -> list[list[int]]:
    if work.prompt_len is not None:
        return random_prompts(work.sequences, work.prompt_len, llm.engine.vocab_size)
    if llm.tokenizer is not None and llm.loaded.checkpoint.format != "dummy":
        return [llm.tokenizer.encode(TEXT)]
    return random_prompts(1, TEXT_TOKENS, llm.engine.vocab_size)


def run_once(llm: LLM, work: Work, prompts: Sequence[Sequence[int]]) -> Timed:
    """Prefill: all tokens over the time from arrival to the first token. Decode: the tokens of `steps` steps that follow
    the step in which the last sequence got its first token, over the time of these steps."""
    output_len, scored = work.output_len(llm.config.max_num_batched_tokens), head_rows(llm)
    with recorded(llm) as passes, requests(llm, work.name, prompts, output_len) as metrics:
        while any(m.first_token is None for m in metrics):
            step(llm)
        start = max(m.first_token or 0.0 for m in metrics)
        if not work.steps:
            return Timed(sum(map(len, prompts)), start - min(m.arrival for m in metrics), list(passes),
                         _less(head_rows(llm), scored))
        before, done, scored = sum(m.completion_tokens for m in metrics), len(passes), head_rows(llm)
        for _ in range(work.steps):
            step(llm)
        end = max(m.last_token or 0.0 for m in metrics)
        tokens = sum(m.completion_tokens for m in metrics) - before
        if tokens != work.sequences * work.steps:
            raise ConfigError(f"{work.name}: the cache of {llm.engine.store.num_pages * llm.config.block_size} tokens does not "
                              f"hold {work.sequences} sequences of {len(prompts[0]) + output_len} together; give it more "
                              "--kv-cache-memory-bytes")
        return Timed(tokens, end - start, passes[done:], _less(head_rows(llm), scored))


def throughput(llm: LLM, shape: Shape, machine: Machine, *, num_prompts: int, input_len: int, output_len: int,
               repeats: int) -> dict[str, Any]:
    """All requests at once. Rates count generated tokens from the first arrival to the last finish."""
    prompts = random_prompts(num_prompts, input_len, llm.engine.vocab_size)
    served(llm, prompts[:2], min(2, output_len))
    runs, metrics = [], list[RequestMetrics]()
    for _ in range(repeats):
        run, metrics = served(llm, prompts, output_len)
        runs.append(run)
    result = summarise("throughput", runs, shape, machine, sequences=num_prompts, prompt_tokens=input_len).as_json()
    seconds = statistics.median(run.seconds for run in runs)
    gaps = [gap for m in metrics for gap in m.itl_s]
    return {**result, "output_len": output_len, "requests_per_s": num_prompts / seconds,
            "total_tokens_per_s": num_prompts * (input_len + output_len) / seconds, "seconds": seconds,
            "median_ttft_s": statistics.median(m.ttft_s for m in metrics if m.ttft_s is not None),
            "median_itl_s": statistics.median(gaps) if gaps else None, "preemptions": sum(m.preemptions for m in metrics)}


def served(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int) -> tuple[Timed, list[RequestMetrics]]:
    scored = head_rows(llm)
    with recorded(llm) as passes, requests(llm, "throughput", prompts, output_len) as metrics:
        while any(m.finished is None for m in metrics):
            step(llm)
        span = max(m.finished or 0.0 for m in metrics) - min(m.arrival for m in metrics)
        tokens = sum(m.completion_tokens for m in metrics)
        return Timed(tokens, span, list(passes), _less(head_rows(llm), scored)), metrics


@contextmanager
def requests(llm: LLM, name: str, prompts: Sequence[Sequence[int]], output_len: int) -> Iterator[list[RequestMetrics]]:
    """Queue greedy requests that run to their full length; gives their metrics, which the engine keeps up to date."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    ids = [f"{name}-{index}" for index in range(len(prompts))]
    try:
        for request_id, prompt in zip(ids, prompts):
            llm.engine.add_request(EngineRequest(request_id, list(prompt), params))
        yield [seq.metrics for seq in llm.engine.scheduler.waiting]
    finally:
        for request_id in ids:
            llm.engine.abort(request_id)
        while llm.engine.has_work:
            llm.engine.step()


def step(llm: LLM) -> None:
    for output in llm.engine.step():
        if output.error is not None:
            raise output.error


@contextmanager
def recorded(llm: LLM) -> Iterator[list[Pass]]:
    """The shapes of the target's passes, as they are run; about a microsecond each."""
    runner, passes = llm.engine.runners[TARGET], list[Pass]()
    execute = runner.execute

    def noting(slices: Sequence[Slice]) -> Any:
        passes.append([Rows(s.placement.start, s.count, wanted_rows(s)) for s in slices])
        return execute(slices)

    runner.execute = noting  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        del runner.execute


def head_rows(llm: LLM) -> tuple[int, int]:
    """Rows scored exactly and all rows, of every pass so far through a head that prunes."""
    head = llm.loaded.model.top_head
    return (0, 0) if head is None else (head.rows.scored, head.rows.total)


def _less(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


def wanted_rows(piece: Slice) -> int:
    """Rows of the slice that go through the head: one for each draw."""
    if not piece.last:
        return 0
    return sum(len(want.rows or (0,)) if isinstance(want, Sample) else len(want.tokens) + 1
               for want in piece.run.want if not isinstance(want, Hidden))
