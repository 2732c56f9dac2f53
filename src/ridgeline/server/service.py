"""What all handlers share: the engine, the limits, the names of the model, and the requests that are open."""
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ridgeline.analysis.live import Meter
from ridgeline.async_llm import LONG_PROMPT, Answer, AsyncLLM
from ridgeline.errors import EngineError, InvalidParams
from ridgeline.frontend import Prompt
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError
from ridgeline.server.metrics import Metrics
from ridgeline.server.params import model_defaults
from ridgeline.server.schemas.openai import ChatFields, TokenizeRequest
from ridgeline.server.store import Store
from ridgeline.server.tracing import Ended, Tracer
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.types import RequestMetrics, RequestOutput

log = logging.getLogger("ridgeline.server")


@dataclass
class Context:
    """What a handler knows of the request around its body. log: facts for the access log; trace: headers of the caller's
    trace; started: on the monotonic clock."""

    request_id: str
    log: dict[str, Any] = field(default_factory=dict)
    trace: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)


class Service:
    """One engine behind many requests. All methods in one event loop. tracer: gets each request that has
    ended; meter: accounts for the engine's passes."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, metrics: Metrics, tracer: Tracer | None = None,
                 meter: Meter | None = None):
        self.llm, self.config, self.metrics, self.tracer, self.meter = llm, config, metrics, tracer, meter
        engine = llm.llm.engine
        self.max_model_len, self.seats = engine.max_model_len, engine.scheduler.max_num_seqs
        generation = llm.llm.loaded.checkpoint.generation_config
        self.defaults = model_defaults(generation) if config.generation_config == "auto" else {}
        self.created = int(time.time())
        self.responses = Store(config.response_store_size)
        self.ready = False              # after a first answer
        self.draining = False
        self.open: set[Answers] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.llm.tokenizer

    @property
    def has_chat(self) -> bool:
        return self.tokenizer is not None and bool(self.llm.llm.frontend.chat_template or self.tokenizer.chat_template)

    @property
    def in_flight(self) -> int:
        """Samples that were taken and have not ended."""
        return sum(answers.samples for answers in self.open)

    def check_model(self, name: str | None) -> str:
        """The name that the answer shows. raises ApiError for a model that is not served here."""
        if name is None or name in self.config.names:
            return name or self.config.names[0]
        raise ApiError(404, f"the model {name!r} does not exist here; served: {', '.join(self.config.names)}", param="model",
                       code="model_not_found")

    async def conversation(self, request: ChatFields | TokenizeRequest, template: Mapping[str, Any]) -> Prompt:
        """The prompt for the messages of a request. raises InvalidPrompt or ApiError."""
        if request.chat_template is not None:
            raise ApiError(400, "chat_template is not taken from requests; pass one to the server with --chat-template FILE",
                           param="chat_template", code="unsupported_parameter")
        messages = request.messages or []
        arguments = {**(request.chat_template_kwargs or {}), **template,
                     "add_generation_prompt": request.add_generation_prompt,
                     "continue_final_message": request.continue_final_message}
        arguments.pop("chat_template", None)
        long = sum(len(str(message.get("content"))) for message in messages) > LONG_PROMPT
        render = partial(self.llm.llm.frontend.conversation, messages, **arguments)
        text, ids = await self.llm.off_loop(render, long=long)
        return {"prompt": text, "prompt_token_ids": ids}

    async def start(self, prompts: Sequence[Prompt], params: SamplingParams, context: Context, *,
                    strategy: str | None = None) -> Answers:
        """Hand prompts to the engine and wait until it has taken them. The caller must close what it gets.

        raises ApiError where the server is full or draining, and what is wrong with the prompts.
        """
        answers = Answers(self, len(prompts) * params.n, params, context)
        self._admit(answers)
        try:
            for prompt in prompts:
                prepared = await self.llm.prepare(prompt, params)
                answers.add(await self.llm.start(prepared, strategy=strategy))
        except BaseException as error:
            answers.close(error)
            raise
        return answers

    def _admit(self, answers: Answers) -> None:
        room = self.seats + self.config.max_queue
        if self.draining:
            raise ApiError(503, "the server is shutting down and takes no new work", code="shutting_down")
        if answers.samples > room:
            raise ApiError(400, f"the request asks for {answers.samples} answers; at most {room} fit this server's queue "
                                "(max_num_seqs + max_queue)", code="invalid_value")
        if self.in_flight + answers.samples > room:
            raise ApiError(429, f"the server is full: {self.in_flight} answers are running or waiting, at most {room} may; "
                                "try again later", code="queue_full")
        self.open.add(answers)
        self._idle.clear()

    def left(self, answers: Answers) -> None:
        self.open.discard(answers)
        if not self.open:
            self._idle.set()

    async def warm_up(self) -> None:
        """Run a first short answer, so that what the first request would wait for has happened. raises EngineError."""
        await self.llm.off_loop(self._prepare_grammars, long=True)
        answer = await self.llm.start([0], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False,
                                                          cache_salt="warm-up"))
        try:
            while not answer.finished:
                output = await answer.next()
                if output.error is not None:
                    raise EngineError(f"the warm-up failed: {output.error}")
        finally:
            answer.close()
        self.ready = True

    def _prepare_grammars(self) -> None:
        """Makes the table of the vocabulary, which stops every other thread while it is made: 2 s for 262,144 tokens."""
        try:
            self.llm.llm.frontend.compiler.prepare()
        except InvalidParams as error:
            log.info("no structured output: %s", error)

    async def drain(self, timeout: float) -> bool:
        """Take no new work and wait for what runs; abort what is left after `timeout` seconds. Returns whether none was."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for answers in list(self.open):
                answers.abort(ApiError(503, "the server is shutting down", code="shutting_down"))
            return False
        return True


