"""What is noted while the clients run: how soon /health answers, and how much memory the server has."""
from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MEMORY_S = 2.0
GROWTH_SHARE, GROWTH_BYTES = 0.02, 16 << 20


class Health:
    """Asks from a process of its own, so that a busy client is not taken for a busy server. times: seconds of each answer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @contextmanager
    def asked(self, url: str) -> Iterator[None]:
        process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("probe.py")), url], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            yield
        finally:
            printed, _ = process.communicate()           # the end of its input ends it
            self.times += json.loads(printed)


class Memory:
    """samples: (seconds since the start, resident bytes) of a process. Linux only."""

    def __init__(self, pid: int):
        self.samples: list[tuple[float, int]] = []
        self._status, self._start = Path(f"/proc/{pid}/status"), time.monotonic()

    async def watch(self) -> None:
        while True:
            self.samples.append((round(time.monotonic() - self._start, 1), self.resident()))
            await asyncio.sleep(MEMORY_S)

    def resident(self) -> int:
        line = next(line for line in self._status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def growth(self) -> int:
        """Bytes: median of the last quarter less that of the second. The first quarter is warm-up."""
        return growth([size for _, size in self.samples])


def growth(sizes: Sequence[int]) -> int:
    quarter = max(1, len(sizes) // 4)
    return int(statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter:2 * quarter] or sizes))


def grows(sizes: Sequence[int]) -> bool:
    return growth(sizes) > max(GROWTH_BYTES, GROWTH_SHARE * sizes[-1])
