"""Between text and the engine: tokenises prompts, turns tokens back into text, finds stop strings, collects results."""
from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from ridgeline.engine import Engine
from ridgeline.errors import InvalidParams, InvalidPrompt
from ridgeline.grammar import Grammar
from ridgeline.grammar.compiler import GrammarCompiler
from ridgeline.sampling_params import SamplingParams
from ridgeline.structured_outputs import StructuredOutputsParams
from ridgeline.text.chat import render_chat
from ridgeline.text.stop import StopChecker
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.types import (
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    RequestOutput,
    StepOutput,
    TokenLogprobs,
)

Prompt = str | Sequence[int] | Mapping[str, Any]     # text, ids, or {"prompt": ...} / {"prompt_token_ids": ...}
PROMPT_KEYS = ("prompt", "prompt_token_ids")

# Prompt tokens that a decoder sees before the first generated one, so that a character that begins in the prompt ends
# in the text, and a space between the two is not taken for one at the start of a text. Four bytes are enough for the
# first; eight tokens nearly always show some text.
CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose text is tokenised, checked and ready to be queued. arrival: when it was handed over."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    arrival: float
    grammar: Grammar | None = None


class _Sample:
    """The text of one sample as it grows."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, prompt: Sequence[int],
                 text: str | None):
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Logprob] | None = None if params.logprobs is None else []
        self.output = CompletionOutput(index, self.pieces, self.token_ids, logprobs=self.logprobs)    # sees these lists grow
        self.params = params
        self.decoder = None if tokenizer is None else tokenizer.decoder(params.skip_special_tokens)
        self.stop = StopChecker(params.stop, params.include_stop_str_in_output)
        if self.decoder is not None:
            whole = params.echo and text is None
            shown = self.decoder.push(prompt if whole else prompt[-CONTEXT_TOKENS:])
            if params.echo:
                self._show(shown if text is None else text)

    def done(self) -> bool:
        return self.output.finish_reason is not None

    def push(self, tokens: Sequence[int], *, ended: bool) -> int:
        """Take new tokens; returns how many of them count: fewer than all where a stop string ended the text.

        ended: the last token ended the sequence (an end-of-text or stop token); like a stop string it is not shown
        unless the request says so. A stop string is looked for in what comes behind the first min_tokens tokens.
        """
        out, params = self.output, self.params
        if self.decoder is None:
            self.token_ids += tokens
            return len(tokens)
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if ended and i == len(tokens) - 1 and not params.include_stop_str_in_output:
                break
            text = self.decoder.push([token])
            if len(self.token_ids) <= params.min_tokens:
                self._show(text)
                continue
            shown, stopped = self.stop.push(text)
            self._show(shown)
            if stopped is not None:
                out.finish_reason, out.stop_reason = FinishReason.STOP.value, stopped
                return i + 1
        return len(tokens)

    def end(self) -> None:
        """Show what was held back: incomplete characters, and the beginning of a stop string that did not come."""
        if self.decoder is not None:
            shown, _ = self.stop.push(self.decoder.flush())
            self._show(shown + self.stop.flush())

    def _show(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.output.delta += text


class _Live:
    def __init__(self, output: RequestOutput, samples: list[_Sample], engine_id: str):
        self.output, self.samples, self.engine_id = output, samples, engine_id
        self.left = len(samples)


class Frontend:
    """One engine and its tokenizer (None: token ids in, token ids out). Every method from one thread, but `render`,
    `conversation` and `prepare`, which any thread may call."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, *, chat_template: str | None = None):
        self.engine, self.tokenizer, self.chat_template = engine, tokenizer, chat_template
        if tokenizer is not None:
            engine.eos_token_ids = tuple(dict.fromkeys([*engine.eos_token_ids, *tokenizer.eos_token_ids]))
        # A caller may use an id again as soon as its request has ended, when the engine still has a last word to say
        # about the old one. So the engine knows requests by ids of our own.
        self._live: dict[str, _Live] = {}            # by the engine's id
        self._engine_ids: dict[str, str] = {}        # the caller's id -> the engine's
        self._count = 0
        self._compiler: GrammarCompiler | None = None
        self._making = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation. raises InvalidPrompt, also where the model has no chat template."""
        return self.conversation(messages, **kwargs)[1]

    def conversation(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> tuple[str, list[int]]:
        """The prompt for a conversation, as text and as token ids."""
        if self.tokenizer is None:
            raise InvalidPrompt("chat needs a tokenizer; this model has none")
        kwargs.setdefault("chat_template", self.chat_template)
        text = render_chat(self.tokenizer, messages, **kwargs)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def add(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
            strategy: str | None = None) -> str:
        """Tokenise and queue a prompt; returns its request id. raises RequestError; nothing else is disturbed."""
        return self.queue(self.prepare(prompt, params), request_id=request_id, strategy=strategy)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """Tokenise and check a prompt, in any thread. raises RequestError."""
        arrival = time.monotonic()
        if not isinstance(params, SamplingParams):
            raise InvalidParams(f"params is {type(params).__name__}; it must be SamplingParams")
        text, ids = self._tokenise(prompt)
        return Prepared(text, ids, self._resolve(params), arrival, self.grammar(params))

    def queue(self, prepared: Prepared, *, request_id: str | None = None, strategy: str | None = None) -> str:
        """Queue a prepared prompt; returns its request id. raises RequestError; nothing else is disturbed."""
        text, ids, params = prepared.text, prepared.ids, prepared.params
        self._count += 1
        engine_id = f"request-{self._count}"
        if request_id is None:
            request_id = engine_id
        if request_id in self._engine_ids:
            raise InvalidParams(f"request_id {request_id!r} is in use by a live request")
        tokenizer = self.tokenizer if params.detokenize else None
        samples = [_Sample(i, params, tokenizer, ids, text) for i in range(params.n)]
        self.engine.add_request(EngineRequest(engine_id, ids, params, strategy=strategy, arrival=prepared.arrival,
                                              grammar=prepared.grammar))
        output = RequestOutput(request_id, text, ids, [s.output for s in samples])
        self._live[engine_id] = _Live(output, samples, engine_id)
        self._engine_ids[request_id] = engine_id
        return request_id

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: Any = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = [str(key) for key in prompt if key not in PROMPT_KEYS]
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if unknown or (ids is None and text is None):
                raise InvalidPrompt(f"the prompt is an object with the keys {', '.join(map(str, prompt)) or '(none)'}; it "
                                    f"needs one of {' or '.join(PROMPT_KEYS)} and nothing else")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None:
            if text == "":
                raise InvalidPrompt("the prompt is empty; it needs at least one token")
            if self.tokenizer is None:
                raise InvalidPrompt("the model has no tokenizer; give token ids instead of text")
            return text, self.tokenizer.encode(text)
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
            raise InvalidPrompt(f"the prompt is {type(ids).__name__}; it must be text or a list of token ids")
        wrong = next((t for t in ids if isinstance(t, bool) or not isinstance(t, Integral)), None)
        if wrong is not None:
            raise InvalidPrompt(f"the prompt contains {wrong!r} among its token ids; they must be integers")
        return text, [int(t) for t in ids]

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """Words become token ids; text features need a tokenizer."""
        if self.tokenizer is None:
            if params.stop or params.bad_words:
                raise InvalidParams("stop and bad_words need a tokenizer; this model has none")
            return params
        if not params.bad_words:
            return params
        found = list(params.bad_words_token_ids)
        for word in params.bad_words:                # at the start of a text and behind a space
            plain = tuple(self.tokenizer.encode(word, add_special_tokens=False))
            spaced = tuple(self.tokenizer.encode(f" {word}", add_special_tokens=False))
            if not plain:
                raise InvalidParams(f"bad_words: {word!r} has no tokens in this model's vocabulary")
            found.append(plain)
            if spaced[-len(plain):] != plain:        # else the word itself is the same, only the space comes first
                found.append(spaced)
        return replace(params, bad_words_token_ids=list(dict.fromkeys(found)), bad_words=())

    @property
    def compiler(self) -> GrammarCompiler:
        """Of grammars over this model's tokenizer. raises InvalidParams where there is none."""
        if self.tokenizer is None:
            raise InvalidParams("structured_outputs need a tokenizer; this model has none")
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.tokenizer, self.engine.vocab_size, self.engine.eos_token_ids)
            return self._compiler

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """The compiled grammar of a request; milliseconds, but for the first seconds. raises InvalidParams."""
        wanted = params.structured_outputs
        if wanted is None or params.max_tokens == 0:
            return None
        assert isinstance(wanted, StructuredOutputsParams), "SamplingParams converts what it is given"
        return self.compiler.compile(wanted)

    def abort(self, request_id: str) -> None:
        """End a request now; it gives no further output. An unknown id is no error: it may just have finished."""
        engine_id = self._engine_ids.pop(request_id, None)
        if engine_id is not None:
            del self._live[engine_id]
            self.engine.abort(engine_id)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> list[RequestOutput]:
        """One engine step. Returns the requests that gained something, each once.

        They are the same objects each time; `delta` grows until the caller takes it with `RequestOutput.take`.
        """
        touched: dict[str, _Live] = {}
        for step in self.engine.step():
            live = self._live.get(step.request_id)
            if live is not None:
                touched[step.request_id] = live
                self._take(live, step)
        for engine_id, live in touched.items():
            live.output.finished = live.left == 0
            if live.output.finished:
                del self._live[engine_id]
                del self._engine_ids[live.output.request_id]
        return [live.output for live in touched.values()]

    def _take(self, live: _Live, step: StepOutput) -> None:
        sample = live.samples[step.index]
        if sample.done():
            return                                      # a stop string ended it; this is the engine's last word
        out = sample.output
        out.metrics = step.metrics
        live.output.embedding = step.embedding
        if step.prompt_logprobs is not None:
            live.output.prompt_logprobs = [None if p is None else self._logprob(p) for p in step.prompt_logprobs]
        count = sample.push(step.new_tokens, ended=step.finish_reason is FinishReason.STOP)
        if sample.logprobs is not None:
            sample.logprobs += [self._logprob(p) for p in step.logprobs[:count]]
        if sample.done():                                 # a stop string: tokens wholly behind it do not count
            if step.finish_reason is None:
                self.engine.abort(live.engine_id, step.index, FinishReason.STOP)
            assert out.metrics is not None
            out.metrics.completion_tokens = len(out.token_ids)
            out.metrics.token_times = out.metrics.token_times[:len(out.token_ids)]
        elif step.finish_reason is not None:
            out.finish_reason, out.stop_reason = step.finish_reason.value, step.stop_token
            live.output.error = live.output.error or step.error
            sample.end()
        live.left -= sample.done()

    def _logprob(self, entry: TokenLogprobs) -> Logprob:
        top = tuple(self._one(token, logprob, rank + 1) for rank, (token, logprob) in enumerate(entry.top))
        return replace(self._one(entry.token, entry.logprob, entry.rank), top=top)

    def _one(self, token: int, logprob: float, rank: int) -> Logprob:
        data = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)
        return Logprob(token, data.decode("utf-8", "replace"), data, logprob, rank)
