"""In which order sequences are served, and when new ones may join."""
from __future__ import annotations

from typing import Any, Protocol

from ridgeline.errors import ConfigError


class Queued(Protocol):
    arrival: float
    order: int
    params: Any


class Policy:
    """First come, first served; new sequences join whenever there is room (continuous batching).

    fills_seats: sequences join up to the number of seats even when this step has no rows left for them.
    """

    fills_seats = False

    def key(self, seq: Queued) -> tuple[float, ...]:
        """Smaller is served earlier; the largest is preempted first."""
        return (seq.arrival, seq.order)

    def may_join(self, running: int) -> bool:
        return True

    def outranks(self, waiting: Queued, running: Queued) -> bool:
        """Whether `waiting` may take the place of `running`."""
        return False


class Priority(Policy):
    """Lower `priority` values first; they also take the place of running sequences with higher values."""

    def key(self, seq: Queued) -> tuple[float, ...]:
        return (seq.params.priority, seq.arrival, seq.order)

    def outranks(self, waiting: Queued, running: Queued) -> bool:
        return bool(waiting.params.priority < running.params.priority)


class Static(Policy):
    """Static batching, the baseline: a batch is formed and runs until its last sequence has finished."""

    fills_seats = True

    def may_join(self, running: int) -> bool:
        return running == 0


POLICIES: dict[str, type[Policy]] = {"fcfs": Policy, "priority": Priority, "static": Static}


def build_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"scheduling_policy is {name!r}; valid: {', '.join(POLICIES)}")
    return POLICIES[name]()
