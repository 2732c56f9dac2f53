"""Run one cell: warm up, send what the arrivals say, note what comes back."""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ridgeline.bench.serve.arrivals import CLOSED, OPEN, Arrivals
from ridgeline.bench.serve.client import History, Target, ask
from ridgeline.bench.serve.record import Record
from ridgeline.bench.serve.scrape import prefix_counters
from ridgeline.bench.serve.workloads import Job, Spec, jobs
from ridgeline.errors import PeerError

if TYPE_CHECKING:
    import aiohttp

TICK_S = 0.01             # how often the event loop is asked how late it wakes up
MAX_STAGGER_S = 30.0
INTERRUPTED = "interrupted"
OPEN_WARMUPS, MAX_WARMUPS = 4, 64
SHORT = 16                # tokens of an answer that only warms up a batch


@dataclass
class Cell:
    """One load, measured. wakeups: seconds that the client's event loop woke up late; hits: prompt tokens that the server
    found in its prefix cache, and all that it looked up, by its counters (None: it has none)."""

    arrivals: Arrivals
    requested: int
    records: list[Record] = field(default_factory=list)
    wakeups: list[float] = field(default_factory=list)
    hits: tuple[float, float] | None = None
    warmups: int = 0
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"arrivals": self.arrivals.describe(), "requested": self.requested, "warmups": self.warmups,
                "interrupted": self.interrupted, "prefix_counters": self.hits,
                "wakeups_s": [round(w, 6) for w in self.wakeups[::max(1, len(self.wakeups) // 2000)]],
                "requests": [record.as_json() for record in self.records]}


@dataclass
class Runner:
    """client, target: the server; think_s: pause before each further turn of a session; stop: set to end early;
    advance(done, total): told about each answer."""

    client: aiohttp.ClientSession
    target: Target
    spec: Spec
    requests: int
    salt: str
    warmups: int | None = None
    think_s: float = 0.0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    advance: Callable[[int, int], None] = lambda done, total: None
    _cells: int = 0

    async def run(self, arrivals: Arrivals) -> Cell:
        """raises PeerError if the first request of the warm-up fails: then the server cannot be measured at all."""
        self._cells += 1
        cell = Cell(arrivals, self.requests)
        service_s = await self._warm_up(cell)
        if arrivals.kind == CLOSED and arrivals.stagger is None:
            clients = arrivals.concurrency or 1
            stagger = min(service_s, MAX_STAGGER_S) if clients > 1 else 0.0
            cell.arrivals = Arrivals(CLOSED, concurrency=clients, stagger=round(stagger, 3))
        work = jobs(self.spec, self.requests, f"{self.salt}/cell{self._cells}")
        cell.requested = min(self.requests, sum(len(job.turns) for job in work))
        before = await prefix_counters(self.client, self.target)
        await self._measure(cell, work)
        after = await prefix_counters(self.client, self.target)
        if before is not None and after is not None:
            cell.hits = (after[0] - before[0], after[1] - before[1])
        return cell

    async def _warm_up(self, cell: Cell) -> float:
        """Seconds of one request. The first goes alone and must succeed; the others go at once, as many as the load has clients
        and with short answers: the first batch of a new size pays for memory, compilation and threads."""
        many = self.warmups
        if many is None:
            clients = cell.arrivals.concurrency or OPEN_WARMUPS
            many = 1 + min(clients if cell.arrivals.kind == CLOSED else OPEN_WARMUPS, MAX_WARMUPS, self.requests)
        if not many:
            return 0.0
        turns = [(job, job.turns[0]) for job in jobs(self.spec, many * self.spec.turns, f"{self.salt}/warm-up{self._cells}")]
        work = [Job((turn if not i else replace(turn, output_len=min(turn.output_len, SHORT)),), job.system, job.system_len)
                for i, (job, turn) in enumerate(turns[:many])]
        first = Cell(cell.arrivals, 1)
        await self._measure(first, work[:1], quiet=True)
        if first.records and not first.records[0].ok and not self.stop.is_set():
            raise PeerError(f"the first request to {self.target.url(self.target.endpoint)} failed: {first.records[0].error}")
        if len(work) > 1 and not self.stop.is_set():
            rest = Cell(Arrivals(CLOSED, concurrency=len(work) - 1, stagger=0.0), len(work) - 1)
            await self._measure(rest, work[1:], quiet=True)
        cell.warmups = len(work)
        return sum(r.e2el for r in first.records if r.ok)

    async def _measure(self, cell: Cell, work: list[Job], quiet: bool = False) -> None:
        run = _Run(self, cell, quiet)
        if cell.arrivals.kind == CLOSED or quiet:                  # a warm-up is a closed loop under any load
            loads = run.closed(work)
        else:
            loads = run.open(work, cell.arrivals.deadlines(len(work), self.spec.seed) if cell.arrivals.kind == OPEN
                             else [job.at or 0.0 for job in work])
        await run.until_stopped(loads)


class _Run:
    """The tasks of one cell; its clock starts when it is made."""

    def __init__(self, runner: Runner, cell: Cell, quiet: bool):
        self.runner, self.cell, self.quiet = runner, cell, quiet
        self.left = cell.requested
        self.done = 0
        limit = cell.arrivals.concurrency if cell.arrivals.kind != CLOSED else None
        self.slots: asyncio.Semaphore | contextlib.nullcontext[None]
        self.slots = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    async def until_stopped(self, loads: Awaitable[None]) -> None:
        """Everything, or until the runner is told to stop; then what is under way ends as interrupted."""
        load, stop = asyncio.ensure_future(loads), asyncio.ensure_future(self.runner.stop.wait())
        ticker = asyncio.ensure_future(self._tick())
        try:
            await asyncio.wait([load, stop], return_when=asyncio.FIRST_COMPLETED)
            self.cell.interrupted = not load.done()
        finally:
            for task in (load, stop, ticker):
                if not task.done():
                    task.cancel()
            await asyncio.gather(load, stop, ticker, return_exceptions=True)
        if not load.cancelled() and (error := load.exception()) is not None:
            raise error

    async def _tick(self) -> None:
        """How late the loop wakes up: what a chunk that came meanwhile waited for its stamp."""
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.cell.wakeups.append(max(0.0, time.perf_counter() - due))

    async def closed(self, work: list[Job]) -> None:
        """Each client takes the next job when its last is answered, and is due at that moment."""
        queue = iter(work)
        clients = min(self.cell.arrivals.concurrency or 1, len(work))
        stagger = self.cell.arrivals.stagger or 0.0
        await self._all([self._client(queue, stagger * c / clients) for c in range(clients)])

    async def _client(self, queue: Iterator[Job], start: float) -> None:
        await self._sleep_until(start)
        due = start
        for job in queue:
            await self._job(job, due, due)
            due = self.now()

    async def open(self, work: list[Job], deadlines: list[float]) -> None:
        """Each job is due at its own moment, whatever became of the others."""
        async with asyncio.TaskGroup() as group:
            for job, due in zip(work, deadlines):
                await self._sleep_until(due)
                group.create_task(self._capped(job, due))

    async def _capped(self, job: Job, due: float) -> None:
        """Waiting for a slot is waiting for the server: it counts from the moment the request was due."""
        async with self.slots:
            await self._job(job, due, max(due, self.now()) if isinstance(self.slots, asyncio.Semaphore) else due)

    async def _all(self, parts: list[Any]) -> None:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)

    async def _sleep_until(self, due: float) -> None:
        while (left := due - self.now()) > 0:
            await asyncio.sleep(left)

    async def _job(self, job: Job, due: float, allowed: float) -> None:
        """due: when it counts from; allowed: when it could be sent at the earliest. A session ends with its first error."""
        history: History = [{"role": "system", "content": job.system}] if job.system else []
        length = job.system_len
        for number, turn in enumerate(job.turns):
            if not self.left:
                return
            self.left -= 1
            if number:
                due = allowed = self.now() + self.runner.think_s
                await self._sleep_until(due)
            record = Record(len(self.cell.records), number, length + turn.input_len, turn.output_len, due)
            self.cell.records.append(record)
            record.lateness = max(0.0, self.now() - allowed)
            try:
                text = await ask(self.runner.client, self.runner.target, turn, history, record, self.origin)
            except asyncio.CancelledError:
                record.error_kind, record.error = INTERRUPTED, "interrupted by the user"
                raise
            self.done += 1
            if not self.quiet:
                self.runner.advance(self.done, self.cell.requested)
            if not record.ok:
                return
            history += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": text}]
            length += turn.input_len + record.completion_tokens
