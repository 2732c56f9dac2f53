"""From a loaded model to a server that runs until it is told to end."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator

import uvicorn

from ridgeline.analysis.live import watch
from ridgeline.async_llm import AsyncLLM
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.server.app import create_app
from ridgeline.server.config import ServerConfig
from ridgeline.server.edge import AccessLog
from ridgeline.server.metrics import Metrics
from ridgeline.server.service import Service
from ridgeline.server.tracing import Tracer

log = logging.getLogger("ridgeline.server")

# The engine's thread gets the interpreter's lock back this fast when a native call returns while the event loop writes
# answers; Python's own 5 ms would be added to each step of some 10.
SWITCH_INTERVAL_S = 0.0005
GRACE_S = 5.0               # for connections to close once their answers have ended


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours let the requests that run finish while new ones hear that we end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Server:
    """One model behind one socket.

        server = Server(LLM("gemma3-270m"), ServerConfig(model="gemma3-270m"), listen("127.0.0.1", 8000))
        asyncio.run(server.run())
    """

    def __init__(self, llm: LLM, config: ServerConfig, listener: socket.socket):
        self.config, self.listener = config, listener
        self.meter = watch(llm)
        self.metrics = Metrics(llm.engine.stats, config.names[0], self.meter)
        self.access_log = AccessLog(config.access_log)
        self.llm = AsyncLLM(llm, on_step=self.metrics.step)
        endpoint = config.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint, config.names[0])
        self.service = Service(self.llm, config, self.metrics, self.tracer, self.meter)
        self.http = HttpServer(uvicorn.Config(
            create_app(self.service, self.access_log), log_config=None, access_log=False, lifespan="off", ws="none",
            server_header=False, timeout_graceful_shutdown=int(GRACE_S), timeout_keep_alive=75, proxy_headers=False))
        self._ending: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `end` is called. raises EngineError where the engine cannot answer at all."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        warm_up = asyncio.create_task(self._warm_up(on_ready))
        try:
            await self.http.serve(sockets=[self.listener])
            if warm_up.done():
                warm_up.result()
        finally:
            warm_up.cancel()
            if self._ending is not None:
                self._ending.cancel()
            await self.llm.close()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)
            self.access_log.close()

    async def _warm_up(self, on_ready: Callable[[], None] | None) -> None:
        try:
            await self.service.warm_up()
        except Exception:  # whatever it is, a server that cannot answer ends; `run` raises it
            self.http.should_exit = True
            raise
        if on_ready is not None:
            on_ready()

    def end(self) -> None:
        """Take no new work and end when what runs has finished; the second time, end at once. In the event loop."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        else:
            self._ending.cancel()
            self.http.should_exit = self.http.force_exit = True

    async def _end(self) -> None:
        log.info("shutting down: %d answers are running, %.0f s for them to finish", self.service.in_flight,
                 self.config.shutdown_timeout)
        if not await self.service.drain(self.config.shutdown_timeout):
            log.warning("aborted what had not finished after %.0f s", self.config.shutdown_timeout)
        self.http.should_exit = True

    def end_on_signals(self) -> None:
        """In the event loop of the main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.end)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. raises ConfigError."""
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.socket(found[0][0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[0][4])
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    listener.setblocking(False)
    return listener
