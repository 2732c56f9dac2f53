"""/v1/responses: text in, text out, and conversations that the server remembers for a while."""
from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ridgeline.server.errors import ApiError
from ridgeline.server.features import Features, features
from ridgeline.server.params import sampling_params
from ridgeline.server.reply import Reply, Stream, named_event
from ridgeline.server.schemas.openai import ChatFields
from ridgeline.server.schemas.responses import ResponsesRequest
from ridgeline.server.service import Answers, Context, Service
from ridgeline.server.usage import Usage
from ridgeline.types import RequestOutput

TEXT_PARTS = ("input_text", "output_text", "text")


async def create(service: Service, request: ResponsesRequest, context: Context) -> Reply:
    model = service.check_model(request.model)
    _check(request)
    extra = features(request)
    before: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        try:
            before = service.responses.get(request.previous_response_id)[1]
        except ApiError as error:
            raise ApiError(400, error.message, param=error.param, code=error.code) from error
    said = [*before, *_messages(request.input)]
    system = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    params = sampling_params(request, service.defaults, max_tokens=request.max_output_tokens, **extra.params)
    chat = ChatFields(messages=[*system, *said], chat_template_kwargs=request.chat_template_kwargs)
    prompt: Any = await service.conversation(chat, extra.template)
    answers = await service.start([prompt], params, context)
    writer = _Writer(service, request, extra, prompt["prompt"], said, context.request_id, model)
    if request.stream:
        return Stream(writer.stream(answers), answers)
    return writer.whole((await answers.results())[0])


def _check(request: ResponsesRequest) -> None:
    if request.n not in (None, 1):
        raise ApiError(400, f"n: got {request.n}; allowed: 1", param="n", code="invalid_value")
    if request.background:
        raise ApiError(400, "background is not supported", param="background", code="unsupported_parameter")
    if request.truncation not in (None, "disabled"):
        raise ApiError(400, f"truncation: got {request.truncation!r}; allowed: 'disabled'", param="truncation",
                       code="unsupported_parameter")


def _messages(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input as chat messages. raises ApiError for items and parts that are no text."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if item.get("type", "message") != "message":
            raise ApiError(400, f"{where} has type {item['type']!r}; allowed: 'message'", param=where,
                           code="unsupported_parameter")
        found.append({"role": item.get("role"), "content": text_of(item.get("content"), TEXT_PARTS, f"{where}.content")})
    return found


def text_of(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of a content: a string, or a list of parts of these kinds. raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is {type(content).__name__}; expected a string or a list of parts", param=where,
                       code="invalid_value")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}[{number}] has type {kind!r}; allowed: {', '.join(map(repr, kinds))} with a text",
                           param=where, code="unsupported_parameter")
        texts.append(part["text"])
    return "\n".join(texts)


class _Writer:
    def __init__(self, service: Service, request: ResponsesRequest, extra: Features, prompt: str,
                 said: list[dict[str, Any]], request_id: str, model: str):
        self.service, self.request, self.extra, self.prompt, self.said = service, request, extra, prompt, said
        self.item_id, self.number = f"msg_{request_id}", 0
        self.head = {
            "id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "model": model,
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {}, "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id, "store": request.store is not False,
            "temperature": request.temperature, "top_p": request.top_p,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "tool_choice": "auto", "tools": [], "truncation": "disabled", "user": request.user, "error": None}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        parser = self.extra.parser(self.prompt)
        deltas = [*parser.push(output.outputs[0].text), *parser.finish()]
        return self._finished("".join(delta.get("content", "") for delta in deltas), output)

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        begun = {**self.head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        place = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("response.content_part.added", **place, part=_part(""))
        parser, text, output = self.extra.parser(self.prompt), "", None
        async for _, output in answers:
            deltas = parser.push(output.outputs[0].delta)
            if output.finished:
                deltas += parser.finish()
            for delta in deltas:
                if delta.get("content"):
                    text += delta["content"]
                    yield self._event("response.output_text.delta", **place, delta=delta["content"], logprobs=[])
        assert output is not None, "a request that has ended without an error has an output"
        response = self._finished(text, output)
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return named_event({"type": kind, "sequence_number": self.number - 1, **fields})

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _finished(self, text: str, output: RequestOutput) -> dict[str, Any]:
        status = "incomplete" if output.outputs[0].finish_reason == "length" else "completed"
        usage = Usage.of([output])
        response = {
            **self.head, "status": status, "output": [self._item(status, [_part(text)])], "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
                      "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                      "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                      "output_tokens_details": {"reasoning_tokens": 0}}}
        if self.request.store is not False:
            self.service.responses.put(response, [*self.said, {"role": "assistant", "content": text}])
        return response


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
