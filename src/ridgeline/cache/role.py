"""The cache of one role (one model): its tensors, pools and prefix index, and what each sequence holds in them."""
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from ridgeline.cache.holding import NO_TOKEN, UNLIMITED, Holding, Placement, linear_rows
from ridgeline.cache.pages import OutOfPages, Pool
from ridgeline.cache.prefix import PrefixIndex, child_key
from ridgeline.cache.recurrent import StatePlan
from ridgeline.cache.view import CacheView, RoleLayout


class RoleCache:
    def __init__(
        self, role: str, layout: RoleLayout, *, page_size: int, num_pages: int, num_states: int, device: torch.device,
        prefix_caching: bool,
    ) -> None:
        self.role, self.layout, self.page_size = role, layout, page_size
        self.paged, self.recurrent, self.caching = layout.paged, layout.recurrent, prefix_caching
        self.donors = layout.donors(role)
        self.pages = Pool(num_pages if self.paged else 0)
        self.states = Pool(num_states if self.recurrent else 0)
        self.index = PrefixIndex(self.pages, self.states, paged=self.paged)
        self.view = CacheView(
            role, layout, page_size=page_size, num_pages=num_pages, num_states=num_states, device=device
        )
        self.queries = self.hits = self.page_copies = self.row_moves = 0

    def page_count(self, length: int) -> int:
        return -(-length // self.page_size) if self.paged else 0

    def key(self, h: Holding, page: int) -> bytes:
        """Key of the prefix that ends with this page; hashed once per sequence."""
        size, keys = self.page_size, h.keys
        for i in range(len(keys) - 1, page + 1):
            keys.append(child_key(keys[i], h.page_tokens(i, size)))
        return keys[page + 1]

    # -- prefix cache ---------------------------------------------------------------------------------------------

    def match(self, h: Holding, limit: int) -> int:
        """Attach the longest published prefix of at most `limit` tokens, whole pages; returns its length."""
        assert not (h.held or h.extra or h.pages), f"role {self.role!r}: match_prefix, but it holds something"
        if not self.caching:
            return 0
        self.queries += len(h.tokens)
        found, entries, hit = 0, [], 0
        for i in range(h.full_pages(limit, self.page_size)):
            entry = self.index.entries.get(self.key(h, i))
            if entry is None:
                if self.paged:
                    break
                continue
            entries.append(entry)
            if (i + 1) * self.page_size % h.align:
                continue  # inside a block: what is held must be whole blocks
            found = i + 1
            if entry.state >= 0 or not self.recurrent:
                hit, state = found, entry.state
        if hit:
            if self.paged:
                h.pages = [entry.page for entry in entries[:hit]]
                for page in h.pages:
                    self.pages.share(page)
            if self.recurrent:
                self.states.share(state)
                h.checkpoints.saved.append((hit * self.page_size, state))
        if self.recurrent and found > hit:
            h.junction = found * self.page_size
        h.offered, h.held = hit, hit * self.page_size
        self.hits += h.held
        return h.held

    def settle(self, h: Holding) -> None:
        """Publish the full pages and states that the last runs have written, then forget superseded states."""
        h.unsettled = False
        size = self.page_size
        full = h.full_pages(min(h.held, h.fed_from), size)
        if self.caching and h.publish:
            for i in range(h.offered, full):
                key = self.key(h, i)
                self.index.put(key, h.keys[i], h.page_tokens(i, size), h.pages[i] if self.paged else -1)
            h.offered = max(h.offered, full)
            for length, slot in h.checkpoints.saved:
                if length % size == length % h.align == 0 and length <= full * size:
                    self.index.put_state(self.key(h, length // size - 1), slot)
        if self.recurrent:
            h.checkpoints.trim(h.held)

    # -- one run slice --------------------------------------------------------------------------------------------

    def reserve(
        self, h: Holding, tokens: Sequence[int], at: int | None, write: int | None, offset: int, rollback: int,
        publishable: bool, parents: Sequence[int] | None, others: int,
    ) -> Placement:
        if h.unsettled:
            self.settle(h)
        count, length = len(tokens), h.held + len(h.extra)
        start = length if at is None else at
        written = count if write is None else write
        assert count > 0 and 0 <= written <= count and 0 <= start <= length, (
            f"role {self.role!r}: {written} of {count} tokens at {start}, while {length} positions are held")
        assert offset == 0 or (offset == len(h.run_tokens) and start == h.run_start + offset), (
            f"role {self.role!r}: a slice at offset {offset} after {len(h.run_tokens)} written tokens of the run")
        context = start + count
        plan, read = StatePlan([], False), -1
        if self.recurrent:
            read = h.checkpoints.at(start)
            assert read >= 0 or start == 0, f"role {self.role!r}: no recurrent state at position {start}"
            plan = self._plan_states(h, start, written, offset, rollback, publishable, others)
        if self.paged:
            self._make_room(h, start, context)  # the last thing that can fail, and the first that changes anything

        if start < length:
            self._truncate(h, start)
        state_write = self._take_states(h, start, offset, plan, parents, count) if self.recurrent else [-1] * count
        if start <= h.fed_from:
            h.fed_from = UNLIMITED if publishable else start
        if offset == 0:
            h.run_start = start
            h.run_tokens = []
        if written:
            self._append(h, tokens if written == count else tokens[:written], offset, parents)
        return Placement(start, context, h.pages, read, state_write)

    def _append(self, h: Holding, tokens: Sequence[int], offset: int, parents: Sequence[int] | None) -> None:
        """Record written rows; as far as they follow on from `held` and equal the committed tokens, they are held."""
        h.unsettled = True
        h.run_tokens.extend(tokens)
        new = list(tokens)
        if parents is not None:
            linear = linear_rows(parents, offset, len(new))
            new[linear:] = [NO_TOKEN] * (len(new) - linear)
        if h.extra:
            h.extra += new
        else:
            h.extra = new
            h.agree()

    def _make_room(self, h: Holding, start: int, context: int) -> None:
        """Pages for start..context that only this sequence may write; OutOfPages before any change."""
        pages, pool, size = h.pages, self.pages, self.page_size
        last = -(-context // size)
        grow = last - len(pages)
        first = start // size
        shared, listed = [], []
        for i in range(first, min(last, len(pages))):
            page = pages[i]
            if pool.refs[page] > 1:
                shared.append(i)
            elif page in pool.published:
                listed.append(i)
        room = pool.available()
        if max(grow, 0) + len(shared) > room:
            raise OutOfPages(f"role {self.role!r}: {max(grow, 0) + len(shared)} pages are needed and {room} are left")
        if max(grow, 0) + len(shared) + len(listed) > room:
            for i in listed:  # no room for copies: these pages leave the prefix index and are written in place
                self.index.drop_page(pages[i])
            listed = []
        for i in shared + listed:
            fresh = pool.take()
            if i == first and start % size:
                self.view.copy_page(pages[i], fresh, start % size)
                self.page_copies += 1
            pool.release(pages[i])
            pages[i] = fresh
        for _ in range(grow):
            pages.append(pool.take())

    def _truncate(self, h: Holding, start: int) -> None:
        """Forget what the sequence held from `start` on; its pages stay in the table."""
        if start < h.held:
            h.held = start
            h.extra = []
            h.offered = min(h.offered, h.full_pages(start, self.page_size))
        else:
            h.extra = h.extra[:start - h.held]
        h.checkpoints.cut(start)

    def _plan_states(
        self, h: Holding, start: int, written: int, offset: int, rollback: int, publishable: bool, others: int
    ) -> StatePlan:
        wanted = []
        if self.caching and h.publish and publishable:
            unit = math.lcm(self.page_size, h.align)
            boundary = (start + written) // unit * unit
            wanted = [p - start - 1 for p in (h.junction, boundary) if start < p <= start + written]
        return h.checkpoints.plan(start, h.held, written, rollback, wanted, offset == 0, others)

    def _take_states(
        self, h: Holding, start: int, offset: int, plan: StatePlan, parents: Sequence[int] | None, count: int
    ) -> list[int]:
        own = h.checkpoints
        if offset == 0:
            own.cut(start)
        if plan.drop_spares:
            own.trim(h.held, upto=start)
        linear = count if parents is None else linear_rows(parents, offset, count)
        slots = [-1] * count
        for i in plan.save:
            slots[i] = slot = self.states.take()
            if i < linear:
                own.saved.append((start + i + 1, slot))
            else:
                own.branches[offset + i] = slot
        return slots

    # -- commit, fork, free ---------------------------------------------------------------------------------------

    def keep(self, h: Holding, keep: Sequence[int]) -> None:
        """Of the last run keep these rows, in this order."""
        run, start = h.run_tokens, h.run_start
        assert all(a < b for a, b in pairwise(keep)) and all(0 <= i < len(run) for i in keep), (
            f"role {self.role!r}: keep={list(keep)} of a run with {len(run)} written tokens")
        moved = next((j for j, i in enumerate(keep) if i != j), len(keep))
        if moved < len(keep) and self.paged:
            self.view.move_rows(h.pages, [start + i for i in keep[moved:]], start + moved)
            self.row_moves += len(keep) - moved
        if self.recurrent:
            h.checkpoints.keep(start, keep)
        if h.held > start:
            h.held = start
            h.extra = []
            h.offered = min(h.offered, h.full_pages(start, self.page_size))
        h.extra[start - h.held:] = [run[i] for i in keep]

    def commit(self, h: Holding) -> None:
        """Roll back to the longest prefix that agrees with the committed tokens, and that has a state."""
        if h.extra:
            h.agree()
            h.extra = []
        h.held -= h.held % h.align
        h.run_start, h.run_tokens = h.held, []
        if self.recurrent:
            h.held = h.checkpoints.newest(h.held)
            h.checkpoints.cut(h.held)
        h.offered = min(h.offered, h.full_pages(h.held, self.page_size))
        if h.unsettled:
            self.settle(h)
        self._release_pages(h, self.page_count(h.held))

    def _release_pages(self, h: Holding, keep: int) -> None:
        while len(h.pages) > keep:
            self.pages.release(h.pages.pop())

    def fork(self, h: Holding, tokens: list[int], length: int) -> Holding:
        length = min(length, h.held)
        length -= length % h.align
        checkpoints = h.checkpoints.share(length)
        if self.recurrent:
            length = checkpoints.newest(length)
        pages = h.pages[:self.page_count(length)]
        for page in pages:
            self.pages.share(page)
        full = h.full_pages(length, self.page_size)
        return Holding(
            tokens, h.keys[:full + 1], checkpoints, h.publish, h.align, pages, length, offered=min(h.offered, full),
            fed_from=h.fed_from, junction=h.junction,
        )

    def free(self, h: Holding) -> None:
        h.checkpoints.cut(-1)
        self._release_pages(h, 0)

    def check(self, holdings: Sequence[Holding]) -> None:
        """Assert the invariants of this role, given what all sequences hold in it."""
        size = self.page_size
        pages, states = [0] * self.pages.size, [0] * self.states.size
        for h in holdings:
            for page in h.pages:
                pages[page] += 1
            lengths = [length for length, _ in h.checkpoints.saved]
            assert lengths == sorted(set(lengths)) and (not lengths or 0 < lengths[0] <= lengths[-1] <= h.length), (
                f"states at {lengths}, while {h.length} positions are held")
            for slot in [slot for _, slot in h.checkpoints.saved] + list(h.checkpoints.branches.values()):
                states[slot] += 1
            assert 0 <= h.held <= len(h.tokens), f"{h.held} of {len(h.tokens)} tokens held"
            assert len(h.pages) >= self.page_count(h.length), f"{len(h.pages)} pages for {h.length} positions"
            assert h.offered <= h.full_pages(h.held, size), "a page was published before it was full"
            for i, page in enumerate(h.pages if h.unsettled else ()):
                written = (i + 1) * size > max(h.run_start, h.held)
                assert not (written and page in self.pages.published), f"page {page} was written while published"
            for i, page in enumerate(h.pages[:h.full_pages(h.held, size)]):
                entry = self.index.by_page.get(page)
                assert entry is None or (
                    entry.key == self.key(h, i) and list(entry.tokens) == h.page_tokens(i, size)
                ), f"page {page} is published for other tokens"
        self.pages.check(pages)
        self.states.check(states)
        self.index.check()
