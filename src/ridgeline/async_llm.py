"""`AsyncLLM`: the engine in a thread of its own, answers as asynchronous streams."""
from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from copy import copy
from typing import Any

from ridgeline.errors import EngineError
from ridgeline.frontend import Prompt
from ridgeline.llm import LLM
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import RequestOutput


class AsyncLLM:
    """Serves concurrent callers; every engine call happens in one thread, which sleeps when there is no work.

        async with AsyncLLM("gemma3-270m") as llm:
            async for output in llm.generate("The sea is", SamplingParams(max_tokens=20)):
                print(output.outputs[0].delta, end="")
    """

    def __init__(self, model: str | LLM, **options: Any):
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._thread = threading.Thread(target=self._serve, name="ridgeline-engine", daemon=True)
        self._closed = False
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None,
                       strategy: str | None = None) -> AsyncIterator[RequestOutput]:
        """Snapshots of the answer as it grows; the last has `finished` set. raises the request's error.

        Leaving the loop early aborts the request within one engine step.
        """
        if self._closed:
            raise EngineError("the engine has been closed")
        stream = _Stream(asyncio.get_running_loop())
        self._inbox.put(lambda: self._begin(stream, prompt, params or SamplingParams(), request_id, strategy))
        try:
            while True:
                output = await stream.queue.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.error is not None:
                    raise output.error
                if output.finished:
                    return
        finally:
            self._inbox.put(lambda: self._leave(stream))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with an error."""
        self._inbox.put(lambda: self._drop(request_id))

    async def close(self) -> None:
        """Abort what is running and stop the thread."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # In the engine's thread.

    def _serve(self) -> None:
        frontend = self.llm.frontend
        while True:
            try:
                # Without work, wait for a caller; with work, take whatever has come and go on.
                job = self._inbox.get(block=not frontend.has_work)
            except queue.Empty:
                for output in frontend.step():
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put(_snapshot(output))
                        if output.finished:
                            del self._streams[output.request_id]
                continue
            if job is None:
                for request_id in list(self._streams):
                    self._drop(request_id)
                return
            job()

    def _begin(self, stream: _Stream, prompt: Prompt, params: SamplingParams, request_id: str | None,
               strategy: str | None) -> None:
        if stream.left:
            return
        try:
            stream.request_id = self.llm.frontend.add(prompt, params, request_id=request_id, strategy=strategy)
        except Exception as error:  # whatever is wrong with one request is its caller's to handle
            stream.put(error)
            return
        self._streams[stream.request_id] = stream

    def _leave(self, stream: _Stream) -> None:
        stream.left = True
        if stream.request_id is not None and self._streams.pop(stream.request_id, None) is not None:
            self.llm.frontend.abort(stream.request_id)

    def _drop(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        self.llm.frontend.abort(request_id)
        if stream is not None:
            stream.put(EngineError(f"request {request_id!r} was aborted"))


class _Stream:
    """One caller's queue, filled from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        self.request_id: str | None = None
        self.left = False

    def put(self, item: RequestOutput | BaseException) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that the engine's thread no longer changes."""
    frozen = copy(output)
    frozen.outputs = [copy(sample) for sample in output.outputs]
    for sample in frozen.outputs:
        sample.token_ids = list(sample.token_ids)
        sample.logprobs = None if sample.logprobs is None else list(sample.logprobs)
    return frozen
