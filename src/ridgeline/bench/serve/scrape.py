"""What a server tells of itself: counters of its prefix cache, its version."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ridgeline.bench.serve.client import Target, get
from ridgeline.errors import PeerError

if TYPE_CHECKING:
    import aiohttp

HITS, QUERIES = "prefix_cache_hits", "prefix_cache_queries"


async def prefix_counters(client: aiohttp.ClientSession, target: Target) -> tuple[float, float] | None:
    """(hits, queries) in tokens since the server's start, from /metrics; None where it has no such counters."""
    try:
        page = await get(client, target, "/metrics")
    except PeerError:
        return None
    return parse_counters((page or b"").decode("utf-8", "replace"))


def parse_counters(page: str) -> tuple[float, float] | None:
    """Sums over labels of `PREFIX:prefix_cache_hits` and `..._queries`, with or without `_total`, of a Prometheus page."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        value = rest.rpartition("}")[2].split()
        short = name.rpartition(":")[2].removesuffix("_total")
        if short in (HITS, QUERIES) and value:
            try:
                found[short] = found.get(short, 0.0) + float(value[0])
            except ValueError:
                continue
    return (found[HITS], found[QUERIES]) if {HITS, QUERIES} <= found.keys() else None


async def version(client: aiohttp.ClientSession, target: Target) -> str | None:
    """The text of /version, if the server has that page."""
    try:
        page = await get(client, target, "/version")
        found = json.loads(page or b"null")
    except (PeerError, ValueError):
        return None
    return str(found.get("version")) if isinstance(found, dict) and found.get("version") else None
