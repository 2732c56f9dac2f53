"""A real server in a thread, and what tests ask of it."""
from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import openai

from ridgeline import LLM
from ridgeline.server.config import ServerConfig
from ridgeline.server.lifecycle import Server, listen


class Running:
    """`with Running(llm, model="tiny") as server:` serves at `server.url` until the end of the block."""

    def __init__(self, llm: LLM, **options: Any):
        self.llm = llm
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = Server(llm, ServerConfig(**{"access_log": None, **options}), listener)
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await self.server.run()

        try:
            asyncio.run(main())
        except BaseException as error:  # told to the test that waits
            self.failure = error

    def __enter__(self) -> Running:
        self._thread.start()
        until(lambda: self.server.service.ready or not self._thread.is_alive())
        assert self.failure is None, self.failure
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.join()
        self.llm.engine.store.check_integrity()

    def end(self) -> None:
        assert self._loop is not None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.end)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not end"
        assert self.failure is None, self.failure

    def wait_idle(self) -> None:
        engine = self.llm.engine
        until(lambda: not engine.scheduler.running and not engine.scheduler.waiting and not self.server.service.open)


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def events(response: httpx.Response) -> list[Any]:
    """The data of server-sent events; the last must be [DONE]."""
    found = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1]]
