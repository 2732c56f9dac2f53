"""/v1/completions."""
from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ridgeline.errors import InvalidPrompt
from ridgeline.frontend import Prompt
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.errors import ApiError
from ridgeline.server.features import features
from ridgeline.server.logprobs import CompletionLogprobs, prompt_logprobs
from ridgeline.server.params import sampling_params
from ridgeline.server.reply import DONE, Reply, Stream, event
from ridgeline.server.schemas.openai import CompletionRequest, Prompts
from ridgeline.server.service import Answers, Context, Service
from ridgeline.server.usage import Usage
from ridgeline.types import CompletionOutput, Logprob, RequestOutput


async def create(service: Service, request: CompletionRequest, context: Context) -> Reply:
    model = service.check_model(request.model)
    if request.suffix:
        raise ApiError(400, "suffix is not supported: the model continues a text, it does not fill gaps", param="suffix",
                       code="unsupported_parameter")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, f"best_of: got {request.best_of}; allowed: the value of n, {request.n or 1}", param="best_of",
                       code="unsupported_parameter")
    extra = features(request, service.config)
    echo = bool(request.echo)
    more: dict[str, Any] = {"max_tokens": request.max_tokens, "logprobs": request.logprobs, "echo": echo, **extra.params}
    if echo and request.logprobs is not None:
        more["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    params = sampling_params(request, service.defaults, **more)
    prompts = prompts_of(service, request.prompt, "prompt", request.add_special_tokens)
    answers = await service.start(prompts, params, context)
    writer = _Writer(service, request, params, f"cmpl-{context.request_id}", model)
    if request.stream:
        return Stream(writer.stream(answers), answers)
    return writer.whole(await answers.results())


def prompts_of(service: Service, given: Prompts, name: str, add_special_tokens: bool = True) -> list[Prompt]:
    """One prompt or several, as text or as token ids. raises InvalidPrompt."""
    if isinstance(given, str):
        found: list[Any] = [given]
    elif given and isinstance(given[0], int):
        found = [given]
    else:
        found = list(given)
    if not found:
        raise InvalidPrompt(f"{name} is an empty list; it needs at least one prompt")
    if add_special_tokens or service.tokenizer is None:
        return found
    tokenizer = service.tokenizer
    return [{"prompt": p, "prompt_token_ids": tokenizer.encode(p, add_special_tokens=False)} if isinstance(p, str) else p
            for p in found]


class _Choice:
    """How much of one sample has been written."""

    def __init__(self, writer: _Writer, output: RequestOutput):
        request, params = writer.request, writer.params
        self.logprobs = None if request.logprobs is None else CompletionLogprobs(
            writer.service.tokenizer, output.prompt_token_ids, request.logprobs, echo=bool(request.echo),
            skip_special=params.skip_special_tokens, as_ids=request.return_tokens_as_token_ids)
        self.told = 0
        self.echoes = bool(request.echo)

    def piece(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any] | None:
        """The logprobs of the tokens that are new, those of an echoed prompt first."""
        if self.logprobs is None:
            return None
        entries: list[Logprob | None] = list((sample.logprobs or [])[self.told:])
        tokens = sample.token_ids[self.told:self.told + len(entries)]
        self.told += len(entries)
        if self.echoes and output.prompt_logprobs is not None:
            entries, tokens = [*output.prompt_logprobs, *entries], [*output.prompt_token_ids, *tokens]
            self.echoes = False
        return self.logprobs.piece(entries, tokens)


class _Writer:
    def __init__(self, service: Service, request: CompletionRequest, params: SamplingParams, name: str, model: str):
        self.service, self.request, self.params = service, request, params
        self.head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model,
                     "system_fingerprint": None}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt, output in enumerate(outputs):
            for sample in output.outputs:
                choice = self._choice(prompt, sample, sample.text, _Choice(self, output).piece(output, sample))
                if output.prompt_logprobs is not None and self.request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                if self.request.return_token_ids:
                    choice |= {"token_ids": sample.token_ids, "prompt_token_ids": output.prompt_token_ids}
                choices.append(choice)
        return {**self.head, "choices": choices, "usage": Usage.of(outputs).openai}

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        options = self.request.stream_options
        states: dict[tuple[int, int], _Choice] = {}
        sent: dict[tuple[int, int], int] = {}
        usage = Usage()
        async for prompt, output in answers:
            usage.take(prompt, output)
            for sample in output.outputs:
                key = prompt, sample.index
                if sent.get(key) == -1:                 # this sample has ended, another of its request goes on
                    continue
                state = states.get(key) or states.setdefault(key, _Choice(self, output))
                choice = self._choice(prompt, sample, sample.delta, state.piece(output, sample))
                done = sample.finish_reason is not None
                if self.request.return_token_ids:
                    choice["token_ids"] = sample.token_ids[sent.get(key, 0):]
                    if key not in sent:
                        choice["prompt_token_ids"] = output.prompt_token_ids
                if output.prompt_logprobs is not None and self.request.prompt_logprobs is not None and key not in sent:
                    choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                news = sample.delta or done or self.request.return_token_ids or (
                    choice["logprobs"] is not None and choice["logprobs"]["tokens"])
                sent[key] = -1 if done else len(sample.token_ids)
                if news:
                    chunk = {**self.head, "choices": [choice]}
                    if options is not None and (options.include_usage or options.continuous_usage_stats):
                        chunk["usage"] = usage.openai if options.continuous_usage_stats else None
                    yield event(chunk)
        if options is not None and options.include_usage:
            yield event({**self.head, "choices": [], "usage": usage.openai})
        yield DONE

    def _choice(self, prompt: int, sample: CompletionOutput, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": prompt * self.params.n + sample.index, "text": text, "logprobs": logprobs,
                "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
