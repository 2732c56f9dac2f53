"""Divide one budget of bytes between the pages and the recurrent states of all roles."""
from __future__ import annotations

from collections.abc import Mapping

from ridgeline.cache.recurrent import LEAST_STATES
from ridgeline.cache.view import RoleLayout
from ridgeline.errors import ConfigError


def plan_sizes(
    roles: Mapping[str, RoleLayout], page_size: int, memory_bytes: int, max_num_seqs: int, *, rollback: int = 0
) -> tuple[int, int]:
    """(num_pages, num_states) for CacheStore, together within `memory_bytes`.

    A running sequence owns two states (one read, one written) and `rollback` more under speculation; twice that
    number is wanted so that as many stay cached for prefix hits. States take half of the memory at most, but never
    less than one sequence needs; all of it where no role has pages. Raises ConfigError if one sequence with one page
    does not fit.
    """
    page_bytes = page_size * sum(layout.kv_bytes_per_token() for layout in roles.values())
    state_bytes = sum(layout.state_bytes() for layout in roles.values())
    least = page_bytes + LEAST_STATES * state_bytes
    if memory_bytes < least:
        raise ConfigError(
            f"cache memory of {memory_bytes} bytes is too small: one page of {page_size} tokens takes {page_bytes} "
            f"bytes and the recurrent states of one sequence {LEAST_STATES * state_bytes}, so at least {least} are needed")
    num_states = 0
    if state_bytes:
        most = (memory_bytes // 2 if page_bytes else memory_bytes) // state_bytes
        num_states = max(LEAST_STATES, min(2 * max_num_seqs * (2 + rollback), most))
    num_pages = (memory_bytes - num_states * state_bytes) // page_bytes if page_bytes else 1
    return num_pages, num_states
