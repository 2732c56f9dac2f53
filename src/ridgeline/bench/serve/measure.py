"""A whole run: find the model, measure one load or sweep over several, and put the result together."""
from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ridgeline
from ridgeline.bench.host import cores, cpu_name
from ridgeline.bench.serve import report, validity
from ridgeline.bench.serve.arrivals import CLOSED, OPEN, Arrivals
from ridgeline.bench.serve.client import Target, first_model, session
from ridgeline.bench.serve.metrics import ATTAINED, Wanted, served_share, summarise
from ridgeline.bench.serve.run import Cell, Runner
from ridgeline.bench.serve.scrape import version
from ridgeline.bench.serve.workloads import Spec

SERVED = 0.9              # of the rate of arrivals: below, a queue grows and the load is more than the server carries
GAIN = 1.05               # in tokens/s that a doubled number of clients must bring
MOST_CELLS = 12
CLOSER = 2                # cells between the last load that was carried and the first that was not


@dataclass(frozen=True)
class Sweep:
    """over_rate: of requests a second, else of clients; loads: empty for doubling until saturation."""

    over_rate: bool
    loads: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    target: Target
    spec: Spec
    arrivals: Arrivals
    requests: int
    wanted: Wanted
    salt: str
    sweep: Sweep | None = None
    warmups: int | None = None
    think_s: float = 0.0
    ignore_eos: bool = False
    lag_bound_s: float = validity.LAG_BOUND_S
    command: str = ""


async def measure(plan: Plan, advance: Callable[[int, int, str], None] = lambda done, total, note: None) -> dict[str, Any]:
    """Everything that `bench serve` reports. Control-C ends it early with what there is; a second one at once.

    raises PeerError if the server cannot be measured, ConfigError, and KeyboardInterrupt if nothing was measured yet.
    """
    started, load = time.time(), os.getloadavg()[0]
    async with session(plan.target) as client:
        model = plan.target.model or await first_model(client, plan.target)
        target = replace(plan.target, model=model)
        told = await version(client, target)
        runner = Runner(client, target, plan.spec, plan.requests, plan.salt, plan.warmups, plan.think_s)
        cells = _Cells(plan, runner, advance)
        with _interrupts(runner.stop):
            await (cells.one(plan.arrivals) if plan.sweep is None else cells.sweep(plan.sweep))
        if not any(cell.records for cell in cells.cells):
            raise KeyboardInterrupt
    import aiohttp

    return {
        "kind": report.KIND, "version": report.VERSION, "started": started, "command": plan.command, "salt": plan.salt,
        "interrupted": runner.stop.is_set(),
        "server": {"base_url": target.base_url, "endpoint": target.endpoint, "model": model, "version": told},
        "client": {"cpu": cpu_name(), "cores": cores(), "load": round(load, 2), "python": platform.python_version(),
                   "aiohttp": aiohttp.__version__, "ridgeline": ridgeline.__version__},
        "workload": {"spec": plan.spec.describe(), "num_prompts": plan.requests, "ignore_eos": plan.ignore_eos,
                     "think_s": plan.think_s, "stagger_s": plan.arrivals.stagger, "endpoint": target.endpoint,
                     "body": target.body},
        "wanted": plan.wanted.as_json(), "knee": cells.knee(), "cells": cells.as_json()}


