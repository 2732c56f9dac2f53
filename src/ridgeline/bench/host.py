"""What the system tells of the machine."""
from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for row in Path("/proc/cpuinfo").read_text().splitlines():
            if row.startswith("model name"):
                return row.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Main memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Cache(NamedTuple):
    """each: bytes of one; total: of all that the cores of this process have."""

    name: str
    each: int
    total: int


def caches() -> list[Cache]:
    """Data caches from the nearest on, as the system names them; [] where it says nothing."""
    found: dict[str, tuple[int, set[str]]] = {}
    for core in sorted(os.sched_getaffinity(0)):
        for index in sorted(Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*")):
            try:
                kind, level, size, shared = (
                    (index / name).read_text().strip() for name in ("type", "level", "size", "shared_cpu_list"))
                each = int(size.rstrip("K")) << 10
            except (OSError, ValueError):
                continue
            if kind != "Instruction":
                found.setdefault(f"L{level}", (each, set()))[1].add(shared)
    return [Cache(name, each, each * len(owners)) for name, (each, owners) in sorted(found.items())]
