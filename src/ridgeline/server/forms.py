"""The fields of a request, of any family, that ask for the form of its output, as StructuredOutputsParams."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import InvalidParams
from ridgeline.server.errors import ApiError
from ridgeline.structured_outputs import StructuredOutputsParams

_FORMATS = ("text", "json_object", "json_schema")
# vLLM's older names.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def asked_form(request: Any) -> tuple[str, StructuredOutputsParams] | None:
    """(the field that asks, the form); None where none does. raises ApiError for a wrong form, or for two."""
    asked: list[tuple[str, dict[str, Any]]] = []
    given = getattr(request, "structured_outputs", None)
    if given:
        asked.append(("structured_outputs", given))
    space = getattr(request, "guided_whitespace_pattern", None)
    for name, kind in _GUIDED.items():
        value = getattr(request, name, None)
        if value is not None:
            asked.append((name, {kind: value, "whitespace_pattern": space}))
    for name, value in (("response_format", getattr(request, "response_format", None)),
                        ("text", _within(request, "text")), ("output_config", _within(request, "output_config"))):
        found = _format(name, value)
        if found is not None:
            asked.append((name, found))
    if len(asked) > 1:
        names = [name for name, _ in asked]
        raise ApiError(400, f"{names[1]}: got it beside {names[0]}; allowed: one of them", param=names[1], code="invalid_value")
    return (asked[0][0], checked_form(*asked[0])) if asked else None


def checked_form(name: str, fields: Any) -> StructuredOutputsParams:
    """raises ApiError that names the request's own field."""
    try:
        return StructuredOutputsParams.of(fields)
    except InvalidParams as error:
        raise ApiError(400, str(error).replace("structured_outputs", name, 1), param=name, code="invalid_value") from error


def _within(request: Any, name: str) -> Any:
    """The format within the objects of /v1/responses and /v1/messages."""
    value = getattr(request, name, None)
    return value.get("format") if isinstance(value, Mapping) else value


def _format(name: str, value: Any) -> dict[str, Any] | None:
    """OpenAI's response_format, whose schema lies in an object of its own or, in newer interfaces, beside the type."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or kind not in _FORMATS:
        raise ApiError(400, f"{name}.type: got {kind!r}; allowed: {', '.join(_FORMATS)}", param=name, code="invalid_value")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if schema is None:
        raise ApiError(400, f"{name}: type 'json_schema' comes without a schema; allowed: json_schema.schema, a JSON schema",
                       param=name, code="invalid_value")
    return {"json": schema}
