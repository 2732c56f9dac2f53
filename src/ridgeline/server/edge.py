"""What happens to every HTTP request before and after its handler: id, key, size limit, access log, count."""
from __future__ import annotations

import hmac
import json
import re
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import IO, Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.errors import ConfigError
from ridgeline.server.errors import ApiError
from ridgeline.server.metrics import Metrics
from ridgeline.server.reply import dumps
from ridgeline.server.service import Context
from ridgeline.server.tracing import HEADERS

# What anybody may ask without a key: no prompt, no answer and no model is behind these.
FREE = ("/", "/health", "/ready", "/version", "/metrics")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class AccessLog:
    """One JSON object a line. raises ConfigError for a file that cannot be written."""

    def __init__(self, path: str | None):
        self._file: IO[str] | None = None
        if path == "-":
            self._file = sys.stdout
        elif path is not None:
            try:
                self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  (closed by `close`)
            except OSError as error:
                raise ConfigError(f"access_log is {path!r}, which cannot be written: {error.strerror}") from error

    def write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None and self._file is not sys.stdout:
            self._file.close()


class Edge:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], max_bytes: int, access_log: AccessLog, metrics: Metrics):
        self.app, self.max_bytes, self.access_log, self.metrics = app, max_bytes, access_log, metrics
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        trace = {name: headers[name.encode()].decode("latin-1") for name in HEADERS if name.encode() in headers}
        context = Context(given if _ID.fullmatch(given) else uuid.uuid4().hex, trace=trace)
        scope.setdefault("state", {})["context"] = context
        start, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", context.request_id.encode())]
            await send(message)

        try:
            refused = self._refuse(scope, headers)
            if refused is None:
                await self.app(scope, self._limited(receive), answer)
            else:
                await _send_error(answer, refused, scope["path"])
        finally:
            route = getattr(scope.get("route"), "path", "")
            self.metrics.http(scope["method"] if route else "", route, status)
            client = scope.get("client")
            self.access_log.write({
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "request_id": context.request_id,
                "client": client[0] if client else None, "method": scope["method"], "path": scope["path"], "status": status,
                "duration_s": round(time.monotonic() - start, 6), **context.log})

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        # A browser asks before it sends a key across origins.
        if self.keys and scope["path"] not in FREE and scope["method"] != "OPTIONS" and not self._has_key(headers):
            return ApiError(401, "a valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_bytes:
            return ApiError(413, self._too_large(), code="request_too_large")
        return None

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer.strip()] if scheme.lower() == b"bearer" else []
        given.append(headers.get(b"x-api-key", b""))
        return any([hmac.compare_digest(key, each) for key in self.keys for each in given])

    def _limited(self, receive: Receive) -> Receive:
        """A body without a length is counted as it comes."""
        seen = 0

        async def count() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return count

    def _too_large(self) -> str:
        return f"the request is too large; at most {self.max_bytes} bytes are taken"


async def _send_error(send: Send, error: ApiError, path: str) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status,
                "headers": [(b"content-type", b"application/json"), (b"connection", b"close"), *headers]})
    await send({"type": "http.response.body", "body": dumps(error.body(path))})
