"""From what a request asks to a compiled grammar: one table of the vocabulary, a cache of grammars.

The table of 262,144 tokens takes 3 s to make, once; a grammar 1 to 10 ms. Neither belongs in the engine's thread.
"""
from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ridgeline.errors import InvalidParams
from ridgeline.grammar.base import Grammar
from ridgeline.structured_outputs import KINDS, WHITESPACE_PATTERN, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ridgeline.text.tokenizer import Tokenizer

CACHED_GRAMMARS = 256


class GrammarCompiler:
    """Grammars over one tokenizer. Every method from any thread.

    vocab_size: rows of the model's logits; eos_token_ids: tokens that end an output, allowed only where the grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()                  # of the two below
        self._cache: OrderedDict[str, _Entry] = OrderedDict()
        self._table: LLTokenizer | None = None
        self._making = threading.Lock()

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar, compiled or from the cache. raises InvalidParams; callers that ask for the same one wait for it."""
        key = wanted.key
        with self._lock:
            entry = self._cache.setdefault(key, _Entry())
            self._cache.move_to_end(key)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        with entry.lock:
            if entry.grammar is None:
                if entry.error is not None:
                    raise InvalidParams(entry.error)
                try:
                    entry.grammar = self._compile(wanted)
                except InvalidParams as error:
                    entry.error = str(error)
                    raise
            return entry.grammar

    def cached(self, wanted: StructuredOutputsParams) -> bool:
        """Whether `compile` returns at once."""
        with self._lock:
            entry = self._cache.get(wanted.key)
        return entry is not None and entry.grammar is not None

    def prepare(self) -> None:
        """Make the table of the vocabulary now. raises InvalidParams where this tokenizer or installation has none."""
        with self._making:
            if self._table is None:
                self._table = self._make_table()

    def _make_table(self) -> LLTokenizer:
        llguidance = _library()
        tokenizer = self.tokenizer
        if not tokenizer.has_fixed_bytes:
            raise InvalidParams("structured_outputs: the tokens of this model's tokenizer have no fixed bytes, so no"
            " grammar can "
                                "be enforced on them")
        if not self.eos_token_ids:
            raise InvalidParams("structured_outputs: this model names no end-of-sequence token, so no output could end")
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self.vocab_size, self.eos_token_ids))
        table: LLTokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=self.eos_token_ids,
                                                    slices=llguidance.LLTokenizer.json_slices())
        return table

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        self.prepare()
        llguidance = _library()
        from ridgeline.grammar.matcher import LLGrammar

        text = _grammar_text(llguidance, wanted, self.tokenizer)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        _, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, self._table, limits=limits)
        start: LLMatcher | None = None
        if not messages:
            start = llguidance.LLMatcher(self._table, text, log_level=0, limits=limits)
            messages = [start.get_error()] if start.is_error() else []
        if messages or start is None:
            kind = next(k for k in KINDS if getattr(wanted, k) is not None)
            raise InvalidParams(f"structured_outputs.{kind}: {_first_lines(messages[0])}")
        return LLGrammar(start, self.vocab_size)


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.grammar: Grammar | None = None
        self.error: str | None = None


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(index) for index in range(vocab_size)]
        special = {index for index in tokenizer.special_tokens.values() if index < vocab_size}
        self.special_token_ids = sorted(special | set(eos_token_ids))

    def __call__(self, text: str | bytes) -> list[int]:
        decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, add_special_tokens=False, parse_special=False)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidParams("structured_outputs: this installation lacks llguidance; pip install 'ridgeline[serve]'") from error
    return llguidance


