"""OpenAI's batch format without HTTP: one line a request, through the handlers of the server."""
from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from ridgeline.errors import ConfigError, InvalidPrompt, RidgelineError
from ridgeline.server.app import ENDPOINTS
from ridgeline.server.errors import ApiError, api_error, validation_error
from ridgeline.server.reply import Stream
from ridgeline.server.service import Context, Service

# A prompt may wait for a seat while others run; more than this many wait in the file instead.
AHEAD = 2


@dataclass(frozen=True)
class Line:
    """One request of the input, as JSON; number: of its line, from 1."""

    number: int
    value: dict[str, Any]

    @property
    def custom_id(self) -> str:
        return str(self.value["custom_id"])


def read_lines(path: str) -> list[Line]:
    """All requests. raises InvalidPrompt naming the line that is no request, or whose custom_id is taken."""
    found: list[Line] = []
    numbers: dict[str, int] = {}
    for number, text in _texts(path):
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidPrompt(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str) or not value["custom_id"]:
            raise InvalidPrompt(f"{path}, line {number}: expected an object with custom_id, method, url and body")
        line = Line(number, value)
        if line.custom_id in numbers:
            raise InvalidPrompt(f"{path}, line {number}: custom_id {line.custom_id!r} is also that of line "
                                f"{numbers[line.custom_id]}")
        numbers[line.custom_id] = number
        found.append(line)
    return found


def answered(path: str) -> set[str]:
    """The custom_ids in an output file of an earlier run, {} where there is none. A last line that was cut is removed.

    raises ConfigError for a file that is no such output.
    """
    if not Path(path).exists():
        return set()
    ids: set[str] = set()
    end = 0
    with open(path, "rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                ids.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: no answer of an earlier run; give another output file") from error
            end += len(line)
        file.truncate(end)
    return ids


async def run_batch(service: Service, lines: list[Line], output: TextIO,
                    on_answer: Callable[[bool], None] = lambda good: None) -> int:
    """Answer all lines, as many at once as the engine has seats, each written when it has ended. Returns the errors."""
    room = asyncio.Semaphore(AHEAD * service.seats)
    failed = 0

    async def one(line: Line) -> None:
        nonlocal failed
        try:
            entry = await answer(service, line)
        finally:
            room.release()
        good = entry["error"] is None and entry["response"]["status_code"] == 200
        failed += not good
        output.write(json.dumps(entry) + "\n")
        output.flush()
        on_answer(good)

    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                await room.acquire()
                group.create_task(one(line))
    except ExceptionGroup as errors:                     # a full disk, an engine that has ended: one is enough to tell
        raise errors.exceptions[0] from errors
    return failed


async def answer(service: Service, line: Line) -> dict[str, Any]:
    """The output line for one request; what is wrong with it is in it. raises EngineError where no other can run either."""
    request_id = uuid.uuid4().hex
    try:
        status, body = 200, await _reply(service, line.value, Context(request_id))
    except (ApiError, RidgelineError, ValidationError) as error:
        if service.llm.ended is not None:
            raise service.llm.ended from error
        found = validation_error(error.errors()) if isinstance(error, ValidationError) else api_error(error)
        status, body = found.status, found.body(str(line.value.get("url")))
    return {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "error": None,
            "response": {"status_code": status, "request_id": request_id, "body": body}}


async def _reply(service: Service, value: dict[str, Any], context: Context) -> dict[str, Any]:
    url, body = value.get("url"), value.get("body")
    if value.get("method", "POST") != "POST" or url not in ENDPOINTS:
        raise ApiError(404, f"{value.get('method', 'POST')} {url!r} is no endpoint; known: POST {', '.join(ENDPOINTS)}",
                       param="url", code="unknown_endpoint")
    if not isinstance(body, dict):
        raise ApiError(400, f"body is {type(body).__name__}; expected an object", param="body", code="invalid_value")
    if body.get("stream"):
        raise ApiError(400, "stream: a batch has whole answers only", param="stream", code="invalid_value")
    schema, handler = ENDPOINTS[url]
    reply = await handler(service, schema.model_validate(body), context)
    assert not isinstance(reply, Stream), "only a request with `stream` gets one"
    return reply


def _texts(path: str) -> Iterator[tuple[int, str]]:
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"input file {path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"input file {path!r} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
                          f"{error.start}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line
