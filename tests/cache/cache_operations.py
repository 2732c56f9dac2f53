"""What can happen to a cache store, as operations that draw their choices from a random number generator."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from cache_oracle import Oracle

from ridgeline.cache import CacheStore, OutOfPages, RoleLayout

COMMON = [0, 1, 2, 1, 0, 0, 2, 1, 1, 2, 0, 1, 2, 2, 0, 1]  # what many requests begin with
SEQS = 4


class Operations:
    def __init__(self, roles: Mapping[str, RoleLayout], rng: Random) -> None:
        self.roles = sorted(roles)
        self.store = CacheStore(
            roles, page_size=rng.choice([1, 3, 4]), num_pages=rng.randint(6, 18), num_states=rng.randint(3, 12),
            prefix_caching=rng.random() < 0.8,
        )
        self.oracle = Oracle(self.store)
        self.names = self.full = 0

    def step(self, rng: Random) -> None:
        kinds = [self.add] if len(self.oracle.tokens) < SEQS else []
        if self.oracle.tokens:
            kinds += [self.prefill, self.prefill, self.verify_drafts, self.draft, self.tree, self.scratch,
                      self.overwrite, self.commit, self.free]
            kinds += [self.fork] if len(self.oracle.tokens) < SEQS else []
        rng.choice(kinds * 5 + [self.reset])(rng)
        self.oracle.verify()

    def name(self) -> str:
        self.names += 1
        return f"s{self.names}"

    def pick(self, rng: Random) -> str:
        return rng.choice(sorted(self.oracle.tokens))

    def attempt(self, rng: Random, run: Callable[[], object]) -> bool:
        """Run; if the store is full it must be unchanged, and something is preempted."""
        before = self.oracle.holdings()
        try:
            run()
        except OutOfPages:
            assert self.oracle.holdings() == before, "a failed reserve has changed something"
            self.full += 1
            self.oracle.free(self.pick(rng))
            return False
        return True

    def pending(self, seq: str, role: str) -> list[int]:
        return self.oracle.tokens[seq][self.store.held(seq, role):]

    def settled(self, rng: Random, role: str | None = None) -> tuple[str, str]:
        """A sequence and a role that holds nothing provisional."""
        seq, role = self.pick(rng), role or rng.choice(self.roles)
        if self.store.length(seq, role) > self.store.held(seq, role):
            self.oracle.commit(seq)
        return seq, role

    def add(self, rng: Random) -> None:
        seq = self.name()
        tokens = COMMON[:rng.choice([0, 5, 8, 12, 13, 16])] + tokens_of(rng, 1, 5)
        self.oracle.add(seq, tokens, salt=rng.choice(["", "", "", "a"]), publish=rng.random() < 0.8,
                        align=rng.choice([1, 1, 1, 2, 6]))
        for role in self.roles:
            self.oracle.match(seq, role)

    def prefill(self, rng: Random) -> None:
        seq, role = self.settled(rng)
        offset = 0
        for _ in range(rng.randint(1, 3)):
            chunk = self.pending(seq, role)[:rng.randint(1, 9)]
            if chunk:
                if not self.attempt(rng, lambda c=chunk, o=offset: self.oracle.run(seq, role, c, offset=o)):
                    return
                offset += len(chunk)
                self.oracle.verify()
        if rng.random() < 0.7:
            self.oracle.commit(seq)

    def verify_drafts(self, rng: Random) -> None:
        seq, role = self.settled(rng, "target")
        pending, drafts = self.pending(seq, role), tokens_of(rng, 0, 4)
        rollback = rng.choice([0, len(drafts)])
        if pending and self.attempt(rng, lambda: self.oracle.run(seq, role, pending + drafts, rollback=rollback)):
            accepted = rng.randint(0, len(drafts))
            keep = range(len(pending) + accepted)
            self.oracle.commit(seq, drafts[:accepted] + tokens_of(rng, 1, 1), keep=keep)

    def draft(self, rng: Random) -> None:
        """One by one, provisionally; a later commit decides."""
        seq, role = self.settled(rng, "draft")
        for token in tokens_of(rng, 1, 4):
            run = [*self.pending(seq, role), token]
            if not self.attempt(rng, lambda r=run: self.oracle.run(seq, role, r)):
                return

    def tree(self, rng: Random) -> None:
        """Committed tokens, then a random tree; a path is kept, or the commit speaks of nothing in this role."""
        seq, role = self.settled(rng)
        pending = self.pending(seq, role)
        if not pending:
            return
        nodes = tokens_of(rng, 1, 6)
        parents = [*range(-1, len(pending) - 1)]
        parents += [rng.randint(len(pending) - 1, len(parents) + i - 1) for i in range(len(nodes))]
        tokens, rollback = pending + nodes, rng.choice([0, len(nodes), len(nodes)])
        if self.attempt(rng, lambda: self.oracle.run(seq, role, tokens, parents=parents, rollback=rollback)):
            path, node = [], rng.randint(len(pending) - 1, len(tokens) - 1)
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            if rng.random() < 0.3:
                more = tokens_of(rng, 1, 2)
                if not self.store.views[role].layout.recurrent:
                    self.attempt(rng, lambda: self.oracle.run(seq, role, more))
                if seq in self.oracle.tokens:
                    self.oracle.commit(seq, nodes + more)
            else:
                self.oracle.commit(seq, [tokens[i] for i in path[len(pending):]] + tokens_of(rng, 1, 1), path, role)

    def scratch(self, rng: Random) -> None:
        seq, role = self.settled(rng)
        tokens = self.pending(seq, role)[:2] + tokens_of(rng, 1, 5)
        write = rng.randint(0, len(tokens))
        if self.attempt(rng, lambda: self.oracle.run(seq, role, tokens, write=write)) and rng.random() < 0.5:
            self.oracle.commit(seq)

    def overwrite(self, rng: Random) -> None:
        """Fed rows too (nonce), which no other sequence may ever be given."""
        seq, role = self.settled(rng)
        held = self.store.held(seq, role)
        places = [0, held] if self.store.views[role].layout.recurrent else range(held + 1)
        at = rng.choice(places)
        tokens = rng.choice([self.oracle.tokens[seq][at:], tokens_of(rng, 1, 5)]) or [0]
        if self.attempt(rng, lambda: self.oracle.run(seq, role, tokens, at=at, nonce=rng.choice([0, 0, 7]))):
            self.oracle.commit(seq, keep=rng.choice([None, (), (0,)]), role=role)

    def fork(self, rng: Random) -> None:
        parent = self.pick(rng)
        length = rng.choice([len(self.oracle.tokens[parent]) - 1, rng.randint(0, len(self.oracle.tokens[parent]))])
        self.oracle.fork(parent, self.name(), length, tokens_of(rng, 1, 4))

    def commit(self, rng: Random) -> None:
        self.oracle.commit(self.pick(rng), tokens_of(rng, 0, 3))

    def free(self, rng: Random) -> None:
        self.oracle.free(self.pick(rng))

    def reset(self, rng: Random) -> None:
        self.store.reset_prefix_cache()
        assert all(r.pages_cached == r.states_cached == 0 for r in self.store.stats().roles.values())

    def finish(self) -> None:
        for seq in list(self.oracle.tokens):
            self.oracle.free(seq)
        self.oracle.verify()
        assert self.store.stats().usage == 0, "something leaks"


def tokens_of(rng: Random, least: int, most: int) -> list[int]:
    return [rng.randint(0, 2) for _ in range(rng.randint(least, most))]
