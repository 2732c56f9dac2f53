"""The cache: pages of keys and values, recurrent states, and the prefixes that can be reused."""
from ridgeline.cache.holding import Placement
from ridgeline.cache.pages import OutOfPages
from ridgeline.cache.plan import plan_sizes
from ridgeline.cache.store import CacheStats, CacheStore, RoleStats
from ridgeline.cache.view import CacheView, RoleLayout

__all__ = ["CacheStats", "CacheStore", "CacheView", "OutOfPages", "Placement", "RoleLayout", "RoleStats", "plan_sizes"]
