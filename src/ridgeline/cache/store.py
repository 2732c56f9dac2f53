"""The cache store: which pages and recurrent states each sequence holds in each role, behind a handful of verbs.

    add -> match_prefix -> (reserve -> forward -> commit)* -> free            fork: a second sequence from a first

`commit` decides by tokens alone: every role goes back to the longest prefix that agrees with what was committed, keys,
values and recurrent state alike. How it goes back (truncation, a saved state, or an older state and running tokens
again) is the store's business; afterwards `held` says where each role stands.

A reservation must be run before the sequence's next verb, or the sequence freed: published pages are taken as written.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.cache.holding import Holding, Placement
from ridgeline.cache.prefix import root_key
from ridgeline.cache.recurrent import LEAST_STATES, Checkpoints
from ridgeline.cache.role import RoleCache
from ridgeline.cache.view import CacheView, RoleLayout
from ridgeline.errors import ConfigError
from ridgeline.types import TARGET


@dataclass(frozen=True)
class RoleStats:
    """Counts of one role. used: owned by sequences; cached: owned by none, kept for prefix hits; tokens for queries and
    hits; evictions and copies (copy-on-write) in pages; row_moves in rows of accepted tree paths."""

    pages_total: int
    pages_used: int
    pages_cached: int
    states_total: int
    states_used: int
    states_cached: int
    prefix_queries: int
    prefix_hits: int
    page_evictions: int
    state_evictions: int
    page_copies: int
    row_moves: int


@dataclass(frozen=True)
class CacheStats:
    roles: dict[str, RoleStats]

    @property
    def usage(self) -> float:
        """Largest share of pages or states, 0 to 1, that live sequences own in any role."""
        shares = [0.0]
        for r in self.roles.values():
            shares += [used / total for used, total in
                       ((r.pages_used, r.pages_total), (r.states_used, r.states_total)) if total]
        return max(shares)


class CacheStore:
    def __init__(
        self, roles: Mapping[str, RoleLayout], *, page_size: int, num_pages: int, num_states: int,
        device: torch.device | str = "cpu", prefix_caching: bool = True,
    ) -> None:
        """`num_pages` pages of `page_size` tokens and `num_states` state slots for each role that needs such."""
        if TARGET not in roles:
            raise ConfigError(f"the cache needs the role {TARGET!r}; given: {', '.join(roles) or 'none'}")
        if page_size < 1 or num_pages < 1 or num_states < 0:
            raise ConfigError(f"page_size={page_size} and num_pages={num_pages} must be at least 1, "
                              f"num_states={num_states} at least 0")
        if num_states < LEAST_STATES and any(layout.recurrent for layout in roles.values()):
            raise ConfigError(f"num_states={num_states}: a model with recurrent layers needs at least {LEAST_STATES}")
        self.page_size, self.num_pages, self.num_states = page_size, num_pages, num_states
        self._roles = {
            role: RoleCache(role, layout, page_size=page_size, num_pages=num_pages, num_states=num_states,
                            device=torch.device(device), prefix_caching=prefix_caching)
            for role, layout in roles.items()
        }
        self.views: dict[str, CacheView] = {role: cache.view for role, cache in self._roles.items()}
        for view in self.views.values():
            view.link(self.views)
        self._sequences: dict[str, dict[str, Holding]] = {}

    # -- verbs ----------------------------------------------------------------------------------------------------

    def add(
        self, seq_id: str, tokens: list[int], *, domain: str = "causal", salt: str = "", publish: bool = True,
        align: int = 1,
    ) -> None:
        """A new sequence. `tokens` are its committed tokens; the engine appends to this list, the store reads it.

        domain: everything besides tokens that the cached values depend on (visibility, adapter, soft prompt); salt: the
        tenant. Only sequences with equal domain and salt share a prefix. publish=False: others never reuse this one.
        align: block size of a model whose rows see their whole block: what a row holds depends on the tokens up to the
        block's end, so keys cover those too, and after a match, commit or fork only whole blocks are held.
        """
        assert align >= 1, f"sequence {seq_id!r}: align={align}"
        assert seq_id not in self._sequences, f"sequence {seq_id!r} is already in the cache store"
        self._sequences[seq_id] = {
            role: Holding(tokens, [self._root(cache, domain, salt, align)], Checkpoints(cache.states), publish, align)
            for role, cache in self._roles.items()
        }

    def match_prefix(self, seq_id: str, role: str = TARGET, limit: int | None = None) -> int:
        """Attach the longest cached prefix, whole pages, and return its length in tokens.

        At least one token is left to run; limit: at most so many tokens. Only while the role holds nothing.
        """
        h = self._holding(seq_id, role)
        most = max(len(h.tokens) - 1, 0)
        return self._roles[role].match(h, most if limit is None else min(limit, most))

    def held(self, seq_id: str, role: str = TARGET) -> int:
        """How many leading committed tokens this role holds, those written since the last commit included."""
        return self._holding(seq_id, role).held

    def length(self, seq_id: str, role: str = TARGET) -> int:
        """held plus provisional tokens: where the next append goes."""
        return self._holding(seq_id, role).length

    def provisional(self, seq_id: str, role: str = TARGET) -> list[int]:
        """Tokens of the rows held .. length: drafts that are not committed yet; -1 for a node of a tree."""
        return list(self._holding(seq_id, role).extra)

    def reserve(
        self, seq_id: str, role: str, tokens: Sequence[int], *, at: int | None = None, write: int | None = None,
        offset: int = 0, rollback: int = 0, publishable: bool = True, parents: Sequence[int] | None = None,
    ) -> Placement:
        """Make room for a slice of a run. Raises OutOfPages, and then has changed nothing.

        at: position of the first token, None = append, else at most length(); what was held from there on is dropped.
        write: leading tokens that stay, None = all; the rest are scratch, readable during this run only.
        offset: index of the slice's first token in its run (only after slices that were written whole).
        rollback: so many of the last written tokens may be rejected later.
        publishable=False: rows depend on more than tokens (fed hidden states); from here on pages stay private.
        parents: of a tree, per token of the slice the index of its parent in the run, -1 = the last held token. Tokens
        that do not follow their predecessor count for nothing until commit(keep=...) picks a path.
        """
        h = self._holding(seq_id, role)
        cache = self._roles[role]
        placement = cache.reserve(
            h, tokens, at, write, offset, rollback, publishable, parents, len(self._sequences) - 1
        )
        if cache.donors:
            holdings = self._sequences[seq_id]
            placement.shared = {donor: holdings[donor].pages for donor in cache.donors}
        return placement

    def commit(self, seq_id: str, keep: Sequence[int] | None = None, role: str = TARGET) -> None:
        """Called after the engine has appended newly committed tokens. Never fails for want of pages.

        keep: which rows of the last run of `role` stay, in order (a prefix or a path of a tree); None = all written.
        Then every role goes back to the longest prefix that agrees with the tokens; pages beyond it are released, full
        pages published.
        """
        if keep is not None:
            self._roles[role].keep(self._holding(seq_id, role), keep)
        for name, h in self._holdings(seq_id).items():
            self._roles[name].commit(h)

    def fork(self, parent: str, child: str, tokens: list[int], *, length: int) -> int:
        """`child` starts with the parent's first `length` tokens, sharing pages (copied when first written).

        Roles with recurrent layers start at the newest saved state at or below `length`. Returns what the target holds.
        """
        holdings = self._holdings(parent)
        assert child not in self._sequences, f"sequence {child!r} is already in the cache store"
        assert tokens[:length] == holdings[TARGET].tokens[:length] and len(tokens) >= length, (
            f"fork of {parent!r}: the first {length} tokens of {child!r} differ")
        self._sequences[child] = {name: self._roles[name].fork(h, tokens, length) for name, h in holdings.items()}
        return self.held(child)

    def free(self, seq_id: str) -> None:
        """Release everything; published pages stay cached until their memory is needed."""
        for name, h in self._holdings(seq_id).items():
            self._roles[name].free(h)
        del self._sequences[seq_id]

    def reset_prefix_cache(self) -> None:
        for cache in self._roles.values():
            cache.index.clear()

    # -- questions ------------------------------------------------------------------------------------------------

    def can_hold(self, tokens: int) -> bool:
        """Whether a sequence of this many tokens fits an otherwise empty store."""
        return all(cache.page_count(tokens) <= self.num_pages for cache in self._roles.values())

    def free_pages(self, role: str = TARGET) -> int:
        """Free and evictable pages; all of them for a role that keeps no keys and values."""
        cache = self._role(role)
        return cache.pages.available() if cache.paged else self.num_pages

    def free_states(self, role: str = TARGET) -> int:
        """Free and evictable state slots; all of them for a role without recurrent layers."""
        cache = self._role(role)
        return cache.states.available() if cache.recurrent else self.num_states

    def stats(self) -> CacheStats:
        return CacheStats({
            role: RoleStats(
                c.pages.size, c.pages.used(), len(c.pages.cached), c.states.size, c.states.used(), len(c.states.cached),
                c.queries, c.hits, c.pages.evictions, c.states.evictions, c.page_copies, c.row_moves,
            ) for role, c in self._roles.items()
        })

    def check_integrity(self) -> None:
        """Assert every invariant. Walks everything: for tests."""
        for role, cache in self._roles.items():
            cache.check([holdings[role] for holdings in self._sequences.values()])

    # -- internals ------------------------------------------------------------------------------------------------

    def _root(self, cache: RoleCache, domain: str, salt: str, align: int) -> bytes:
        layout = cache.layout
        return root_key(
            cache.role, layout.fingerprint, str(layout.kv_dtype), str(self.page_size), str(align), domain, salt)

    def _role(self, role: str) -> RoleCache:
        assert role in self._roles, f"role {role!r} is not in the cache store; there are {', '.join(self._roles)}"
        return self._roles[role]

    def _holdings(self, seq_id: str) -> dict[str, Holding]:
        holdings = self._sequences.get(seq_id)
        assert holdings is not None, f"sequence {seq_id!r} is not in the cache store"
        return holdings

    def _holding(self, seq_id: str, role: str) -> Holding:
        h = self._holdings(seq_id).get(role)
        assert h is not None, f"role {role!r} is not in the cache store; there are {', '.join(self._roles)}"
        return h
