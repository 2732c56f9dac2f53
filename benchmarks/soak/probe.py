"""Asks URL/health 50 times a second until its input ends, then prints the seconds of each answer as JSON.

    python probe.py URL

An answer that is no 200 counts as an hour.
"""
from __future__ import annotations

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

PROBE_S, FAILED_S = 0.02, 3600.0


def main(url: str) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    times: list[float] = []
    while not select.select([sys.stdin], [], [], PROBE_S)[0]:
        start = time.perf_counter()
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            times.append(time.perf_counter() - start if answer.status == 200 else FAILED_S)
        except (OSError, http.client.HTTPException):
            connection.close()
            times.append(FAILED_S)
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1])
