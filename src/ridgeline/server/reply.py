"""Answers over HTTP: JSON, server-sent events, and what happens when the client goes before the end."""
from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.server.errors import ApiError, api_error
from ridgeline.server.service import Answers

T = TypeVar("T")
log = logging.getLogger("ridgeline.server")
CLIENT_GONE = 499                  # nginx's number; nobody reads it but the access log


def dumps(value: Any) -> bytes:
    """ASCII, so that nothing in a text can break a line or an encoding. A number that JSON lacks, echoed, is null."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), separators=(",", ":"))
    return text.encode()


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class Stream:
    """A handler's streamed answer: frames to send, and the answers they come from."""

    def __init__(self, frames: AsyncIterator[bytes], answers: Answers):
        self.frames, self.answers = frames, answers


Reply = dict[str, Any] | Stream


def event(data: Any) -> bytes:
    return b"data: " + dumps(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """The event's name is its `type`."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends frames as they come; ends the answers within a step of the engine when the client goes."""

    def __init__(self, stream: Stream, path: str):
        self.stream, self.path, self.background = stream, path, None
        self.status_code = 200
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache",
                           "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            scope["state"]["context"].log["client_gone"] = True
        finally:
            self.stream.answers.close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for frame in self.stream.frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:  # the status is sent; what is left is to say it in the stream
            if isinstance(error, OSError):
                raise
            found = api_error(error)
            if found.status >= 500:
                log.error("a stream failed: %s", found.message, exc_info=error)
            await send({"type": "http.response.body", "body": self._error(found), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error(self, error: ApiError) -> bytes:
        if self.path.startswith("/v1/messages"):
            return named_event(error.anthropic)
        if self.path.startswith("/v1/responses"):
            return named_event({"type": "error", "code": error.code, "message": error.message, "param": error.param,
                                "sequence_number": 0})
        return event(error.openai) + DONE


class ClientGone(Exception):
    """The client closed its connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. The request's body must have been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watcher):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(request: Request, reply: Awaitable[Reply]) -> Response:
    """Run a handler for a client that may go at any time."""
    async def work() -> Reply:
        return await reply

    try:
        found = await unless_gone(request.receive, work())
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    return EventStream(found, request.url.path) if isinstance(found, Stream) else Json(found)
