"""Between text and the engine: tokenises prompts, turns tokens back into text, finds stop strings, collects results."""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.engine import Engine
from ridgeline.errors import InvalidParams, InvalidPrompt, RidgelineError
from ridgeline.sampling_params import SamplingParams
from ridgeline.text.chat import render_chat
from ridgeline.text.stop import StopChecker, tokens_of_text
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.types import (
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StepOutput,
    TokenLogprobs,
)

Prompt = str | Sequence[int] | Mapping[str, Any]     # text, ids, or {"prompt": ...} / {"prompt_token_ids": ...}


class _Sample:
    """The text of one sample as it grows."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None):
        self.output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        self.params, self.tokenizer = params, tokenizer
        self.decoder = None if tokenizer is None else tokenizer.decoder(params.skip_special_tokens)
        self.stop = StopChecker(params.stop, params.include_stop_str_in_output)
        self.shown = 0                   # characters of generated text, an echoed prompt not counted

    def push(self, tokens: Sequence[int]) -> bool:
        """Take new tokens. Returns whether a stop string ended the text."""
        out = self.output
        out.token_ids += tokens
        if self.decoder is None:
            return False
        if not self.params.stop:
            self._show(self.decoder.push(tokens))
            return False
        for i, token in enumerate(tokens):
            text = self.decoder.push([token])
            if len(out.token_ids) - len(tokens) + i < self.params.min_tokens:
                self._show(text)         # a stop string counts only behind min_tokens
                continue
            shown, stopped = self.stop.push(text)
            self._show(shown)
            if stopped is not None:
                out.stop_reason = stopped
                return True
        return False

    def end(self) -> None:
        """Show what was held back: incomplete characters, and the beginning of a stop string that did not come."""
        if self.decoder is not None:
            shown, _ = self.stop.push(self.decoder.flush())
            self._show(shown + self.stop.flush())

    def trim(self) -> None:
        """Drop the tokens that lie wholly behind the stop string, so that ids and text tell the same."""
        assert self.tokenizer is not None
        stop = self.output.stop_reason
        characters = self.shown + (0 if self.params.include_stop_str_in_output else len(str(stop)))
        keep = tokens_of_text(self.tokenizer.decoder(self.params.skip_special_tokens), self.output.token_ids, characters)
        del self.output.token_ids[keep:]
        if self.output.logprobs is not None:
            del self.output.logprobs[keep:]

    def _show(self, text: str) -> None:
        self.output.text += text
        self.output.delta += text
        self.shown += len(text)


class _Live:
    def __init__(self, output: RequestOutput, samples: list[_Sample]):
        self.output, self.samples = output, samples
        self.left = len(samples)


class Frontend:
    """One engine and its tokenizer (None: token ids in, token ids out)."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, *, chat_template: str | None = None):
        self.engine, self.tokenizer, self.chat_template = engine, tokenizer, chat_template
        if tokenizer is not None:
            engine.eos_token_ids = tuple(dict.fromkeys([*engine.eos_token_ids, *tokenizer.eos_token_ids]))
        self._live: dict[str, _Live] = {}
        self._count = 0

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation. raises InvalidPrompt, also where the model has no chat template."""
        if self.tokenizer is None:
            raise InvalidPrompt("chat needs a tokenizer; this engine runs without one")
        kwargs.setdefault("chat_template", self.chat_template)
        text = render_chat(self.tokenizer, messages, **kwargs)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def add(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
            strategy: str | None = None) -> str:
        """Tokenise and queue a prompt; returns its request id. raises RequestError; nothing else is disturbed."""
        arrival = time.monotonic()
        text, ids = self._tokenise(prompt)
        params = self._resolve(params)
        if request_id is None:
            self._count += 1
            request_id = f"request-{self._count}"
        self.engine.add_request(EngineRequest(request_id, ids, params, strategy=strategy, arrival=arrival))
        samples = [_Sample(i, params, self.tokenizer if params.detokenize else None) for i in range(params.n)]
        if params.echo:
            if text is None and self.tokenizer is not None:
                text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
            for sample in samples:
                sample.output.text = sample.output.delta = text or ""
        output = RequestOutput(request_id, text, ids, [s.output for s in samples])
        self._live[request_id] = _Live(output, samples)
        return request_id

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: Any = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None and text is None:
                raise InvalidPrompt(f"the prompt has the keys {', '.join(map(str, prompt))}; it needs prompt or "
                                    "prompt_token_ids")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None:
            if self.tokenizer is None:
                raise InvalidPrompt("the model has no tokenizer; give token ids instead of text")
            if text == "":
                raise InvalidPrompt("the prompt is empty; it needs at least one token")
            return text, self.tokenizer.encode(text)
        if not isinstance(ids, Sequence) or not all(isinstance(t, int) and not isinstance(t, bool) for t in ids):
            raise InvalidPrompt(f"a prompt must be text or a list of token ids, not {type(ids).__name__}")
        return text, list(ids)

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """Words become token ids; text features need a tokenizer."""
        if self.tokenizer is None:
            if params.stop or params.bad_words:
                raise InvalidParams("stop and bad_words need a tokenizer; this model has none")
            return params
        if not params.bad_words:
            return params
        words = list(params.bad_words_token_ids)
        for word in params.bad_words:                # at the start of a word and inside one
            for spelling in (word, f" {word}"):
                ids = tuple(self.tokenizer.encode(spelling, add_special_tokens=False))
                if ids and ids not in words:
                    words.append(ids)
        return replace(params, bad_words_token_ids=words, bad_words=())

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.engine.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> list[RequestOutput]:
        """One engine step. Returns the requests that gained something, each once, with the text since the last step."""
        touched: dict[str, _Live] = {}
        for step in self.engine.step():
            live = self._live.get(step.request_id)
            if live is None:
                continue
            if step.request_id not in touched:
                touched[step.request_id] = live
                for sample in live.samples:
                    sample.output.delta = "" if sample.output.token_ids or sample.output.metrics else sample.output.delta
            self._take(live, step)
        for request_id, live in touched.items():
            live.output.finished = live.left == 0
            if live.output.finished:
                del self._live[request_id]
        return [live.output for live in touched.values()]

    def _take(self, live: _Live, step: StepOutput) -> None:
        sample = live.samples[step.index]
        out = sample.output
        if out.finish_reason is not None:
            return                                      # a stop string ended it; the engine hears of it below
        out.metrics = step.metrics
        if step.prompt_logprobs is not None:
            live.output.prompt_logprobs = [None if p is None else self._logprob(p) for p in step.prompt_logprobs]
        if out.logprobs is not None:
            out.logprobs += [self._logprob(p) for p in step.logprobs]
        stopped = sample.push(step.new_tokens)
        if stopped:
            out.finish_reason = FinishReason.STOP.value
            self._count_only(sample)
            if step.finish_reason is None:
                self.engine.abort(step.request_id, step.index, FinishReason.STOP)
        elif step.finish_reason is not None:
            out.finish_reason, out.stop_reason = step.finish_reason.value, step.stop_token
            live.output.error = live.output.error or step.error
            sample.end()
        if out.finish_reason is not None:
            live.left -= 1

    @staticmethod
    def _count_only(sample: _Sample) -> None:
        sample.trim()
        metrics = sample.output.metrics
        assert isinstance(metrics, RequestMetrics)
        metrics.completion_tokens = len(sample.output.token_ids)
        del metrics.token_times[metrics.completion_tokens:]
        metrics.finished = metrics.finished or time.monotonic()

    def _logprob(self, entry: TokenLogprobs) -> Logprob:
        top = tuple(self._one(token, logprob, rank + 1) for rank, (token, logprob) in enumerate(entry.top))
        return replace(self._one(entry.token, entry.logprob, entry.rank), top=top)

    def _one(self, token: int, logprob: float, rank: int) -> Logprob:
        data = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)
        return Logprob(token, data.decode("utf-8", "replace"), data, logprob, rank)


def first_error(outputs: Sequence[RequestOutput]) -> RidgelineError | None:
    return next((o.error for o in outputs if isinstance(o.error, RidgelineError)), None)
