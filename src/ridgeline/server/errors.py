"""From exceptions to the error bodies of the two families of interfaces."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from ridgeline.errors import ConfigError, EngineError, InvalidParams, OutOfMemory, PromptTooLong, RequestError

RETRY_AFTER_S = 1
_FIELD = re.compile(r"([a-z_]+)(?:[.\[][^ :]*)?: ")

_ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
                    529: "overloaded_error"}
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


class ApiError(Exception):
    """An answer that is an error. param: the field that is wrong; code: a word for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    @property
    def openai(self) -> dict[str, Any]:
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body(self, path: str) -> dict[str, Any]:
        return self.anthropic if path.startswith("/v1/messages") else self.openai


def api_error(error: Exception) -> ApiError:
    """What a client is told about an exception: its own mistakes in full, the engine's faults by their message."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, PromptTooLong):
        return ApiError(400, message, param="prompt", code="context_length_exceeded")
    if isinstance(error, (RequestError, ConfigError)):
        field = _FIELD.match(message) if isinstance(error, InvalidParams) else None
        return ApiError(400, message, param=field and field[1], code="invalid_value")
    if isinstance(error, OutOfMemory):
        return ApiError(400, message, code="out_of_memory")
    if isinstance(error, EngineError):
        return ApiError(500, message, code="engine_error")
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json")
    name = ".".join(where)
    got = "" if first["type"] == "missing" else f"; got {_short(first.get('input'))}"
    return ApiError(400, f"{name or 'the body'}: {first['msg']}{got}", param=name or None, code="invalid_value")


def http_error(status: int, detail: Any) -> ApiError:
    """What the framework refuses before a handler sees it."""
    phrase = HTTPStatus(status).phrase
    return ApiError(status, phrase if detail is None else str(detail), code=phrase.lower().replace(" ", "_"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
