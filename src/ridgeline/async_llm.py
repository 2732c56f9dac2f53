"""`AsyncLLM`: the engine in a thread of its own, answers as asynchronous streams."""
from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from ridgeline.errors import EngineError, RidgelineError
from ridgeline.frontend import Prompt
from ridgeline.llm import LLM, Messages
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import RequestOutput


class AsyncLLM:
    """Serves concurrent callers; every engine call happens in one thread, which sleeps when there is no work.

        async with AsyncLLM("gemma3-270m") as llm:
            async for output in llm.generate("The sea is", SamplingParams(max_tokens=20)):
                print(output.outputs[0].delta, end="")

    An LLM that is handed over must not be used directly until `close` has returned.
    """

    def __init__(self, model: str | Path | LLM, **options: Any):
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()                    # nothing enters the inbox behind the None that ends it
        self._ended: EngineError | None = None           # why no further request is taken
        self._thread = threading.Thread(target=self._serve, name="ridgeline-engine", daemon=True)
        atexit.register(self._stop)                      # an interpreter that ends under a computing thread crashes
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None,
                       strategy: str | None = None) -> AsyncIterator[RequestOutput]:
        """Snapshots of the answer as it grows; the last has `finished` set. raises the request's error.

        A reader slower than the engine gets several tokens at once; the deltas always add up to the text. Leaving the
        loop early aborts the request within one engine step.
        """
        stream = _Stream(asyncio.get_running_loop())
        chosen = SamplingParams() if params is None else params
        self._submit(lambda: self._begin(stream, prompt, chosen, request_id, strategy))
        try:
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
                if output.error is not None:
                    raise output.error
        finally:
            self._submit(lambda: self._leave(stream), late=True)

    def chat(self, messages: Messages, params: SamplingParams | None = None, *, request_id: str | None = None,
             strategy: str | None = None, **template: Any) -> AsyncIterator[RequestOutput]:
        """`generate` for a conversation. template: arguments of the chat template. raises InvalidPrompt at once."""
        ids = self.llm.frontend.render(messages, **template)
        return self.generate(ids, params, request_id=request_id, strategy=strategy)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream raises EngineError. An unknown id is no error: it may just have finished."""
        self._submit(lambda: self._fail(request_id, EngineError(f"request {request_id!r} was aborted")), late=True)

    async def close(self) -> None:
        """Abort what is running, whose streams raise EngineError, and stop the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._stop)
        atexit.unregister(self._stop)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stop(self) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = EngineError("the engine was closed")
                self._inbox.put(None)
        self._thread.join()

    def _submit(self, job: Callable[[], None], *, late: bool = False) -> None:
        """Hand a job to the engine's thread. late: it is of no use any more once the engine has ended."""
        with self._lock:
            if self._ended is None:
                self._inbox.put(job)
            elif not late:
                raise EngineError(f"no further request is taken: {self._ended}")

    # In the engine's thread.

    def _serve(self) -> None:
        frontend = self.llm.frontend
        while True:
            try:
                # Without work, wait for a caller; with work, take whatever has come and go on.
                job = self._inbox.get(block=not frontend.has_work)
            except queue.Empty:
                job = self._step
            if job is None:
                self._fail_all(EngineError("the engine was closed"))
                return
            try:
                job()
            except Exception as error:  # a fault in the engine: its callers must hear of it, not wait for ever
                fault = EngineError(f"the engine failed: {type(error).__name__}: {error}")
                fault.__cause__ = error
                if not self._fail_all(fault):
                    return

    def _step(self) -> None:
        for output in self.llm.frontend.step():
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            if not stream.put(output):                   # its event loop is gone
                self._leave(stream)

    def _begin(self, stream: _Stream, prompt: Prompt, params: SamplingParams, request_id: str | None,
               strategy: str | None) -> None:
        if self._ended is not None:
            stream.fail(EngineError(f"no further request is taken: {self._ended}"))
        if self._ended is not None or stream.left:
            return
        try:
            stream.request_id = self.llm.frontend.add(prompt, params, request_id=request_id, strategy=strategy)
        except RidgelineError as error:
            stream.fail(error)
        except Exception as error:  # a fault that one prompt meets, in a tokenizer for instance, is that caller's error
            fault = EngineError(f"the request could not be taken: {type(error).__name__}: {error}")
            fault.__cause__ = error
            stream.fail(fault)
        else:
            self._streams[stream.request_id] = stream

    def _leave(self, stream: _Stream) -> None:
        stream.left = True
        if stream.request_id is not None and self._streams.pop(stream.request_id, None) is not None:
            self.llm.frontend.abort(stream.request_id)

    def _fail(self, request_id: str, error: EngineError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)
            self.llm.frontend.abort(request_id)

    def _fail_all(self, error: EngineError) -> bool:
        """Tell every caller, then abort every request. Returns False where even that fails: then the engine has ended."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        try:
            for request_id in streams:
                self.llm.frontend.abort(request_id)
        except Exception:  # the engine's state is broken, so nothing may run on it any more
            with self._lock:
                self._ended = error
            while not self._inbox.empty():               # callers who came meanwhile; no more can come
                job = self._inbox.get()
                if job is not None:
                    job()
            return False
        return True


class _Stream:
    """What one caller has not taken yet: at most one snapshot, then perhaps an error. Filled from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.request_id: str | None = None
        self.left = False
        self._loop, self._ready, self._lock = loop, asyncio.Event(), threading.Lock()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    async def next(self) -> RequestOutput:
        while True:
            with self._lock:
                output, self._output = self._output, None
                error = self._error
            if output is not None:
                return output
            if error is not None:
                raise error
            await self._ready.wait()
            self._ready.clear()

    def put(self, output: RequestOutput) -> bool:
        """Add to what waits; returns whether the caller's event loop still runs."""
        fresh = output.take()
        with self._lock:
            if self._output is not None:
                for sample, before in zip(fresh.outputs, self._output.outputs):
                    sample.delta = before.delta + sample.delta
            self._output = fresh
            return self._wake()

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            self._wake()

    def _wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop was closed under its callers
            return False
        return True
