"""`AsyncLLM`: the engine in a thread of its own, answers as asynchronous streams."""
from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.engine import EngineStats
from ridgeline.errors import EngineError, RidgelineError
from ridgeline.frontend import Prepared, Prompt
from ridgeline.llm import LLM, Messages
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import RequestOutput

T = TypeVar("T")

# Characters from which on a prompt goes to a worker of its own, so that short ones need not wait behind it.
LONG_PROMPT = 50_000


class AsyncLLM:
    """Serves concurrent callers; every engine call happens in one thread, which sleeps when there is no work.

    Prompts are tokenised and conversations rendered in other threads, so that neither the engine nor the event loop
    waits for them. on_step: called in the engine's thread after each step.

        async with AsyncLLM("gemma3-270m") as llm:
            async for output in llm.generate("The sea is", SamplingParams(max_tokens=20)):
                print(output.outputs[0].delta, end="")

    An LLM that is handed over must not be used directly until `close` has returned.
    """

    def __init__(self, model: str | Path | LLM, *, on_step: Callable[[EngineStats], None] | None = None, **options: Any):
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._on_step = on_step
        self._pool = ThreadPoolExecutor(2, "ridgeline-text")
        self._long_pool = ThreadPoolExecutor(1, "ridgeline-long-text")
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
        answer = await self.start(prompt, params, request_id=request_id, strategy=strategy)
        try:
            while not answer.finished:
                output = await answer.next()
                yield output
                if output.error is not None:
                    raise output.error
        finally:
            answer.close()

    async def start(self, prompt: Prompt | Prepared, params: SamplingParams | None = None, *,
                    request_id: str | None = None, strategy: str | None = None) -> Answer:
        """Hand a request over and wait until the engine has taken it: what is wrong with it is raised here.

        params: not for a prepared prompt, which has its own. The caller must `close` the answer.
        """
        if not isinstance(prompt, Prepared):
            prompt = await self.prepare(prompt, SamplingParams() if params is None else params)
        ready, answer = prompt, Answer(self, _Stream(asyncio.get_running_loop()))
        self._submit(lambda: self._begin(answer.stream, ready, request_id, strategy))
        try:
            await answer.stream.taken()
        except BaseException:
            answer.close()
            raise
        return answer

    async def prepare(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """Tokenise and check a prompt in another thread. raises RequestError."""
        frontend = self.llm.frontend
        try:
            return await self.off_loop(lambda: frontend.prepare(prompt, params), long=_is_long(prompt))
        except RidgelineError:
            raise
        except Exception as error:  # a fault that one prompt meets, in a tokenizer for instance, is that caller's error
            raise EngineError(f"the request could not be taken: {type(error).__name__}: {error}") from error

    async def off_loop(self, job: Callable[[], T], *, long: bool = False) -> T:
        """Run work on text in another thread. long: behind other long work only."""
        if self._ended is not None:
            raise EngineError(f"no further request is taken: {self._ended}")
        return await asyncio.get_running_loop().run_in_executor(self._long_pool if long else self._pool, job)

    @property
    def ended(self) -> EngineError | None:
        """Why no further request is taken; None while the engine serves."""
        return self._ended

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
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=True, cancel_futures=True)

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
        fed: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for output in self.llm.frontend.step():
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            stream.put(output)
            fed.setdefault(stream.loop, []).append(stream)
        for loop, streams in fed.items():
            if not _wake(loop, streams):                 # the loop is gone, and its callers with it
                for stream in streams:
                    self._leave(stream)
        if self._on_step is not None:
            self._on_step(self.llm.engine.stats)

    def _begin(self, stream: _Stream, prepared: Prepared, request_id: str | None, strategy: str | None) -> None:
        if self._ended is not None:
            stream.fail(EngineError(f"no further request is taken: {self._ended}"))
        if self._ended is not None or stream.left:
            return
        try:
            stream.request_id = self.llm.frontend.queue(prepared, request_id=request_id, strategy=strategy)
        except RidgelineError as error:
            stream.fail(error)
        except Exception as error:  # a fault that one request meets, in a decoder for instance, is that caller's error
            fault = EngineError(f"the request could not be taken: {type(error).__name__}: {error}")
            fault.__cause__ = error
            stream.fail(fault)
        else:
            self._streams[stream.request_id] = stream
            stream.take()

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


class Answer:
    """A request that the engine has taken. Whoever holds it calls `close`, which aborts what is not finished."""

    def __init__(self, llm: AsyncLLM, stream: _Stream):
        self.stream, self.finished, self._llm = stream, False, llm

    async def next(self) -> RequestOutput:
        """What has come since the last call; waits for something. An output with `error` set is the last one.

        raises EngineError where the request was aborted or the engine has ended.
        """
        output = await self.stream.next()
        self.finished = output.finished
        return output

    def close(self) -> None:
        """Abort within one engine step; does nothing to what has finished."""
        self._llm._submit(lambda: self._llm._leave(self.stream), late=True)


def _is_long(prompt: Any) -> bool:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return isinstance(text, str) and len(text) > LONG_PROMPT


class _Stream:
    """What one caller has not taken yet: at most one snapshot, then perhaps an error. Filled from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.request_id: str | None = None
        self.left = False
        self.loop = loop
        self._ready, self._lock = asyncio.Event(), threading.Lock()
        self._taken = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    async def taken(self) -> None:
        """Wait until the engine has taken the request. raises what is wrong with it."""
        while not self._taken:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def _wait(self) -> None:
        await self._ready.wait()
        self._ready.clear()

    async def next(self) -> RequestOutput:
        while True:
            with self._lock:
                output, self._output = self._output, None
                error = self._error
            if output is not None:
                return output
            if error is not None:
                raise error
            await self._wait()

    def take(self) -> None:
        self._taken = True
        _wake(self.loop, [self])

    def put(self, output: RequestOutput) -> None:
        """Add to what waits. The caller must be woken."""
        fresh = output.take()
        with self._lock:
            if self._output is not None:
                for sample, before in zip(fresh.outputs, self._output.outputs):
                    sample.delta = before.delta + sample.delta
            self._output = fresh

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
        _wake(self.loop, [self])

    def wake(self) -> None:
        """In the event loop."""
        self._ready.set()


def _wake(loop: asyncio.AbstractEventLoop, streams: list[_Stream]) -> bool:
    """Once for all streams of a step: each call into a loop is a system call. Returns whether the loop still runs."""
    try:
        loop.call_soon_threadsafe(_wake_all, streams)
    except RuntimeError:  # the loop was closed under its callers
        return False
    return True


def _wake_all(streams: list[_Stream]) -> None:
    for stream in streams:
        stream.wake()
