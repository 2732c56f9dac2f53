"""A stand-in for a model: every row and every state holds a number that is a function of the exact token prefix.

A row's number is computed from the number in the row (or state) before it, read back through the placement, as a real
layer would. The oracle computes the same numbers from the tokens alone, and compares.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from ridgeline.cache import CacheStore, Placement, RoleLayout
from ridgeline.types import PagedKV, Recurrent

SOFTMAX = RoleLayout((PagedKV(2, 3, 1), PagedKV(1, 2, 2)), torch.float64, "softmax")
HYBRID = RoleLayout(
    (Recurrent((("conv", (2, 2), "float64"), ("ssm", (3,), "float64"))), PagedKV(1, 2, 3),
     Recurrent((("ssm", (1,), "float64"),))),
    torch.float64, "hybrid",
)
RECURRENT = RoleLayout((Recurrent((("ssm", (2,), "float64"),)),), torch.float64, "recurrent")


def chain(before: float, token: int, nonce: int = 0) -> float:
    return float(hash((before, token, nonce)) % (1 << 50) + 1)


@dataclass
class Rows:
    """What one sequence should hold in one role: (token, number) per position; None = a token that must not agree."""

    rows: list[tuple[int | None, float]] = field(default_factory=list)
    run: list[tuple[int, float]] = field(default_factory=list)
    run_start: int = 0


class Oracle:
    def __init__(self, store: CacheStore) -> None:
        self.store = store
        self.tokens: dict[str, list[int]] = {}
        self.seeds: dict[tuple[str, str], float] = {}
        self.expect: dict[str, dict[str, Rows]] = {}

    # -- verbs, each carried out in the store and in the oracle ---------------------------------------------------

    def add(self, seq: str, tokens: Sequence[int], *, salt: str = "", publish: bool = True, align: int = 1) -> None:
        self.tokens[seq] = list(tokens)
        self.store.add(seq, self.tokens[seq], salt=salt, publish=publish, align=align)
        self.expect[seq] = {role: Rows() for role in self.store.views}
        for role in self.store.views:
            self.seeds[seq, role] = float(hash((len(salt), len(role))) % (1 << 30))

    def numbers(self, seq: str, role: str, tokens: Sequence[int]) -> list[tuple[int | None, float]]:
        out: list[tuple[int | None, float]] = []
        value = self.seeds[seq, role]
        for token in tokens:
            value = chain(value, token)
            out.append((token, value))
        return out

    def match(self, seq: str, role: str = "target") -> int:
        held = self.store.match_prefix(seq, role)
        self.expect[seq][role].rows = self.numbers(seq, role, self.tokens[seq][:held])
        return held

    def run(
        self, seq: str, role: str, tokens: Sequence[int], *, at: int | None = None, write: int | None = None,
        offset: int = 0, rollback: int = 0, parents: Sequence[int] | None = None, nonce: int = 0,
    ) -> Placement:
        """Reserve, then write numbers the way a forward pass would. nonce: rows that are fed something else."""
        place = self.store.reserve(
            seq, role, tokens, at=at, write=write, offset=offset, rollback=rollback, parents=parents,
            publishable=nonce == 0,
        )
        rows = self.expect[seq][role]
        before = len(rows.rows) if at is None else at
        assert place.start == before and place.context == before + len(tokens)
        del rows.rows[before:]
        last = rows.rows[-1][1] if rows.rows else self.seeds[seq, role]
        layout = self.store.views[role].layout
        read = last
        if layout.paged:
            assert len(place.pages) * self.store.page_size >= place.context
            if place.start:
                read = self.read_rows(role, place.pages, [place.start - 1])[0]
        if layout.recurrent:
            assert (place.state_read < 0) == (place.start == 0)
            read = self.read_state(role, place.state_read) if place.start else read
            assert place.state_read < 0 or place.state_read not in place.state_write, "one slot read and written"
            slots = [s for s in place.state_write if s >= 0]
            assert len(slots) == len(set(slots))
        else:
            assert place.state_read == -1 and set(place.state_write) == {-1}
        assert read == last, "the row or state before this run is not that of its prefix"
        if offset == 0:
            rows.run, rows.run_start = [], place.start
        first = rows.run_start
        linear = not rows.rows or rows.rows[-1][0] is not None
        kept = len(tokens) if write is None else write
        numbers: list[float] = [value for _, value in rows.run]
        parent_of_first = rows.rows[first - 1][1] if first else self.seeds[seq, role]
        for i, token in enumerate(tokens):
            index = offset + i
            parent = index - 1 if parents is None else parents[i]
            linear = linear and parent == index - 1
            value = chain(numbers[parent] if parent >= 0 else parent_of_first, token, nonce)
            numbers.append(value)
            self.write(role, place, i, value)
            if i < kept:
                rows.run.append((token, value))
                rows.rows.append((token if linear else None, value))
        return place

    def commit(self, seq: str, new: Sequence[int] = (), keep: Sequence[int] | None = None, role: str = "target") -> None:
        tokens = self.tokens[seq]
        tokens.extend(new)
        self.store.commit(seq, keep, role)
        if keep is not None:
            mine = self.expect[seq][role]
            mine.rows[mine.run_start:] = [mine.run[i] for i in keep]
        for name, rows in self.expect[seq].items():
            agree = len(list(takewhile(lambda pair: pair[0][0] == pair[1], zip(rows.rows, tokens))))
            agree -= agree % self.store._sequences[seq][name].align
            held = self.store.held(seq, name)
            recurrent = self.store.views[name].layout.recurrent
            assert held <= agree if recurrent else held == agree, f"{name}: {held} held, {agree} agree"
            assert self.store.length(seq, name) == held
            rows.rows, rows.run, rows.run_start = rows.rows[:held], [], held

    def fork(self, parent: str, child: str, length: int, suffix: Sequence[int]) -> None:
        self.tokens[child] = self.tokens[parent][:length] + list(suffix)
        held = self.store.fork(parent, child, self.tokens[child], length=length)
        assert held == self.store.held(child)
        self.expect[child] = {}
        for role, rows in self.expect[parent].items():
            self.seeds[child, role] = self.seeds[parent, role]
            mine = self.store.held(child, role)
            assert mine <= min(length, self.store.held(parent, role))
            self.expect[child][role] = Rows(rows.rows[:mine], run_start=mine)

    def free(self, seq: str) -> None:
        self.store.free(seq)
        del self.tokens[seq], self.expect[seq]

    # -- tensors --------------------------------------------------------------------------------------------------

    def write(self, role: str, place: Placement, i: int, value: float) -> None:
        view, position = self.store.views[role], place.start + i
        for layer, spec in enumerate(view.layout.layers):
            if isinstance(spec, PagedKV):
                page, row = place.pages[position // view.page_size], position % view.page_size
                k, v = view.kv(layer)
                k[page, :, row], v[page, :, row] = value, -value
            elif isinstance(spec, Recurrent) and place.state_write[i] >= 0:
                for tensor in view.recurrent(layer).values():
                    tensor[place.state_write[i]] = value

    def read_rows(self, role: str, pages: Sequence[int], positions: Sequence[int]) -> list[float]:
        """The numbers in these rows; the same in all heads and layers."""
        view = self.store.views[role]
        at = [pages[p // view.page_size] for p in positions], [p % view.page_size for p in positions]
        copies = [
            x for layer, spec in enumerate(view.layout.layers) if isinstance(spec, PagedKV)
            for k, v in [view.kv(layer)] for x in (k[at[0], :, at[1]], -v[at[0], :, at[1]])  # (rows, heads, dim)
        ]
        rows = torch.cat([x.flatten(1) for x in copies], 1)
        assert bool((rows == rows[:, :1]).all()), "layers differ in a row"
        return rows[:, 0].tolist()

    def read_state(self, role: str, slot: int) -> float:
        view = self.store.views[role]
        found = {
            x for layer, spec in enumerate(view.layout.layers) if isinstance(spec, Recurrent)
            for tensor in view.recurrent(layer).values() for x in tensor[slot].flatten().tolist()
        }
        assert len(found) == 1, "layers differ in a state"
        return float(found.pop())

    def verify(self) -> None:
        """Each row of each sequence, and each saved state, carries the number of its own prefix."""
        self.store.check_integrity()
        for seq, roles in self.expect.items():
            for role, rows in roles.items():
                h = self.store._sequences[seq][role]
                layout = self.store.views[role].layout
                assert self.store.length(seq, role) == len(rows.rows)
                if layout.paged:
                    found = self.read_rows(role, h.pages, range(len(rows.rows)))
                    assert found == [value for _, value in rows.rows], f"{seq} {role}"
                for length, slot in h.checkpoints.saved:
                    assert self.read_state(role, slot) == rows.rows[length - 1][1], f"{seq} {role} state at {length}"

    def holdings(self) -> list[object]:
        """Everything a failed reserve must leave alone."""
        return [
            (seq, role, h.held, list(h.extra), list(h.pages), list(h.run_tokens), h.fed_from)
            for seq, roles in self.store._sequences.items() for role, h in roles.items()
        ]
