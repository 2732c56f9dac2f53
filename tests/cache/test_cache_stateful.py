"""Random operations over several sequences in a store too small for them, checked against a content oracle."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_oracle import HYBRID, RECURRENT, SOFTMAX, Oracle
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ridgeline.cache import CacheStore, OutOfPages, RoleLayout

TOKEN = st.integers(0, 2)
COMMON = [0, 1, 2, 1, 0, 0, 2, 1, 1, 2, 0, 1, 2, 2, 0, 1]  # what many requests begin with
SEQS = 4


class CacheMachine(RuleBasedStateMachine):
    roles: dict[str, RoleLayout]

    @initialize(page_size=st.sampled_from([1, 3, 4]), pages=st.integers(5, 14), states=st.integers(2, 9),
                caching=st.booleans())
    def start(self, page_size: int, pages: int, states: int, caching: bool) -> None:
        self.store = CacheStore(self.roles, page_size=page_size, num_pages=pages, num_states=states,
                                prefix_caching=caching)
        self.oracle = Oracle(self.store)
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"s{self.names}"

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.oracle.tokens)))

    def role(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.roles)))

    def attempt(self, data: st.DataObject, run: Callable[[], object]) -> bool:
        """Run; if the store is full it must be unchanged, and something is preempted."""
        before = self.oracle.holdings()
        try:
            run()
        except OutOfPages:
            assert self.oracle.holdings() == before
            self.oracle.free(self.pick(data))
            return False
        return True

    def pending(self, seq: str, role: str) -> list[int]:
        return self.oracle.tokens[seq][self.store.held(seq, role):]

    def clean(self, seq: str, role: str) -> bool:
        return self.store.length(seq, role) == self.store.held(seq, role)

    some = precondition(lambda self: self.oracle.tokens)
    room = precondition(lambda self: len(self.oracle.tokens) < SEQS)

    @room
    @rule(common=st.integers(0, len(COMMON)), rest=st.lists(TOKEN, min_size=1, max_size=6),
          salt=st.sampled_from(["", "", "", "a"]), publish=st.sampled_from([True, True, True, False]))
    def add(self, common: int, rest: list[int], salt: str, publish: bool) -> None:
        seq = self.name()
        self.oracle.add(seq, COMMON[:common] + rest, salt=salt, publish=publish)
        for role in self.roles:
            self.oracle.match(seq, role)

    @some
    @rule(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3), commit=st.booleans())
    def prefill(self, data: st.DataObject, sizes: list[int], commit: bool) -> None:
        seq, role = self.pick(data), self.role(data)
        if not self.clean(seq, role):
            return
        offset = 0
        for size in sizes:
            chunk = self.pending(seq, role)[:size]
            if not chunk:
                break
            if not self.attempt(data, lambda c=chunk, o=offset: self.oracle.run(seq, role, c, offset=o)):
                return
            offset += len(chunk)
            self.oracle.verify()
        if commit:
            self.oracle.commit(seq)

    @some
    @rule(data=st.data(), drafts=st.lists(TOKEN, max_size=4), covered=st.booleans(), bonus=TOKEN)
    def verify_drafts(self, data: st.DataObject, drafts: list[int], covered: bool, bonus: int) -> None:
        seq = self.pick(data)
        pending = self.pending(seq, "target")
        if not pending or not self.clean(seq, "target"):
            return
        rollback = len(drafts) if covered else 0
        if self.attempt(data, lambda: self.oracle.run(seq, "target", pending + drafts, rollback=rollback)):
            accepted = data.draw(st.integers(0, len(drafts)))
            self.oracle.commit(seq, [*drafts[:accepted], bonus], keep=range(len(pending) + accepted))

    @some
    @rule(data=st.data(), tokens=st.lists(TOKEN, min_size=1, max_size=4))
    def draft(self, data: st.DataObject, tokens: list[int]) -> None:
        """One by one, provisionally; a later commit decides."""
        seq = self.pick(data)
        for token in tokens:
            if not self.attempt(data, lambda t=token: self.oracle.run(seq, "draft", [*self.pending(seq, "draft"), t])):
                return

    @some
    @rule(data=st.data(), nodes=st.lists(st.tuples(TOKEN, st.integers(-1, 5)), min_size=1, max_size=6),
          covered=st.booleans(), bonus=TOKEN)
    def tree(self, data: st.DataObject, nodes: list[tuple[int, int]], covered: bool, bonus: int) -> None:
        seq, role = self.pick(data), self.role(data)
        pending = self.pending(seq, role)
        if not pending or not self.clean(seq, role):
            return
        base = len(pending)
        parents = list(range(-1, base - 1)) + [base + min(p, i - 1) if p >= 0 and i else base - 1
                                               for i, (_, p) in enumerate(nodes)]
        tokens = pending + [token for token, _ in nodes]
        rollback = len(nodes) if covered else 0
        if not self.attempt(data, lambda: self.oracle.run(seq, role, tokens, parents=parents, rollback=rollback)):
            return
        path, node = [], data.draw(st.integers(base - 1, len(tokens) - 1))
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        self.oracle.commit(seq, [*(tokens[i] for i in path[base:]), bonus], keep=path, role=role)

    @some
    @rule(data=st.data(), tokens=st.lists(TOKEN, min_size=1, max_size=5), write=st.integers(0, 5))
    def scratch(self, data: st.DataObject, tokens: list[int], write: int) -> None:
        seq, role = self.pick(data), self.role(data)
        if self.clean(seq, role):
            keep = min(write, len(tokens))
            if self.attempt(data, lambda: self.oracle.run(seq, role, tokens, write=keep)) and write % 2:
                self.oracle.commit(seq)

    @some
    @rule(data=st.data(), tokens=st.lists(TOKEN, min_size=1, max_size=5), nonce=st.sampled_from([0, 0, 7]))
    def overwrite(self, data: st.DataObject, tokens: list[int], nonce: int) -> None:
        seq, role = self.pick(data), self.role(data)
        length = self.store.length(seq, role)
        if self.store.views[role].layout.recurrent:
            saved = [at for at, _ in self.store._sequences[seq][role].checkpoints.saved if at <= self.store.held(seq, role)]
            places = [0, *saved[-1:]]
        else:
            places = list(range(length + 1))
        at = data.draw(st.sampled_from(places))
        if self.attempt(data, lambda: self.oracle.run(seq, role, tokens, at=at, nonce=nonce)):
            self.oracle.commit(seq, keep=data.draw(st.sampled_from([None, (), (0,)])), role=role)

    @some
    @room
    @rule(data=st.data(), suffix=st.lists(TOKEN, min_size=1, max_size=4))
    def fork(self, data: st.DataObject, suffix: list[int]) -> None:
        parent = self.pick(data)
        length = data.draw(st.integers(0, len(self.oracle.tokens[parent])))
        self.oracle.fork(parent, self.name(), length, suffix)

    @some
    @rule(data=st.data(), new=st.lists(TOKEN, max_size=3))
    def commit(self, data: st.DataObject, new: list[int]) -> None:
        self.oracle.commit(self.pick(data), new)

    @some
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.oracle.free(self.pick(data))

    @rule()
    def reset(self) -> None:
        self.store.reset_prefix_cache()
        stats = self.store.stats()
        assert all(r.pages_cached == r.states_cached == 0 for r in stats.roles.values())

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if hasattr(self, "oracle"):
            self.oracle.verify()

    def teardown(self) -> None:
        if hasattr(self, "oracle"):
            for seq in list(self.oracle.tokens):
                self.oracle.free(seq)
            self.oracle.verify()
            assert self.store.stats().usage == 0, "something leaks"


class HybridTarget(CacheMachine):
    roles = {"target": HYBRID, "draft": SOFTMAX}  # noqa: RUF012


class HybridDraft(CacheMachine):
    roles = {"target": SOFTMAX, "draft": HYBRID}  # noqa: RUF012


class RecurrentTarget(CacheMachine):
    roles = {"target": RECURRENT, "draft": SOFTMAX}  # noqa: RUF012


QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=1500, stateful_step_count=80)
MACHINES = [HybridTarget, HybridDraft, RecurrentTarget]


@pytest.mark.parametrize("machine", MACHINES)
def test_random_operations(machine: type[CacheMachine]) -> None:
    run_machine(machine, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_operations(machine: type[CacheMachine]) -> None:
    run_machine(machine, LONG)


def run_machine(machine: type[CacheMachine], how: settings) -> None:
    case = machine.TestCase
    case.settings = how
    case().runTest()
