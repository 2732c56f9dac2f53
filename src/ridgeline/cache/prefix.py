"""Which pages and recurrent states hold the result of which token prefix.

The key of page i is blake2b(key of page i-1, tokens of page i). Below page 0 stands a root key that separates
role, model fingerprint, KV dtype, page size, domain (visibility, soft prompts, adapters) and the tenant's salt.
A key thus stands for a whole prefix and for everything else that the cached values depend on.
"""
from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ridgeline.cache.pages import Pool

GHOSTS = 4096  # remembered prefixes without a value, for roles without pages; 4096 cost about 1 MB


def root_key(*fields: str) -> bytes:
    """Domain separation: every field is preceded by its length, so that no two lists of fields collide."""
    h = blake2b(digest_size=32)
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "little") + data)
    return h.digest()


def child_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    data = array("q", tokens).tobytes()
    return blake2b(parent + len(data).to_bytes(8, "little") + data, digest_size=32).digest()


@dataclass(slots=True, eq=False)
class Entry:
    """A full page of a prefix: its page (-1 = the role has none) and the state after its last token (-1 = none)."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    page: int = -1
    state: int = -1


class PrefixIndex:
    """key -> Entry for one role, kept consistent with the role's two pools."""

    def __init__(self, pages: Pool, states: Pool, *, paged: bool) -> None:
        self.pages, self.states, self.paged = pages, states, paged
        self.entries: dict[bytes, Entry] = {}
        self.by_page: dict[int, Entry] = {}
        self.by_state: dict[int, Entry] = {}
        self.ghosts: OrderedDict[bytes, None] = OrderedDict()
        pages.on_evict = self.drop_page
        states.on_evict = self.drop_state

    def put(self, key: bytes, parent: bytes, tokens: Sequence[int], page: int) -> None:
        """Publish a full page unless this prefix is already known (then the caller's copy stays private)."""
        if key in self.entries:
            return
        entry = self.entries[key] = Entry(key, parent, tuple(tokens), page)
        if self.paged:
            self.by_page[page] = entry
            self.pages.publish(page)
        else:
            self._remember(entry)

    def put_state(self, key: bytes, state: int) -> None:
        """Publish the state after a known page, unless it has one."""
        entry = self.entries.get(key)
        if entry is None or entry.state >= 0 or state in self.by_state:
            return
        entry.state = state
        self.by_state[state] = entry
        self.states.publish(state)
        self.ghosts.pop(key, None)

    def drop_page(self, page: int) -> None:
        """Forget the entry of this page, its state included."""
        entry = self.by_page.pop(page)
        del self.entries[entry.key]
        self.pages.unpublish(page)
        if entry.state >= 0:
            del self.by_state[entry.state]
            self.states.unpublish(entry.state)

    def drop_state(self, state: int) -> None:
        """Forget a state; an entry with a page stays."""
        entry = self.by_state.pop(state)
        entry.state = -1
        self.states.unpublish(state)
        if not self.paged:
            self._remember(entry)

    def clear(self) -> None:
        for page in list(self.by_page):
            self.drop_page(page)
        for state in list(self.by_state):
            self.drop_state(state)
        self.entries.clear()
        self.ghosts.clear()

    def _remember(self, entry: Entry) -> None:
        """Without pages nothing shows where two requests part, so keys are remembered for a while without a state."""
        self.ghosts[entry.key] = None
        if len(self.ghosts) > GHOSTS:
            oldest, _ = self.ghosts.popitem(last=False)
            del self.entries[oldest]

    def check(self) -> None:
        assert set(self.by_page) == self.pages.published, "published pages differ from the index"
        assert set(self.by_state) == self.states.published, "published states differ from the index"
        entries = self.entries.values()
        assert len(self.by_page) == sum(entry.page >= 0 for entry in entries), "a page without its entry"
        assert len(self.by_state) == sum(entry.state >= 0 for entry in entries), "a state without its entry"
        for key, entry in self.entries.items():
            assert key == entry.key == child_key(entry.parent, entry.tokens), "a key does not match its tokens"
            assert (entry.page >= 0) == self.paged, "an entry without its page"
            assert not self.paged or self.by_page[entry.page] is entry, "two entries for one page"
            assert entry.state < 0 or self.by_state[entry.state] is entry, "two entries for one state"
            assert (entry.key in self.ghosts) == (not self.paged and entry.state < 0), "a ghost with a value"