def _grammar_text(llguidance: Any, wanted: StructuredOutputsParams, tokenizer: Tokenizer) -> str:
    """In llguidance's own form: {"grammars": [...]}."""
    form = _form(llguidance, wanted)
    if wanted.channel is not None:
        first = _harmony(tokenizer, wanted.channel, calls=wanted.calls)
        return json.dumps({"grammars": [{"lark_grammar": first}, {**form, "name": "form"}]})
    if wanted.after is None:
        return json.dumps({"grammars": [form]})
    rules: list[str] = []

    def part(name: str, before: str, text: str) -> str:
        """Symbols for `text` behind anything that matches `before`; the rules they need are added."""
        special = tokenizer.special_tokens.get(text)
        if special is None:
            rules.append(f"{name}[lazy]: /{before}{_escaped(text)}/")
            return name
        if before:
            rules.append(f"{name}: /{before}/")
        return f"{name if before else ''} <[{special}]>"

    lead = part("reasoning", "(?s:.*)", wanted.after) + r" /\n{0,2}/"
    if wanted.opening is not None:
        lead = f"({part('opening', '', wanted.opening)} {lead})?"
    first = "\n".join([f"start: {lead} @form", *rules])
    return json.dumps({"grammars": [{"lark_grammar": first}, {**form, "name": "form"}]})


def _harmony(tokenizer: Tokenizer, channel: str, *, calls: bool) -> str:
    """An answer in OpenAI's harmony format: messages of analysis, then one in `channel`, which has the form.

    The prompt has begun the first header ("<|start|>assistant"). A special token ends the last message, and with it the output.
    """
    ids = {}
    for name in ("channel", "message", "constrain", "start", "end"):
        text = f"<|{name}|>"
        if text not in tokenizer.special_tokens:
            raise InvalidParams(f"structured_outputs.channel: this model's tokenizer has no {text}, so its answers are not in "
                                "the harmony format")
        ids[name] = f"<[{tokenizer.special_tokens[text]}]>"
    rules = [
        f"start: {'to? ' if calls else ''}said* {'(last | call)' if calls else 'last'}",
        f"said: {ids['channel']} other {ids['message']} text {ids['end']} {ids['start']} role",
        f"last: {ids['channel']} own {ids['message']} @form",
        f"own: /{_escaped(channel)} */ kind?",
        "other: /analysis */",                          # what commentary says would be shown beside the form
        f"kind: {ids['constrain']} /[a-z]+ */",
        "text: /(?s:.*)/",
    ]
    if calls:
        rules += ["role: /assistant/ to?", "to: / to=[^ ]+ */",
                  f"call: {ids['channel']} /commentary *(to=[^ ]+ *)?[a-z]*/ kind? {ids['message']} text"]
    else:
        rules.append("role: /assistant/")
    return "\n".join(rules)


def _escaped(text: str) -> str:
    """A text within /.../."""
    return re.escape(text).replace("/", "\\/")


def _form(llguidance: Any, wanted: StructuredOutputsParams) -> dict[str, Any]:
    if wanted.json is not None or wanted.json_object:
        schema: Any = {"type": "object"} if wanted.json is None else wanted.json
        if isinstance(schema, bool):
            schema = {"anyOf": [schema]}                # options go into an object only
        space = {"whitespace_flexible": False} if wanted.disable_any_whitespace else {
            "whitespace_pattern": wanted.whitespace_pattern or WHITESPACE_PATTERN}
        return {"json_schema": {**schema, "x-guidance": space}}
    if wanted.regex is not None:
        form: dict[str, Any] = json.loads(llguidance.LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]
        return form
    if wanted.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)}
    assert wanted.grammar is not None, "one of five is given"
    return {"lark_grammar": _lark(wanted.grammar)}


def _lark(grammar: str) -> str:
    """Lark as it is; GBNF, llama.cpp's form, converted."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the converter raises plain exceptions for a grammar that is wrong
        raise InvalidParams(f"structured_outputs.grammar: not valid GBNF: {_first_lines(str(error))}") from error


def _first_lines(message: str) -> str:
    """The beginning of a message that may go on with pages of the library's state."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines[:4])
    return text if len(text) <= 300 else f"{text[:297]}..."
