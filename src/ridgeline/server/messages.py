"""/v1/messages and /v1/messages/count_tokens, in Anthropic's form."""
from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ridgeline.sampling_params import SamplingParams
from ridgeline.server.features import Features, features
from ridgeline.server.reply import Reply, Stream, named_event
from ridgeline.server.responses import text_of
from ridgeline.server.schemas.messages import CountRequest, MessagesRequest
from ridgeline.server.schemas.openai import ChatFields
from ridgeline.server.service import Answers, Context, Service
from ridgeline.server.usage import Usage
from ridgeline.types import CompletionOutput, RequestOutput

TEXT_BLOCKS = ("text",)


async def create(service: Service, request: MessagesRequest, context: Context) -> Reply:
    model = service.check_model(request.model)
    extra = features(request)
    given: dict[str, Any] = {name: value for name in ("temperature", "top_p", "top_k")
                             if (value := getattr(request, name)) is not None}
    params = SamplingParams(**{**service.defaults, **given, "max_tokens": request.max_tokens,
                               "stop": request.stop_sequences or (), **extra.params})
    prompt = await _prompt(service, request, extra)
    answers = await service.start([prompt], params, context)
    writer = _Writer(extra, prompt["prompt"], f"msg_{context.request_id}", model)
    if request.stream:
        return Stream(writer.stream(answers), answers)
    return writer.whole((await answers.results())[0])


async def count_tokens(service: Service, request: CountRequest, context: Context) -> dict[str, Any]:
    service.check_model(request.model)
    prompt = await _prompt(service, request, features(request))
    return {"input_tokens": len(prompt["prompt_token_ids"])}


async def _prompt(service: Service, request: CountRequest, extra: Features) -> Any:
    """An assistant's message at the end is the beginning of the answer."""
    messages = [{"role": message.get("role"), "content": text_of(message.get("content"), TEXT_BLOCKS,
                                                                 f"messages[{index}].content")}
                for index, message in enumerate(request.messages)]
    if request.system:
        messages.insert(0, {"role": "system", "content": text_of(request.system, TEXT_BLOCKS, "system")})
    begun = bool(messages) and messages[-1]["role"] == "assistant"
    return await service.conversation(ChatFields(messages=messages, continue_final_message=begun,
                                                 chat_template_kwargs=request.chat_template_kwargs), extra.template)


class _Writer:
    def __init__(self, extra: Features, prompt: str, name: str, model: str):
        self.extra, self.prompt = extra, prompt
        self.head = {"id": name, "type": "message", "role": "assistant", "model": model}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        parser, sample = self.extra.parser(self.prompt), output.outputs[0]
        text = "".join(delta.get("content", "") for delta in [*parser.push(sample.text), *parser.finish()])
        return {**self.head, "content": [{"type": "text", "text": text}], **_end(sample), "usage": _usage(output)}

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        parser, output, opened = self.extra.parser(self.prompt), None, False
        async for _, output in answers:
            if not opened:
                opened = True
                yield named_event({"type": "message_start", "message": {
                    **self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(output)}})
                yield named_event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
            deltas = parser.push(output.outputs[0].delta)
            if output.finished:
                deltas += parser.finish()
            for delta in deltas:
                if delta.get("content"):
                    yield named_event({"type": "content_block_delta", "index": 0,
                                       "delta": {"type": "text_delta", "text": delta["content"]}})
        assert output is not None, "a request that has ended without an error has an output"
        yield named_event({"type": "content_block_stop", "index": 0})
        yield named_event({"type": "message_delta", "delta": _end(output.outputs[0]), "usage": _usage(output)})
        yield named_event({"type": "message_stop"})


def _end(sample: CompletionOutput) -> dict[str, Any]:
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    return {"stop_reason": "max_tokens" if sample.finish_reason == "length" else "end_turn", "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Tokens taken from the prefix cache are counted apart, as Anthropic does."""
    usage = Usage.of([output])
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0, "output_tokens": usage.completion_tokens}
