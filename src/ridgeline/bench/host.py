"""What the system tells of the machine."""
from __future__ import annotations

import os
import platform
from pathlib import Path


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
