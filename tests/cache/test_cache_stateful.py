"""Random operations over several sequences in a store too small for them, checked against a content oracle."""
from __future__ import annotations

from random import Random

import pytest
from cache_operations import Operations
from cache_oracle import HYBRID, RECURRENT, SOFTMAX
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

PAIRS = {
    "hybrid target": {"target": HYBRID, "draft": SOFTMAX},
    "hybrid draft": {"target": SOFTMAX, "draft": HYBRID},
    "recurrent target": {"target": RECURRENT, "draft": SOFTMAX},
}
CHOICES = st.randoms(use_true_random=False)


def walk(pair: str, seed: int, steps: int) -> Operations:
    rng = Random(seed)
    operations = Operations(PAIRS[pair], rng)
    for _ in range(steps):
        operations.step(rng)
    return operations


@pytest.mark.parametrize("pair", PAIRS)
def test_random_walks(pair: str) -> None:
    hits = full = evictions = moves = copies = 0
    for seed in range(20):
        done = walk(pair, seed, 120)
        full += done.full
        for role in done.store.stats().roles.values():
            hits += role.prefix_hits
            evictions += role.page_evictions + role.state_evictions
            moves += role.row_moves
            copies += role.page_copies
        done.finish()
    assert min(hits, full, evictions, moves, copies) > 0, "the walks did not reach what they are meant to test"


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_many_random_walks(pair: str) -> None:
    for seed in range(1000, 1200):
        walk(pair, seed, 200).finish()


@pytest.mark.parametrize("pair", PAIRS)
def test_shrinkable_operations(pair: str) -> None:
    """The same operations driven by hypothesis, which finds a short sequence if one fails."""

    class Machine(RuleBasedStateMachine):
        @initialize(rng=CHOICES)
        def start(self, rng: Random) -> None:
            self.operations = Operations(PAIRS[pair], rng)

        @rule(rng=CHOICES)
        def step(self, rng: Random) -> None:
            self.operations.step(rng)

        def teardown(self) -> None:
            if hasattr(self, "operations"):
                self.operations.finish()

    run_state_machine_as_test(Machine, settings=settings(
        max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)))
