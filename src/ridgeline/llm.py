"""`LLM`: load a model, generate, chat, stream. The offline entry point."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.engine import EngineStats
from ridgeline.errors import ConfigError, ModelNotFound, RequestError
from ridgeline.frontend import Frontend, Prompt
from ridgeline.loading import LoadedModel, Progress, load_engine
from ridgeline.sampling_params import SamplingParams
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from ridgeline.types import CompletionOutput, RequestMetrics, RequestOutput

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers prompts.

    model: a folder, a GGUF file, a hub id, or the name of a packaged model ("gemma3-270m"); options: see EngineConfig.
    raises ModelNotFound, CorruptFile, UnsupportedModel or ConfigError.
    """

    def __init__(self, model: str, *, on_load: Progress | None = None, **options: Any):
        self.config = EngineConfig.of(options)
        self.engine, self.loaded = load_engine(model, self.config, on_load)
        self.tokenizer = find_tokenizer(self.loaded, self.config)
        self.frontend = Frontend(self.engine, self.tokenizer, chat_template=self.config.chat_template)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
                 *, strategy: str | None = None, on_progress: Callable[[int, int, EngineStats], None] | None = None,
                 ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order. A request that is wrong or fails has `error` set; the others go on.

        params: one for all prompts or one each. on_progress(finished, total, stats) is called after each step.
        """
        prompts = _as_list(prompts)
        params = params or SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one for all or one each")
        results: dict[str, RequestOutput] = {}
        order: list[str | RequestOutput] = []
        for prompt, one in zip(prompts, each):
            try:
                order.append(self.frontend.add(prompt, one, strategy=strategy))
            except RequestError as error:
                order.append(_failed(prompt, error))
        finished, total = sum(isinstance(o, RequestOutput) for o in order), len(order)
        try:
            while self.frontend.has_work:
                for output in self.frontend.step():
                    results[output.request_id] = output
                    finished += output.finished
                if on_progress is not None:
                    on_progress(finished, total, self.engine.stats)
        except BaseException:
            for request_id in order:
                if isinstance(request_id, str):
                    self.frontend.abort(request_id)
            raise
        return [o if isinstance(o, RequestOutput) else results[o] for o in order]

    def chat(self, messages: Messages | Sequence[Messages], params: SamplingParams | None = None, *,
             strategy: str | None = None, **template: Any) -> list[RequestOutput]:
        """Answers to one conversation, or to several. template: arguments of the chat template (tools, ...)."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        ids = [self.frontend.render(conversation, **template) for conversation in conversations]
        return self.generate(ids, params, strategy=strategy)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *,
               strategy: str | None = None) -> Iterator[RequestOutput]:
        """The answer as it grows; `outputs[i].delta` is the new text. raises the request's error."""
        request_id = self.frontend.add(prompt, params or SamplingParams(), strategy=strategy)
        try:
            while self.frontend.has_work:
                for output in self.frontend.step():
                    if output.request_id == request_id:
                        yield output
                        if output.error is not None:
                            raise output.error
        finally:
            self.frontend.abort(request_id)

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats


def find_tokenizer(loaded: LoadedModel, config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, or None where a model comes without one: then prompts are token ids."""
    path = loaded.path if config.tokenizer is None else Path(config.tokenizer)
    try:
        return load_tokenizer(path)
    except ModelNotFound:
        if config.tokenizer is not None:
            raise
        return None


def _as_list(prompts: Any) -> list[Any]:
    """A single prompt is a text, a mapping or a list of ids; anything else is a list of prompts."""
    if isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _failed(prompt: Any, error: RequestError) -> RequestOutput:
    output = CompletionOutput(0, finish_reason="error", metrics=RequestMetrics(arrival=0.0))
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput("rejected", text, [], [output], finished=True, error=error)