class Answers:
    """The engine's answers to the prompts of one request, as they grow; `close` aborts what has not finished."""

    def __init__(self, service: Service, samples: int, params: SamplingParams, context: Context):
        self.samples, self._service, self._params, self._context = samples, service, params, context
        self._answers: list[Answer] = []
        self._last: list[RequestOutput | None] = []
        self._closed = False
        self._ended = asyncio.Event()                    # set by `abort`
        self._error: ApiError | None = None

    def add(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._last.append(None)

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, snapshot) until all have finished. raises the first error of any of them."""
        if self._error is not None:
            raise self._error
        if len(self._answers) == 1:
            while not self._answers[0].finished:
                yield 0, await self._next(0)
            return
        tasks = {asyncio.create_task(self._next(index)): index for index in range(len(self._answers))}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: tasks[task]):
                    index = tasks.pop(task)
                    output = task.result()
                    yield index, output
                    if not output.finished:
                        tasks[asyncio.create_task(self._next(index))] = index
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def results(self) -> list[RequestOutput]:
        """The finished answers, in the order of their prompts. Closes."""
        try:
            async for _ in self:
                pass
            return [output for output in self._last if output is not None]
        finally:
            self.close()

    async def _next(self, index: int) -> RequestOutput:
        try:
            output = await self._answers[index].next()
        except EngineError:
            if self._error is not None:
                raise self._error from None
            raise
        self._last[index] = output
        if output.error is not None:
            raise output.error
        return output

    def abort(self, error: ApiError) -> None:
        """End everything with an error, which the reader gets."""
        self._error = error
        for answer in self._answers:
            answer.stream.fail(EngineError(error.message))
            answer.close()

    def close(self, error: BaseException | None = None) -> None:
        """error: why there are no answers, where the engine did not take the request."""
        if self._closed:
            return
        self._closed = True
        for answer in self._answers:
            answer.close()
        self._service.left(self)
        found: list[RequestMetrics] = []
        for output in self._last:
            for sample in output.outputs if output is not None else ():
                if sample.metrics is not None:
                    self._service.metrics.observe(sample.metrics, sample.finish_reason or "abort")
                    found.append(sample.metrics)
        never = self.samples - len(found)
        self._service.metrics.count("abort", never)
        self._log(found)
        self._trace(found, error)

    def _log(self, found: Sequence[RequestMetrics]) -> None:
        log = self._context.log
        log["prompt_tokens"] = sum(len(o.prompt_token_ids) for o in self._last if o is not None)
        log["completion_tokens"] = sum(m.completion_tokens for m in found)
        log["cached_tokens"] = sum(m.cached_tokens for m in found)
        first = [m.ttft_s for m in found if m.ttft_s is not None]
        if first:
            log["ttft_s"] = round(min(first), 6)
        queued = [m.queue_s for m in found if m.queue_s is not None]
        if queued:
            log["queue_s"] = round(min(queued), 6)
        log["finish_reason"] = [s.finish_reason or "abort" for o in self._last if o is not None for s in o.outputs]

    def _trace(self, found: Sequence[RequestMetrics], error: BaseException | None) -> None:
        tracer, context = self._service.tracer, self._context
        if tracer is None:
            return
        failed = next((o.error for o in self._last if o is not None and o.error is not None), None) or self._error or error
        tracer.record(Ended(
            context.request_id, context.started, context.trace, self._params, context.log["prompt_tokens"], found,
            context.log["finish_reason"], None if failed is None else str(failed) or type(failed).__name__))
