"""Which sequences run this step, and with how many rows, within a budget of tokens."""
from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING

from ridgeline.scheduling.policies import Policy

if TYPE_CHECKING:
    from ridgeline.sequence import Sequence


class Scheduler:
    """Continuous batching with chunked prefill: decode rows first, prefill chunks fill the rest of the budget.

    max_mixed_prefill_tokens: most prefill rows of a step in which a sequence decodes, since each of these waits for the whole
    step (None: no limit but the budget's). The scheduler counts rows and seats; pages are the cache store's matter, and
    whoever runs out of them calls `victim`.
    """

    def __init__(self, policy: Policy, *, max_num_seqs: int, max_num_batched_tokens: int,
                 max_mixed_prefill_tokens: int | None = None):
        self.policy, self.max_num_seqs, self.max_tokens = policy, max_num_seqs, max_num_batched_tokens
        self.max_mixed = max_mixed_prefill_tokens
        self.running: list[Sequence] = []       # in the policy's order
        self.waiting: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=self.policy.key)

    def remove(self, seq: Sequence) -> None:
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)

    def requeue(self, seq: Sequence) -> None:
        """A preempted sequence waits again, at the place its arrival gives it."""
        self.running.remove(seq)
        insort(self.waiting, seq, key=self.policy.key)

    def victim(self) -> Sequence:
        """The running sequence that is served last."""
        return self.running[-1]

    def schedule(self, admit: Callable[[Sequence], bool], preempt: Callable[[Sequence], None]) -> dict[Sequence, int]:
        """Rows granted to each sequence for this step.

        admit(seq): make a waiting sequence known to the cache; False if it must wait. preempt(seq): give up a running one.
        """
        rows = _Rows(self.max_tokens, self.max_mixed)
        bounds = {seq: seq.wanted_rows() for seq in self.running}
        # A prefill chunk that came first would make every decoding sequence wait for it.
        for seq in sorted(self.running, key=lambda s: _prefills(s, bounds[s])):
            rows.grant(seq, bounds[seq])
        may_join = self.policy.may_join(len(self.running))
        skipped = 0
        while may_join and skipped < len(self.waiting) and (rows.left > 0 or self.policy.fills_seats):
            seq = self.waiting[skipped]
            if seq.parent is not None and not self.policy.fills_seats and self._waits_for_prompt(seq.parent):
                skipped += 1
                continue
            if not rows.enough(seq, seq.wanted_rows()) and not self.policy.fills_seats:
                break
            if len(self.running) >= self.max_num_seqs or not admit(seq):
                worst = self.running[-1] if self.running else None
                if worst is None or not self.policy.outranks(seq, worst):
                    break
                rows.take_back(worst)
                preempt(worst)
                continue
            self.waiting.remove(seq)
            insort(self.running, seq, key=self.policy.key)
            rows.grant(seq, seq.wanted_rows())
        return rows.grants

    def _waits_for_prompt(self, parent: Sequence) -> bool:
        """The first of n samples runs the prompt; the others fork its cache once it is there."""
        if parent in self.waiting:
            return not parent.output_len
        return parent in self.running and parent.held(parent.target) < parent.prompt_len - 1


class _Rows:
    """The rows of one step. Sequences that decode come first; `bounds` are what `Sequence.wanted_rows` says."""

    def __init__(self, budget: int, mixed: int | None):
        self.grants: dict[Sequence, int] = {}
        self.left, self._mixed = budget, mixed
        self._prefill: dict[Sequence, int] = {}

    def _room(self, seq: Sequence, bounds: tuple[int, int]) -> int:
        fewest = bounds[0]
        if self._mixed is None or not _prefills(seq, bounds) or len(self.grants) == len(self._prefill):
            return self.left
        # What cannot be cut any smaller still gets its turn.
        least = fewest if not self._prefill else 0
        return min(self.left, max(least, self._mixed - sum(self._prefill.values())))

    def enough(self, seq: Sequence, bounds: tuple[int, int]) -> bool:
        return bounds[0] <= self._room(seq, bounds)

    def grant(self, seq: Sequence, bounds: tuple[int, int]) -> None:
        fewest, most = bounds
        room = self._room(seq, bounds)
        if fewest > room or not room:
            return
        self.grants[seq] = min(most, room)
        self.left -= self.grants[seq]
        if _prefills(seq, bounds):
            self._prefill[seq] = self.grants[seq]

    def take_back(self, seq: Sequence) -> None:
        self.left += self.grants.pop(seq, 0)
        self._prefill.pop(seq, None)


def _prefills(seq: Sequence, bounds: tuple[int, int]) -> bool:
    return bounds[1] > seq.strategy.lookahead() + seq.strategy.align
