"""The server, the phases, the verdict; see the package's docstring."""
from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

import benchmarks.soak
from benchmarks.servers.processes import ServerError, free_port, wait_until_ready
from benchmarks.soak.clients import GREEDY, PROMPTS, Crowd, Tally
from benchmarks.soak.watch import Health, Memory, grows
from ridgeline.bench.serve.stats import percentile

HEALTH_S = 0.05
IDLE_S, CLOSING_S, ENDING_S = 60.0, 1.0, 3.0      # to become idle; to close connections; of load before SIGTERM
# The cache is small, so that every page has been touched when the warm-up ends and memory must not grow any more.
SERVE = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(256 << 20), "--disable-access-log",
         "--shutdown-timeout", "60")


def soak(model: str, clients: int, seconds: float, serve_args: Sequence[str] = ()) -> dict[str, Any]:
    """Everything; "failures" is empty if all is well. raises ServerError where the server does not start."""
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "ridgeline", "serve", model, "--port", str(port), *SERVE,
                                    *serve_args], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/ready")
            result = asyncio.run(_phases(process, f"http://127.0.0.1:{port}", clients, seconds))
        except ServerError as error:
            log.seek(0)
            raise ServerError("\n".join([str(error), *log.read().strip().splitlines()[-5:]])) from error
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        result["log_errors"] = [line for line in log.read().splitlines() if re.match(r"ERROR|CRITICAL|Traceback", line)]
    result["failures"] = failures(result)
    return result


async def _phases(process: subprocess.Popen[Any], url: str, clients: int, seconds: float) -> dict[str, Any]:
    tally, health, memory = Tally(), Health(), Memory(process.pid)
    await asyncio.sleep(CLOSING_S)
    sockets = _sockets(process.pid)
    async with _session() as http:
        async with http.get(f"{url}/v1/models") as answer:
            context = (await answer.json())["data"][0]["max_model_len"]
        expected = [await _alone(http, url, prompt) for prompt in PROMPTS]
        crowd = Crowd(http, url, expected, context, tally)
        watch = asyncio.create_task(memory.watch())
        with health.asked(url):
            await _for(crowd, clients, seconds, seed=0)
        watch.cancel()
        left = await _idle(http, url)
    await asyncio.sleep(CLOSING_S)
    left["connections"] = max(0, _sockets(process.pid) - sockets)
    async with _session() as http:
        code = await _ending(replace(crowd, http=http), clients, process)
    times = sorted(health.times)
    return {
        "clients": clients, "seconds": seconds, "counts": dict(tally.counts), "faults": dict(tally.faults),
        "examples": tally.examples, "left": left, "exit_code": code,
        "health": {"count": len(times), "p50_s": percentile(times, 50), "p99_s": percentile(times, 99), "max_s": times[-1]},
        "memory": {"samples": memory.samples, "growth_bytes": memory.growth()}}


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


def _sockets(pid: int) -> int:
    """Those that a process has open: that listen, wake its event loop, and of connections."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += str(link.readlink()).startswith("socket:")
        except OSError:                 # closed meanwhile
            continue
    return found


async def _alone(http: aiohttp.ClientSession, url: str, prompt: str) -> str:
    async with http.post(f"{url}/v1/completions", json={"prompt": prompt, **GREEDY}) as answer:
        found = await answer.json()
        if answer.status != 200:
            raise ServerError(f"the first answer failed: {found}")
        text: str = found["choices"][0]["text"]
        return text


async def _for(crowd: Crowd, clients: int, seconds: float, seed: int) -> None:
    """All clients end with the answer to their last request."""
    end = asyncio.Event()
    running = asyncio.create_task(crowd.run(clients, end, seed))
    await asyncio.sleep(seconds)
    end.set()
    await running


async def _idle(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """What is still in use once nobody asks any more: nothing, within some steps of the engine."""
    found: dict[str, float] = {}
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        async with http.get(f"{url}/metrics") as answer:
            text = await answer.text()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            match = re.search(rf"^ridgeline:{name}{{.*}} (.*)$", text, re.M)
            found[name] = float(match[1]) if match else -1.0
        if not any(found.values()):
            break
        await asyncio.sleep(0.1)
    return found


async def _ending(crowd: Crowd, clients: int, process: subprocess.Popen[Any]) -> int | None:
    """SIGTERM among running requests. Returns the exit code, None where the server does not end."""
    end = asyncio.Event()
    running = asyncio.create_task(crowd.run(clients, end, seed=1))
    await asyncio.sleep(ENDING_S)
    crowd.tally.told = time.monotonic()
    process.send_signal(signal.SIGTERM)
    end.set()
    await running
    try:
        return await asyncio.to_thread(process.wait, 90)
    except subprocess.TimeoutExpired:
        return None


def failures(result: dict[str, Any]) -> list[str]:
    found = [f"{count} x {kind}, e.g. {result['examples'][kind]}" for kind, count in result["faults"].items()]
    found += [f"no request was ever {kind}" for kind in ("right", "gone", "told of nonsense", "giant")
              if not result["counts"].get(kind)]
    p99 = result["health"]["p99_s"]
    if p99 is None or p99 >= HEALTH_S:
        found.append(f"p99 of /health is {p99} s over {result['health']['count']} answers; it must be below {HEALTH_S} s")
    if grows([size for _, size in result["memory"]["samples"]]):
        found.append(f"memory grew by {result['memory']['growth_bytes'] / 1e6:.1f} MB after the warm-up")
    found += [f"idle, but {name} is {value:g}" for name, value in result["left"].items() if value]
    if result["exit_code"] != 0:
        found.append(f"the exit code after SIGTERM is {result['exit_code']}")
    found += [f"the server logged: {line}" for line in result["log_errors"][:5]]
    return found


def report(result: dict[str, Any]) -> str:
    health, samples = result["health"], result["memory"]["samples"]
    every = max(1, len(samples) // 20)
    lines = [f"clients   {result['clients']} for {result['seconds']:g} s, then again until SIGTERM",
             f"requests  {', '.join(f'{count} {kind}' for kind, count in sorted(result['counts'].items()))}",
             f"/health   {health['count']} answers, " + ", ".join(
                 f"{name} {'-' if health[key] is None else format(health[key] * 1e3, '.1f')} ms"
                 for name, key in (("p50", "p50_s"), ("p99", "p99_s"), ("max", "max_s"))),
             "memory    MB after seconds: " + ", ".join(f"{size / 1e6:.0f} ({at:.0f})" for at, size in samples[::every]),
             f"          last quarter less second quarter: {result['memory']['growth_bytes'] / 1e6:+.1f} MB"]
    return "\n".join([*lines, *(f"FAILED    {failure}" for failure in result["failures"])])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=benchmarks.soak.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gemma3-270m", metavar="MODEL", help="default gemma3-270m")
    parser.add_argument("--clients", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="default 600")
    parser.add_argument("--serve-args", default="", metavar="FLAGS", help="further flags of `ridgeline serve`")
    parser.add_argument("--json", metavar="FILE", help="everything, memory samples included")
    options = parser.parse_args(argv)
    if options.clients < 1 or options.seconds <= 0:
        parser.error(f"--clients {options.clients}, --seconds {options.seconds:g}: both must be above 0")
    try:
        result = soak(options.model, options.clients, options.seconds, shlex.split(options.serve_args))
    except ServerError as error:
        print(f"benchmarks.soak: error: {error}", file=sys.stderr)
        return 2
    print(report(result))
    if options.json is not None:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("failed" if result["failures"] else "passed")
    return 1 if result["failures"] else 0
