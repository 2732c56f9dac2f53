"""/v1/messages and /v1/messages/count_tokens, in Anthropic's form."""
from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from ridgeline.sampling_params import SamplingParams
from ridgeline.server.features import Features, features
from ridgeline.server.parts import Change, Part, Parts
from ridgeline.server.read_messages import asked, conversation
from ridgeline.server.reply import Reply, Stream, named_event
from ridgeline.server.schemas.messages import CountRequest, MessagesRequest
from ridgeline.server.schemas.openai import ChatFields
from ridgeline.server.service import Answers, Context, Service
from ridgeline.server.usage import Usage
from ridgeline.types import CompletionOutput, RequestOutput


async def create(service: Service, request: MessagesRequest, context: Context) -> Reply:
    model = service.check_model(request.model)
    extra = features(request, service.config, asked(request, service.config))
    given: dict[str, Any] = {name: value for name in ("temperature", "top_p", "top_k")
                             if (value := getattr(request, name)) is not None}
    prompt = await _prompt(service, request, extra)
    params = SamplingParams(**{**service.defaults, **given, "max_tokens": request.max_tokens,
                               "stop": request.stop_sequences or (), **extra.params_for(prompt["prompt"])})
    answers = await service.start([prompt], params, context)
    writer = _Writer(extra, prompt["prompt"], f"msg_{context.request_id}", model)
    if request.stream:
        return Stream(writer.stream(answers), answers)
    return writer.whole((await answers.results())[0])


async def count_tokens(service: Service, request: CountRequest, context: Context) -> dict[str, Any]:
    service.check_model(request.model)
    prompt = await _prompt(service, request, features(request, service.config, asked(request, service.config)))
    return {"input_tokens": len(prompt["prompt_token_ids"])}


async def _prompt(service: Service, request: CountRequest, extra: Features) -> Any:
    """An assistant's message at the end is the beginning of the answer."""
    messages = conversation(request)
    begun = bool(messages) and messages[-1]["role"] == "assistant"
    return await service.conversation(ChatFields(messages=messages, continue_final_message=begun,
                                                 chat_template_kwargs=request.chat_template_kwargs), extra.template)


class _Writer:
    def __init__(self, extra: Features, prompt: str, name: str, model: str):
        self.extra, self.prompt = extra, prompt
        self.head = {"id": name, "type": "message", "role": "assistant", "model": model}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        reader, sample = self.extra.reader(self.prompt), output.outputs[0]
        parts = Parts.of([*reader.push(sample.text), *reader.finish()])
        content = _blocks(parts.parts)
        called = any(block["type"] == "tool_use" for block in content)
        return {**self.head, "content": content, **_end(sample, called), "usage": _usage(output)}

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        reader, parts, output, opened = self.extra.reader(self.prompt), Parts(), None, False
        async for _, output in answers:
            if not opened:
                opened = True
                yield named_event({"type": "message_start", "message": {
                    **self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(output)}})
            changes = parts.take(reader.push(output.outputs[0].delta))
            if output.finished:
                changes += [*parts.take(reader.finish()), *parts.end()]
            for change in changes:
                for told in _events(change):
                    yield named_event(told)
        assert output is not None, "a request that has ended without an error has an output"
        yield named_event({"type": "message_delta", "delta": _end(output.outputs[0], parts.called), "usage": _usage(output)})
        yield named_event({"type": "message_stop"})


def _events(change: Change) -> list[dict[str, Any]]:
    part, index = change.part, change.part.index
    if change.what == "open":
        return [{"type": "content_block_start", "index": index, "content_block": _block(part, "", {}, "")}]
    if change.what == "grow":
        return [{"type": "content_block_delta", "index": index, "delta": _delta(part, change.text)}]
    end = {"type": "content_block_stop", "index": index}
    if part.kind != "reasoning":
        return [end]
    return [{"type": "content_block_delta", "index": index,
             "delta": {"type": "signature_delta", "signature": _signature(part.text)}}, end]


def _delta(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": text} if part.kind == "text" else {"type": "thinking_delta", "thinking": text}


def _block(part: Part, text: str, arguments: dict[str, Any], signature: str) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text}


def _blocks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Of a whole answer, where a call that was cut off, or whose arguments are no object, is shown as text."""
    found: list[dict[str, Any]] = []
    for part in parts:
        arguments = part.arguments
        if part.kind != "call" or arguments is not None:
            found.append(_block(part, part.text, arguments or {}, _signature(part.text)))
        elif found and found[-1]["type"] == "text":
            found[-1]["text"] += part.as_text
        else:
            found.append({"type": "text", "text": part.as_text})
    return found


def _signature(thinking: str) -> str:
    """Clients want one that is not empty, and send it back; nothing is made of it here."""
    return hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()


def _end(sample: CompletionOutput, called: bool) -> dict[str, Any]:
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    ended = "tool_use" if called else "end_turn"
    return {"stop_reason": "max_tokens" if sample.finish_reason == "length" else ended, "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Tokens taken from the prefix cache are counted apart, as Anthropic does."""
    usage = Usage.of([output])
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0, "output_tokens": usage.completion_tokens}
