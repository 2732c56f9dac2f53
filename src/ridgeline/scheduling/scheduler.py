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

    The scheduler counts rows and seats; pages are the cache store's matter, and whoever runs out of them calls `victim`.
    """

    def __init__(self, policy: Policy, *, max_num_seqs: int, max_num_batched_tokens: int):
        self.policy, self.max_num_seqs, self.max_tokens = policy, max_num_seqs, max_num_batched_tokens
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
        budget, grants = self.max_tokens, {}
        bounds = {seq: seq.wanted_rows() for seq in self.running}
        # A prefill chunk that came first would make every decoding sequence wait for it.
        for seq in sorted(self.running, key=lambda s: bounds[s][1] > s.strategy.lookahead() + s.strategy.align):
            fewest, most = bounds[seq]
            if fewest <= budget:
                grants[seq] = min(most, budget)
                budget -= grants[seq]
        may_join = self.policy.may_join(len(self.running))
        skipped = 0
        while may_join and skipped < len(self.waiting) and (budget > 0 or self.policy.fills_seats):
            seq = self.waiting[skipped]
            if seq.parent is not None and not self.policy.fills_seats and self._waits_for_prompt(seq.parent):
                skipped += 1
                continue
            if seq.wanted_rows()[0] > budget and not self.policy.fills_seats:
                break
            if len(self.running) >= self.max_num_seqs or not admit(seq):
                worst = self.running[-1] if self.running else None
                if worst is None or not self.policy.outranks(seq, worst):
                    break
                budget += grants.pop(worst, 0)
                preempt(worst)
                continue
            self.waiting.remove(seq)
            insort(self.running, seq, key=self.policy.key)
            fewest, most = seq.wanted_rows()
            if fewest <= budget:
                grants[seq] = min(most, budget)
                budget -= grants[seq]
        return grants

    def _waits_for_prompt(self, parent: Sequence) -> bool:
        """The first of n samples runs the prompt; the others fork its cache once it is there."""
        if parent in self.waiting:
            return not parent.output_len
        return parent in self.running and parent.held(parent.target) < parent.prompt_len - 1
