"""Who owns which page: reference counts, the free list, and the least-recently-used list of cached pages.

A pool hands out small integers. The same class counts KV pages and recurrent-state slots, since both live the same
life: free -> used (one or more owners) -> cached (no owner, but the prefix index can still find it) -> free.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ridgeline.errors import RidgelineError


class OutOfPages(RidgelineError):
    """No page or state slot is left, after evicting everything that no sequence owns. The scheduler preempts."""


class Pool:
    """`size` numbered places. `on_evict(id)` is told when a cached place is taken away from the prefix index."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.refs = [0] * size
        self.published: set[int] = set()
        self.free = list(range(size - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.evictions = 0
        self.on_evict: Callable[[int], None] = lambda _: None

    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def used(self) -> int:
        return self.size - self.available()

    def take(self) -> int:
        """A place with one owner. The caller has checked available()."""
        if not self.free:
            assert self.cached, "take() from an exhausted pool"
            self._evict()
        place = self.free.pop()
        self.refs[place] = 1
        return place

    def share(self, place: int) -> None:
        """One more owner of a used or cached place."""
        if self.refs[place] == 0:
            del self.cached[place]
        self.refs[place] += 1

    def release(self, place: int) -> None:
        """One owner less. Release a chain's deepest page first, so that it is also evicted first."""
        refs = self.refs[place] - 1
        assert refs >= 0, f"place {place} released more often than taken"
        self.refs[place] = refs
        if refs == 0:
            if place in self.published:
                self.cached[place] = None
            else:
                self.free.append(place)

    def writable(self, place: int) -> bool:
        return self.refs[place] == 1 and place not in self.published

    def publish(self, place: int) -> None:
        assert self.refs[place] > 0, f"place {place} published without an owner"
        self.published.add(place)

    def unpublish(self, place: int) -> None:
        self.published.remove(place)
        if self.refs[place] == 0:
            del self.cached[place]
            self.free.append(place)

    def _evict(self) -> None:
        place = next(iter(self.cached))
        self.evictions += 1
        self.on_evict(place)  # the index forgets it and calls unpublish
        assert place not in self.published, f"place {place} evicted, but the prefix index still lists it"

    def check(self, owners: list[int]) -> None:
        """Compare with `owners`, the number of owners of each place found by walking all sequences."""
        assert owners == self.refs, "reference counts differ from the owners"
        free, cached = set(self.free), set(self.cached)
        used = {place for place, refs in enumerate(self.refs) if refs}
        assert len(free) == len(self.free), "a place is twice in the free list"
        assert not (free & cached or free & used or cached & used), "free, cached and used places overlap"
        assert len(free) + len(cached) + len(used) == self.size, "a place is lost"
        assert cached <= self.published <= cached | used, "published places are the cached and some of the used"
