"""/v1/chat/completions."""
from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ridgeline.server.errors import ApiError
from ridgeline.server.features import Asked, Features, TextParser, features
from ridgeline.server.logprobs import chat_logprobs, prompt_logprobs
from ridgeline.server.params import sampling_params
from ridgeline.server.reply import DONE, Reply, Stream, event
from ridgeline.server.schemas.openai import ChatRequest
from ridgeline.server.service import Answers, Context, Service
from ridgeline.server.usage import Usage
from ridgeline.types import CompletionOutput, RequestOutput


async def create(service: Service, request: ChatRequest, context: Context) -> Reply:
    model = service.check_model(request.model)
    extra = features(request, service.config, Asked.of_chat(request))
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, f"top_logprobs: got {request.top_logprobs} without logprobs; allowed: with logprobs true",
                       param="top_logprobs", code="invalid_value")
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    prompt: Any = await service.conversation(request, extra.template)
    params = sampling_params(request, service.defaults, max_tokens=most,
                             logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                             **extra.params_for(prompt["prompt"]))
    answers = await service.start([prompt], params, context)
    writer = _Writer(request, extra, prompt, f"chatcmpl-{context.request_id}", model)
    if request.stream:
        return Stream(writer.stream(answers), answers)
    return writer.whole(await answers.results())


class _Writer:
    def __init__(self, request: ChatRequest, extra: Features, prompt: Any, name: str, model: str):
        self.request, self.extra, self.prompt = request, extra, prompt["prompt"]
        self.head = {"id": name, "created": int(time.time()), "model": model, "system_fingerprint": None}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        output, choices = outputs[0], []
        for sample in output.outputs:
            parser = self.extra.parser(self.prompt)
            message = self.extra.message([*parser.push(sample.text), *parser.finish()])
            choice = {"index": sample.index, "message": {**message, "refusal": None},
                      "logprobs": self._logprobs(sample, 0), **_end(sample, "tool_calls" in message)}
            if self.request.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        answer = {**self.head, "object": "chat.completion", "choices": choices, "usage": Usage.of(outputs).openai}
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        options = self.request.stream_options
        states: dict[int, _Choice] = {}
        usage = Usage()
        async for index, output in answers:
            usage.take(index, output)
            for sample in output.outputs:
                state = states.get(sample.index)
                if state is None:
                    state = states[sample.index] = _Choice(self.extra.parser(self.prompt))
                for choice in self._pieces(sample, state):
                    chunk = {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
                    if options is not None and (options.include_usage or options.continuous_usage_stats):
                        chunk["usage"] = usage.openai if options.continuous_usage_stats else None
                    if not state.opened and output.prompt_logprobs is not None:
                        chunk["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                    if not state.opened and self.request.return_token_ids:
                        chunk["prompt_token_ids"] = output.prompt_token_ids
                    state.opened = True
                    yield event(chunk)
        if options is not None and options.include_usage:
            yield event({**self.head, "object": "chat.completion.chunk", "choices": [], "usage": usage.openai})
        yield DONE

    def _pieces(self, sample: CompletionOutput, state: _Choice) -> list[dict[str, Any]]:
        """The chunks for what is new in one sample; token ids and logprobs go with the first of them."""
        if state.done:
            return []
        state.done = sample.finish_reason is not None
        deltas: list[dict[str, Any]] = [] if state.opened else [{"role": "assistant", "content": ""}]
        deltas += state.parser.push(sample.delta)
        if state.done:
            deltas += state.parser.finish()
        state.calls = state.calls or any("tool_calls" in delta for delta in deltas)
        logprobs = self._logprobs(sample, state.told)
        news = bool(logprobs and logprobs["content"]) or (self.request.return_token_ids
                                                          and len(sample.token_ids) > state.told)
        if state.done or (news and not deltas):
            deltas.append({})
        pieces: list[dict[str, Any]] = [
            {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if not pieces:
            return []
        # Behind the chunk that opens the message, whose delta has no text.
        first = pieces[min(len(pieces) - 1, 0 if state.opened else 1)]
        if logprobs is not None and logprobs["content"]:
            first["logprobs"] = logprobs
        if self.request.return_token_ids:
            first["token_ids"] = sample.token_ids[state.told:]
        state.told = len(sample.token_ids)
        if state.done:
            pieces[-1] |= _end(sample, state.calls)
        return pieces

    def _logprobs(self, sample: CompletionOutput, told: int) -> dict[str, Any] | None:
        if sample.logprobs is None:
            return None
        return chat_logprobs(sample.logprobs[told:], self.request.top_logprobs or 0,
                             as_ids=self.request.return_tokens_as_token_ids)


class _Choice:
    """How much of one sample has been written. calls: whether tools were called."""

    def __init__(self, parser: TextParser):
        self.parser, self.opened, self.done, self.told, self.calls = parser, False, False, 0, False


def _end(sample: CompletionOutput, calls: bool) -> dict[str, Any]:
    reason = "tool_calls" if calls and sample.finish_reason == "stop" else sample.finish_reason
    return {"finish_reason": reason, "stop_reason": sample.stop_reason}