@contextlib.contextmanager
def _interrupts(stop: asyncio.Event) -> Iterator[None]:
    """The first Control-C sets `stop`; the next one is what it always is."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Cells:
    """The loads that were measured, in the order of the load."""

    def __init__(self, plan: Plan, runner: Runner, advance: Callable[[int, int, str], None]):
        self.plan, self.runner, self.advance = plan, runner, advance
        self.cells: list[Cell] = []
        self.summaries: dict[int, dict[str, Any]] = {}

    async def one(self, arrivals: Arrivals) -> Cell:
        self.runner.advance = lambda done, total: self.advance(done, total, arrivals.name)
        cell = await self.runner.run(arrivals)
        self.cells.append(cell)
        self.cells.sort(key=lambda cell: cell.arrivals.load)
        self.summaries[id(cell)] = summarise(cell, self.plan.wanted)
        return cell

    async def sweep(self, sweep: Sweep) -> None:
        """The loads given; or doubling from a light one until the server is saturated, then twice in the middle between the
        largest load that was carried and the smallest that was not."""
        if sweep.loads:
            for load in sweep.loads:
                await self._at(sweep, load)
            return
        load = self.plan.arrivals.rate or await self._light() if sweep.over_rate else 1.0
        while not self._over() and len(self.cells) < MOST_CELLS:
            await self._at(sweep, load)
            load *= 2
        for _ in range(CLOSER):
            carried = [c.arrivals.load for c in self.cells if not self.saturated(c)]
            above = [c.arrivals.load for c in self.cells if self.saturated(c)]
            middle = (max(carried) + min(above)) / 2 if carried and above else 0.0
            middle = middle if sweep.over_rate else float(int(middle))
            if middle and middle not in carried:
                await self._at(sweep, middle)

    def _over(self) -> bool:
        return self.runner.stop.is_set() or (bool(self.cells) and self.saturated(self.cells[-1]))

    async def _light(self) -> float:
        """Half the rate of one client after another."""
        probe = await Runner(self.runner.client, self.runner.target, self.plan.spec, 3, f"{self.plan.salt}/light",
                             stop=self.runner.stop).run(Arrivals(CLOSED, concurrency=1, stagger=0.0))
        times = [r.e2el for r in probe.records if r.ok]
        return float(f"{0.5 * len(times) / sum(times):.2g}") if times else 1.0

    async def _at(self, sweep: Sweep, load: float) -> None:
        if self.runner.stop.is_set():
            return
        if sweep.over_rate:
            await self.one(replace(self.plan.arrivals, kind=OPEN, rate=load))
        else:
            await self.one(replace(self.plan.arrivals, kind=CLOSED, concurrency=int(load)))

    def saturated(self, cell: Cell) -> bool:
        """Open loop: answers come more slowly than requests, or too few meet the objectives. Closed loop: no more tokens/s than
        with fewer clients, or too few meet the objectives."""
        found = self.summaries[id(cell)]
        attainment = found.get("attainment")
        if not found["completed"] or (attainment is not None and attainment < ATTAINED):
            return True
        if cell.arrivals.kind != CLOSED:
            share = served_share(cell.records)
            return share is not None and share < SERVED
        fewer = [self.summaries[id(c)]["output_tokens_per_s"] or 0.0 for c in self.cells
                 if c.arrivals.load <= cell.arrivals.load / 2]
        return bool(fewer) and (found["output_tokens_per_s"] or 0.0) < GAIN * max(fewer)

    def knee(self) -> dict[str, Any] | None:
        """The largest load below the first that saturates; None for a single load."""
        if self.plan.sweep is None or len(self.cells) < 2:
            return None
        first = next((i for i, cell in enumerate(self.cells) if self.saturated(cell)), None)
        if first == 0:
            return {"cell": 0, "text": f"Saturated already at {self.cells[0].arrivals.short}"}
        index = len(self.cells) - 1 if first is None else first - 1
        name = self.cells[index].arrivals.short
        if first is None:
            return {"cell": index, "text": f"Not saturated at the largest load, {name}"}
        return {"cell": index, "text": f"Carries {name} ({self.cells[first].arrivals.short} saturates it)"}

    def as_json(self) -> list[dict[str, Any]]:
        found = []
        for cell in self.cells:
            summary = self.summaries[id(cell)]
            badges = validity.badges(cell, summary, self.plan.spec, lag_bound_s=self.plan.lag_bound_s,
                                     ignore_eos=self.plan.ignore_eos)
            found.append({**cell.as_json(), "summary": summary, "badges": badges, "grade": validity.grade(badges),
                          "saturated": self.plan.sweep is not None and self.saturated(cell)})
        return found
