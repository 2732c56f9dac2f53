"""Recurrent state of one sequence: at which lengths a copy of the state exists, and in which slot.

A recurrent state cannot be truncated like keys and values. To go back, the store needs a copy ("checkpoint") of the
state at that length, or an older one from which the tokens in between are run again.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ridgeline.cache.pages import OutOfPages, Pool

LEAST_STATES = 3  # of one sequence that drafts: the one to fall back to, the one read, the one written


@dataclass(slots=True)
class StatePlan:
    """Run indexes whose state will be saved (last one last), and whether spare checkpoints must go to make room."""

    save: list[int]
    drop_spares: bool


@dataclass(slots=True)
class Checkpoints:
    pool: Pool
    saved: list[tuple[int, int]] = field(default_factory=list)  # (length, slot), by length; length 0 is the zero state
    branches: dict[int, int] = field(default_factory=dict)      # tree: index of a token in its run -> slot

    def at(self, length: int) -> int:
        """Slot of the state after `length` tokens, -1 if there is none."""
        for saved, slot in reversed(self.saved):
            if saved == length:
                return slot
        return -1

    def newest(self, limit: int) -> int:
        """Largest length <= limit at which a state exists; 0 if none."""
        for length, _ in reversed(self.saved):
            if length <= limit:
                return length
        return 0

    def cut(self, limit: int) -> None:
        """Forget the states above `limit` and all branches."""
        while self.saved and self.saved[-1][0] > limit:
            self.pool.release(self.saved.pop()[1])
        for slot in self.branches.values():
            self.pool.release(slot)
        self.branches.clear()

    def trim(self, held: int, upto: int | None = None) -> None:
        """Forget the states below the newest one at or below `held`; with `upto` also those between it and `upto`."""
        newest = self.newest(held)
        kept = []
        for length, slot in self.saved:
            if length < newest or (upto is not None and newest < length < upto):
                self.pool.release(slot)
            else:
                kept.append((length, slot))
        self.saved = kept

    def share(self, limit: int) -> Checkpoints:
        """For a fork: the newest state at or below `limit`, with one owner more."""
        for length, slot in reversed(self.saved):
            if length <= limit:
                self.pool.share(slot)
                return Checkpoints(self.pool, [(length, slot)])
        return Checkpoints(self.pool)

    def plan(
        self, start: int, held: int, written: int, rollback: int, wanted: Iterable[int], new_run: bool, others: int
    ) -> StatePlan:
        """Which of the next `written` tokens get their state saved; changes nothing.

        One is a must: the last, or with `rollback` the one that no rejection can reach, so that every commit moves the
        state on and what has to be run again stays bounded. The others of the `rollback` last ones and the `wanted`
        indexes are optional: they are saved only as long as each of the `others` (live sequences) still finds a slot.
        """
        if written == 0:
            return StatePlan([], False)
        refs = self.pool.refs
        room = self.pool.available() + sum(1 for length, slot in self.saved if length > start and refs[slot] == 1)
        if new_run:
            room += sum(1 for slot in self.branches.values() if refs[slot] == 1)
        last = written - 1
        certain = max(0, last - rollback)
        if room < 1:
            newest = self.newest(min(held, start))
            if any(newest < length < start and refs[slot] == 1 for length, slot in self.saved):
                return StatePlan([certain], True)
            raise OutOfPages("no recurrent-state slot is left")
        room -= 1 + others
        save = {certain}
        if last - certain <= room:
            save.update(range(certain, last + 1))
            room -= last - certain
        for index in wanted:
            if index not in save and room > 0:
                save.add(index)
                room -= 1
        return StatePlan(sorted(save), False)

    def keep(self, run_start: int, keep: Sequence[int]) -> None:
        """Row keep[j] of the run that began at `run_start` moves to run_start + j; the other rows' states go."""
        linear = {length - run_start - 1: slot for length, slot in self.saved if length > run_start}
        slots = linear | self.branches
        kept = {i: (run_start + j + 1, slots.pop(i)) for j, i in enumerate(keep) if i in slots}
        for slot in slots.values():
            self.pool.release(slot)
        self.saved = [c for c in self.saved if c[0] <= run_start] + [kept[i] for i in keep if i in kept]
        self.branches.clear()
