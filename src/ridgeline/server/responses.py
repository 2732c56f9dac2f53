"""/v1/responses: text in; reasoning, texts and calls out; and conversations that the server remembers for a while."""
from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from ridgeline.server.errors import ApiError
from ridgeline.server.features import Features, features
from ridgeline.server.params import sampling_params
from ridgeline.server.parts import Change, Part, Parts
from ridgeline.server.read_responses import asked, messages
from ridgeline.server.reply import Reply, Stream, named_event
from ridgeline.server.schemas.openai import ChatFields
from ridgeline.server.schemas.responses import ResponsesRequest
from ridgeline.server.service import Answers, Context, Service
from ridgeline.server.usage import Usage
from ridgeline.types import RequestOutput

ITEM_IDS = {"text": "msg", "call": "fc", "reasoning": "rs"}


async def create(service: Service, request: ResponsesRequest, context: Context) -> Reply:
    model = service.check_model(request.model)
    _check(request)
    extra = features(request, service.config, asked(request))
    before: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        try:
            before = service.responses.get(request.previous_response_id)[1]
        except ApiError as error:
            raise ApiError(400, error.message, param=error.param, code=error.code) from error
    said = messages(request.input, before)
    system = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    chat = ChatFields(messages=[*system, *said], chat_template_kwargs=request.chat_template_kwargs)
    prompt: Any = await service.conversation(chat, extra.template)
    params = sampling_params(request, service.defaults, max_tokens=request.max_output_tokens,
                             **extra.params_for(prompt["prompt"]))
    answers = await service.start([prompt], params, context)
    writer = _Writer(service, request, extra, prompt["prompt"], said, context.request_id, model)
    if request.stream:
        return Stream(writer.stream(answers), answers)
    return await writer.whole((await answers.results())[0])


def _check(request: ResponsesRequest) -> None:
    if request.n not in (None, 1):
        raise ApiError(400, f"n: got {request.n}; allowed: 1", param="n", code="invalid_value")
    if request.background:
        raise ApiError(400, "background is not supported", param="background", code="unsupported_parameter")
    if request.truncation not in (None, "disabled"):
        raise ApiError(400, f"truncation: got {request.truncation!r}; allowed: 'disabled'", param="truncation",
                       code="unsupported_parameter")


class _Writer:
    def __init__(self, service: Service, request: ResponsesRequest, extra: Features, prompt: str,
                 said: list[dict[str, Any]], request_id: str, model: str):
        self.service, self.request, self.extra, self.prompt, self.said = service, request, extra, prompt, said
        self.request_id, self.number = request_id, 0
        tools = request.tools or []
        self.head = {
            "id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "model": model,
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {}, "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id, "store": request.store is not False,
            "temperature": request.temperature, "top_p": request.top_p, "reasoning": request.reasoning,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "tool_choice": request.tool_choice or "auto", "tools": tools, "truncation": "disabled", "user": request.user,
            "error": None}

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        reader = self.extra.reader(self.prompt)
        parts = Parts.of([*reader.push(output.outputs[0].text), *reader.finish()])
        return await self._finished(parts, output)

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        begun = {**self.head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        reader, parts, output = self.extra.reader(self.prompt), Parts(), None
        async for _, output in answers:
            changes = parts.take(reader.push(output.outputs[0].delta))
            if output.finished:
                changes += [*parts.take(reader.finish()), *parts.end()]
            cut = output.outputs[0].finish_reason == "length"
            for change in changes:
                # Of an answer that its limit cuts off, the part that is open at the end is not whole.
                for told in self._events(change, "incomplete" if cut and change is changes[-1] else "completed"):
                    yield told
        assert output is not None, "a request that has ended without an error has an output"
        response = await self._finished(parts, output)
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return named_event({"type": kind, "sequence_number": self.number - 1, **fields})

    def _events(self, change: Change, status: str) -> list[bytes]:
        """What a stream tells of one change. status: of a part that closes."""
        part = change.part
        place = {"item_id": self._id(part), "output_index": part.index}
        if part.kind != "call":
            place["content_index"] = 0
        growing = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[part.kind]
        more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        if change.what == "grow":
            return [self._event(f"response.{growing}.delta", **place, delta=change.text, **more)]
        if change.what == "open":
            told = [self._event("response.output_item.added", output_index=part.index,
                                item={**self._item(part, "in_progress"), **({} if part.kind == "call" else {"content": []})})]
            if part.kind != "call":
                told.append(self._event("response.content_part.added", **place, part=_content(part, "")))
            return told
        text = part.text
        if part.kind == "call":
            told = [self._event(f"response.{growing}.done", **place, arguments=text, name=part.name)]
        else:
            told = [self._event(f"response.{growing}.done", **place, text=text, **more),
                    self._event("response.content_part.done", **place, part=_content(part, text))]
        return [*told, self._event("response.output_item.done", output_index=part.index, item=self._item(part, status))]

    def _id(self, part: Part) -> str:
        return f"{ITEM_IDS[part.kind]}_{self.request_id}" + (f"_{part.index}" if part.index else "")

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        if part.kind == "call" and status != "in_progress":      # a call that has ended is whole, whatever came then
            status = "completed" if part.cut is None else "incomplete"
        head = {"id": self._id(part), "status": status}
        if part.kind == "call":
            return {**head, "type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.text}
        if part.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [_content(part, part.text)]}
        return {**head, "type": "message", "role": "assistant", "content": [_content(part, part.text)]}

    async def _finished(self, parts: Parts, output: RequestOutput) -> dict[str, Any]:
        status = "incomplete" if output.outputs[0].finish_reason == "length" else "completed"
        items = [self._item(part, status if part is parts.parts[-1] else "completed") for part in parts.parts]
        usage = Usage.of([output])
        reasoned = await self._tokens("".join(part.text for part in parts.parts if part.kind == "reasoning"))
        response = {
            **self.head, "status": status, "output": items, "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
                      "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                      "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                      "output_tokens_details": {"reasoning_tokens": min(reasoned, usage.completion_tokens)}}}
        if self.request.store is not False:
            self.service.responses.put(response, messages(self._remembered(parts, items), self.said))
        return response

    def _remembered(self, parts: Parts, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items as a later request would send them; a call that was cut off is the text it was."""
        return [item if part.kind != "call" or part.arguments is not None else
                {"type": "message", "role": "assistant", "content": part.as_text}
                for part, item in zip(parts.parts, items)]

    async def _tokens(self, text: str) -> int:
        """Of reasoning, whose text is tokenised again."""
        tokenizer = self.service.tokenizer
        if not text or tokenizer is None:
            return 0
        return len(await self.service.llm.off_loop(lambda: tokenizer.encode(text, add_special_tokens=False)))


def _content(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
