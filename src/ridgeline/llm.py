"""`LLM`: load a model, generate, chat, stream. The offline entry point."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.engine import EngineStats
from ridgeline.errors import ConfigError, ModelNotFound, RequestError
from ridgeline.frontend import Frontend, Prompt
from ridgeline.loading import LoadedModel, Progress, load_engine
from ridgeline.sampling_params import SamplingParams
from ridgeline.text.gguf_tokenizer import tokenizer_from_metadata
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from ridgeline.types import CompletionOutput, RequestMetrics, RequestOutput

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers prompts. All methods from one thread; AsyncLLM serves concurrent callers.

    model: a folder, a GGUF file, a hub id, or the name of a packaged model ("gemma3-270m"); options: see EngineConfig.
    raises ModelNotFound, CorruptFile, UnsupportedModel or ConfigError.
    """

    def __init__(self, model: str | Path, *, on_load: Progress | None = None, **options: Any):
        self.config = EngineConfig.of(options)
        self.engine, self.loaded = load_engine(str(model), self.config, on_load)
        self.tokenizer = find_tokenizer(self.loaded, self.config)
        self.frontend = Frontend(self.engine, self.tokenizer, chat_template=self.config.chat_template)
        self._open: set[str] = set()                     # live requests of this object's callers
        self._news: dict[str, RequestOutput] = {}        # of these, what gained something that was not taken yet

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
                 *, strategy: str | None = None, on_progress: Callable[[int, int, EngineStats], None] | None = None,
                 ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order. A request that is wrong or fails has `error` set; the others go on.

        params: one for all prompts or one each. on_progress(finished, total, stats) is called after each step.
        """
        return self._run(_as_list(prompts), lambda prompt: prompt, params, strategy, on_progress)

    def chat(self, messages: Messages | Sequence[Messages], params: SamplingParams | Sequence[SamplingParams] | None = None,
             *, strategy: str | None = None, **template: Any) -> list[RequestOutput]:
        """Answers to one conversation, or to several. template: arguments of the chat template (tools, ...).

        Errors as in `generate`: messages that the template rejects are an error of that conversation alone.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        return self._run(conversations, lambda c: self.frontend.render(c, **template), params, strategy, None)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *,
               strategy: str | None = None) -> Iterator[RequestOutput]:
        """The answer as it grows; `outputs[i].delta` is the new text. raises the request's error.

        Several streams may be read in turns; one that is left early is aborted.
        """
        request_id = self._add(prompt, SamplingParams() if params is None else params, strategy)
        try:
            finished = False
            while not finished:
                while request_id not in self._news:
                    self._step()
                output = self._news.pop(request_id).take()
                finished = output.finished
                yield output
                if output.error is not None:
                    raise output.error
        finally:
            self._drop(request_id)

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def _run(self, items: Sequence[Any], prompt_of: Callable[[Any], Prompt],
             params: SamplingParams | Sequence[SamplingParams] | None, strategy: str | None,
             on_progress: Callable[[int, int, EngineStats], None] | None) -> list[RequestOutput]:
        each = _one_each(params, len(items))
        order: list[str | RequestOutput] = []
        for item, one in zip(items, each):
            try:
                order.append(self._add(prompt_of(item), one, strategy))
            except RequestError as error:
                order.append(_failed(item, error))
        waiting = {o for o in order if isinstance(o, str)}
        results: dict[str, RequestOutput] = {}
        try:
            while len(results) < len(waiting):
                self._step()
                for request_id in [r for r in self._news if r in waiting]:
                    output = self._news.pop(request_id)
                    if output.finished:
                        results[request_id] = output
                if on_progress is not None:
                    on_progress(len(order) - len(waiting) + len(results), len(order), self.engine.stats)
        finally:
            for request_id in waiting:
                self._drop(request_id)
        return [o if isinstance(o, RequestOutput) else results[o] for o in order]

    def _add(self, prompt: Prompt, params: SamplingParams, strategy: str | None) -> str:
        request_id = self.frontend.add(prompt, params, strategy=strategy)
        self._open.add(request_id)
        return request_id

    def _step(self) -> None:
        """One step for all callers; each finds in `_news` what is its own."""
        assert self.frontend.has_work, "a request is open and the engine has nothing to do"
        for output in self.frontend.step():
            if output.request_id in self._open:
                self._news[output.request_id] = output

    def _drop(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._news.pop(request_id, None)
        self.frontend.abort(request_id)                  # does nothing to one that has finished


def find_tokenizer(loaded: LoadedModel, config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, or None where a model comes without one: then prompts are token ids.

    raises ModelNotFound where config.tokenizer names none, CorruptFile or UnsupportedModel for one that cannot be read.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(Path(config.tokenizer).expanduser())
    checkpoint = loaded.checkpoint
    if checkpoint.format == "gguf" and checkpoint.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
        return tokenizer_from_metadata(checkpoint.metadata, str(checkpoint.path))
    try:
        return load_tokenizer(loaded.path if loaded.path.is_dir() else loaded.path.parent)
    except ModelNotFound:
        return None


def _as_list(prompts: Any) -> list[Any]:
    """A single prompt is a text, a mapping or a list of ids; anything else is a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ConfigError(f"params is {type(params).__name__}; it must be SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise ConfigError(f"{count} prompts but {len(params)} SamplingParams; give one for all or one each")
    return list(params)


def _failed(prompt: Any, error: RequestError) -> RequestOutput:
    output = CompletionOutput(0, finish_reason="error", metrics=RequestMetrics(arrival=0.0))
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
    return RequestOutput("rejected", text, [], [output], finished=True, error=error)
