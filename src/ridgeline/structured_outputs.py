"""What a request asks of the form of its output: a JSON schema, any JSON object, a regular expression, one of some texts, or
a grammar. Plain data, checked at once, without the library that enforces it.

Field names are vLLM's, so that requests move over unchanged.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from ridgeline.errors import InvalidParams

KINDS = ("json", "json_object", "regex", "choice", "grammar")

# What may stand at one place where JSON allows white space: a line end with an indent, or a few blanks. Without a bound, a
# model that prefers blanks writes them up to its limit.
WHITESPACE_PATTERN = r"\x0A[\x20\x09]{0,16}|[\x20\x09]{1,4}"

MAX_SCHEMA_DEPTH = 128

# Keywords of JSON Schema (2020-12) that the grammar enforces, by what their value is.
_SCHEMA = frozenset({"items", "additionalProperties"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_PLAIN = frozenset({
    "type", "enum", "const", "$ref", "required", "minItems", "maxItems", "minProperties", "maxProperties", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})
# Keywords that by the standard (or by the tools that write them) restrict nothing.
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
     "$comment",
    "contentEncoding", "contentMediaType", "discriminator",
})
SCHEMA_KEYWORDS = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output; exactly one of the first five is given. raises InvalidParams, which names the keyword and where.

    json: a JSON schema, as an object or as text; grammar: Lark (or GBNF) text; whitespace_pattern: regular expression of
    what may stand where JSON allows white space, at most once; disable_any_whitespace: compact JSON.
    after: the form holds only for what follows the first occurrence of this text (the end of the reasoning); with `opening`,
    only an output that begins with that text has such a part.
    channel: the output is written in OpenAI's harmony format, and the form holds for the message in this channel, which is the
    last; reasoning (channel analysis) may come first. calls: it may also end with a call of a function, which has no form.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    after: str | None = None
    opening: str | None = None
    channel: str | None = None
    calls: bool = False

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """From what a request carries. An unknown field is refused: it would change nothing, silently."""
        if isinstance(value, cls):
            return value
        names = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping):
            raise InvalidParams(f"structured_outputs: got {_show(value)}; allowed: an object with one of {', '.join(KINDS)}")
        unknown = [str(key) for key in value if key not in names]
        if unknown:
            raise InvalidParams(f"structured_outputs: unknown field {unknown[0]!r}; allowed: {', '.join(names)}")
        return cls(**value)

    def __post_init__(self) -> None:
        for field in ("regex", "grammar", "whitespace_pattern", "after", "opening", "channel"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value):
                self._reject(field, "a string that is not empty, or None")
        if self.json_object not in (None, True, False) or not isinstance(self.disable_any_whitespace, bool):
            self._reject("json_object" if isinstance(self.disable_any_whitespace, bool) else "disable_any_whitespace",
                         "True or False")
        object.__setattr__(self, "json_object", self.json_object or None)
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidParams(f"structured_outputs: got {' and '.join(given) or 'none'}; allowed: exactly one of "
                                f"{', '.join(KINDS)}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidParams("structured_outputs: got whitespace_pattern and disable_any_whitespace; allowed: one of them")
        if self.opening is not None and self.after is None:
            raise InvalidParams("structured_outputs: got opening without after; allowed: after, or both")
        if not isinstance(self.calls, bool):
            self._reject("calls", "True or False")
        if self.channel is None and self.calls:
            raise InvalidParams("structured_outputs: got calls without channel; allowed: channel, or both")
        if self.channel is not None and self.after is not None:
            raise InvalidParams("structured_outputs: got channel and after; allowed: one of them")
        if self.choice is not None:
            choices: Any = self.choice
            if not isinstance(choices, list | tuple) or not choices or not all(isinstance(c, str) and c for c in choices):
                self._reject("choice", "a list of strings, none empty")
            object.__setattr__(self, "choice", tuple(choices))
        if self.json is not None:
            schema = self.json
            if isinstance(schema, str):
                schema = _parsed(schema)
            check_schema(schema)
            object.__setattr__(self, "json", schema)
        try:
            json.dumps([getattr(self, f.name) for f in fields(self)], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidParams(f"structured_outputs.{given[0]}: not valid Unicode: lone surrogate "
                                f"U+{ord(error.object[error.start]):04X}") from error

    @property
    def key(self) -> str:
        """Equal for equal forms. The order of a schema's properties counts: it is that of the output."""
        return json.dumps([getattr(self, f.name) for f in fields(self)])

    def _reject(self, field: str, allowed: str) -> NoReturn:
        raise InvalidParams(f"structured_outputs.{field}: got {_show(getattr(self, field))}; allowed: {allowed}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"structured_outputs.json: not valid JSON: {error}") from error


def check_schema(schema: Any) -> None:
    """raises InvalidParams for a keyword that would not be enforced, with its place in the schema as a JSON pointer."""
    if isinstance(schema, Mapping):
        try:
            json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParams(f"structured_outputs.json: not JSON: {error}") from error
    _check(schema, "", 0)


def _check(schema: Any, where: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    place = where or "the top"
    if not isinstance(schema, Mapping):
        raise InvalidParams(f"structured_outputs.json: at {place}: got {_show(schema)}; allowed: a schema, which is an object, "
                            "true or false")
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidParams(f"structured_outputs.json: nested deeper than {MAX_SCHEMA_DEPTH} schemas")
    for keyword, value in schema.items():
        path = f"{where}/{keyword}"
        if keyword in _SCHEMA:
            _check(value, path, depth + 1)
        elif keyword in _SCHEMA_LISTS:
            if not isinstance(value, list):
                raise InvalidParams(f"structured_outputs.json: at {path}: got {_show(value)}; allowed: a list of schemas")
            for at, member in enumerate(value):
                _check(member, f"{path}/{at}", depth + 1)
        elif keyword in _SCHEMA_MAPS:
            if not isinstance(value, Mapping):
                raise InvalidParams(f"structured_outputs.json: at {path}: got {_show(value)}; allowed: an object of schemas")
            for name, member in value.items():
                _check(member, f"{path}/{name}", depth + 1)
        elif keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            raise InvalidParams(f"structured_outputs.json: at {path}: got {value}; allowed: a number (true and false"
            f" are the form "
                                "of draft 4)")
        elif not (keyword in _PLAIN or keyword in _ANNOTATIONS or _harmless(keyword)):
            raise InvalidParams(f"structured_outputs.json: keyword {keyword!r} at {place} is not supported; supported: "
                                f"{_listed(SCHEMA_KEYWORDS)}; without effect: {_listed(_ANNOTATIONS)}, x-...")


def _harmless(keyword: str) -> bool:
    """Extensions that say they are some, but the one that steers the grammar's compiler."""
    return keyword.startswith("x-") and keyword != "x-guidance"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
