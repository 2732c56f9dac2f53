"""A server in a process of its own, and one load on it."""
from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

START_S = 300.0                   # for a server to load its model
END_S = 30.0                      # for it to end once it is told to


class ServerError(Exception):
    """Why a server or the client does not run: for people to read."""


@dataclass(frozen=True)
class Load:
    """What `ridgeline bench serve` asks of both servers; lengths in tokens."""

    clients: int
    input_len: int
    output_len: int
    requests: int

    @property
    def context(self) -> int:
        """Room for one sequence: words are about one token each, so a tenth more, up to a multiple of 256."""
        return -(-(self.input_len * 11 // 10 + self.output_len + 16) // 256) * 256


@dataclass(frozen=True)
class Server:
    """command: without the port; health: the route that answers 200 once the model is loaded."""

    name: str
    command: tuple[str, ...]
    health: str

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yields the address. raises ServerError with the end of what the server printed."""
        port = free_port()
        with tempfile.TemporaryFile() as printed:
            try:
                process = subprocess.Popen([*self.command, "--port", str(port)], stdout=printed, stderr=subprocess.STDOUT)
            except OSError as error:
                raise ServerError(f"{self.command[0]} cannot be run: {error.strerror}") from error
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until_ready(process, url + self.health)
                yield url
            except ServerError as error:
                printed.seek(0)
                last = printed.read().decode("utf-8", "replace").strip().splitlines()[-5:]
                raise ServerError("\n".join([f"{self.name}: {error}", *last])) from error
            finally:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def wait_until_ready(process: subprocess.Popen[Any], url: str) -> None:
    """Until `url` answers 200. raises ServerError where the process ends before."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerError(f"ended with code {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ServerError(f"was not ready within {START_S:.0f} s")


def ours(model: str, threads: int, arguments: Sequence[str]) -> Server:
    return Server("ridgeline", (sys.executable, "-m", "ridgeline", "serve", model, "--threads", str(threads),
                                "--disable-access-log", *arguments), "/ready")


def llama_server(program: str, file: str, load: Load, threads: int, arguments: Sequence[str]) -> Server:
    """Its cache is shared out among its slots."""
    return Server("llama-server", (program, "-m", file, "-np", str(load.clients), "-t", str(threads), "-c",
                                   str(load.clients * load.context), "--host", "127.0.0.1", *arguments), "/health")


def measure(url: str, load: Load) -> dict[str, Any]:
    """The cell of one run of the client: its `summary` and `grade` among others. raises ServerError."""
    command = [sys.executable, "-m", "ridgeline", "bench", "serve", "--base-url", url, "--max-concurrency", str(load.clients),
               "--num-prompts", str(load.requests), "--input-len", str(load.input_len), "--output-len",
               str(load.output_len), "--ignore-eos", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = done.stderr.strip().splitlines()
        raise ServerError(complaint[-1] if complaint else f"the client ended with code {done.returncode}")
    cell: dict[str, Any] = json.loads(done.stdout)["cells"][0]
    if cell["summary"]["failed"]:
        raise ServerError(f"{cell['summary']['failed']} requests failed: {cell['summary']['first_error']}")
    return cell


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
