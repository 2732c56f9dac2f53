"""One connection pool to an OpenAI-compatible server, and one request on it: bytes in, stamps out.

aiohttp, for its HTTP parser in C: with 16 streams a chunk costs 50 us of a core, with httpx 123, and the client often shares
its machine with the server.
"""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgeline.bench.serve.record import Record
from ridgeline.bench.serve.stream import Answer, BrokenAnswer, Events, message_of
from ridgeline.bench.serve.workloads import Turn
from ridgeline.errors import ConfigError, PeerError

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 10.0          # for a connection, or for the pages beside the measured ones
History = list[dict[str, str]]


@dataclass(frozen=True)
class Target:
    """Where requests go and what is in each of them besides the prompt."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    api_key: str | None = None
    timeout_s: float = 3600.0
    include_usage: bool = True
    body: dict[str, Any] = field(default_factory=dict)       # temperature, ignore_eos, extras

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url is {self.base_url!r}; it must begin with http:// or https://")
        if not self.endpoint.endswith("/completions"):
            raise ConfigError(f"--endpoint is {self.endpoint!r}; it must end in /chat/completions or /completions")

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/") + "/" + path.lstrip("/")

    def request(self, turn: Turn, history: History) -> dict[str, Any]:
        """The body. history: messages so far; a completion gets them as one text."""
        found: dict[str, Any] = {"model": self.model, "max_tokens": turn.output_len, "stream": True, **self.body}
        if self.include_usage:
            found["stream_options"] = {"include_usage": True, **found.get("stream_options", {})}
        if self.chat:
            found["messages"] = [*history, {"role": "user", "content": turn.text}]
        elif turn.ids:
            found["prompt"] = list(turn.ids)
        else:
            found["prompt"] = " ".join([*(m["content"] for m in history), turn.text])
        return found


@asynccontextmanager
async def session(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    """raises ConfigError if aiohttp is missing."""
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError("`bench serve` needs aiohttp: pip install 'ridgeline[bench]'") from error
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    # No limit on connections: the load decides how many there are. Idle ones are kept, so that each is opened once.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    traces = aiohttp.TraceConfig()
    traces.on_connection_reuseconn.append(_reused)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20,
                                     trace_configs=[traces]) as found:
        yield found


@dataclass
class _Attempt:
    reused: bool = False


async def _reused(_: Any, context: Any, __: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


async def _send(client: aiohttp.ClientSession, target: Target, body: bytes) -> aiohttp.ClientResponse:
    """The answer's head. A kept connection that the server closed just before it was used again is no failure of the
    request, which is sent once more (llama-server closes a stream's connection right behind its end)."""
    import aiohttp

    while True:
        attempt = _Attempt()
        try:
            return await client.post(target.url(target.endpoint), data=body, headers={"Content-Type": "application/json"},
                                     trace_request_ctx=attempt)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            if not attempt.reused:
                raise


async def ask(client: aiohttp.ClientSession, target: Target, turn: Turn, history: History, record: Record,
              origin: float) -> str:
    """Send one request and fill its record; returns the answer's text. What goes wrong stands in the record.

    origin: time.perf_counter() at which the record's clock is zero.
    """
    import aiohttp

    body = json.dumps(target.request(turn, history)).encode()
    answer = Answer()
    try:
        async with asyncio.timeout(target.timeout_s):
            record.sent = time.perf_counter() - origin
            async with await _send(client, target, body) as response:
                await _read(response, answer, origin)
        answer.settle(record)
    except BrokenAnswer as error:
        _fail(record, answer, error.kind, str(error))
    except TimeoutError:
        _fail(record, answer, "timeout", f"no whole answer within {target.timeout_s:g} s")
    except aiohttp.ClientConnectorError as error:
        _fail(record, answer, "no connection", f"no connection to {target.base_url}: {error.os_error.strerror or error}")
    except (aiohttp.ClientError, ConnectionError) as error:
        _fail(record, answer, "broken stream",
              f"the connection broke after {len(answer.times)} chunks: {type(error).__name__}: {error}")
    finally:
        record.ended = time.perf_counter() - origin
    return "".join(answer.texts)


async def _read(response: aiohttp.ClientResponse, answer: Answer, origin: float) -> None:
    if response.status != 200:
        raise BrokenAnswer(f"HTTP {response.status}", f"HTTP {response.status}: {_message(await response.read())}")
    if response.content_type != "text/event-stream":
        raise BrokenAnswer("no stream", f"the answer is {response.content_type}, no stream of events: "
                                        f"{_message(await response.read())}")
    events = Events()
    async for data in response.content.iter_any():
        now = time.perf_counter() - origin            # before any byte is looked at
        for event in events.feed(data):
            answer.take(event, now)


def _message(data: bytes) -> str:
    try:
        return message_of(json.loads(data))
    except ValueError:
        return repr(data[:120].decode("utf-8", "replace"))


def _fail(record: Record, answer: Answer, kind: str, message: str) -> None:
    """An answer that failed keeps the chunks that came, for the picture of the run; no latency is taken from it."""
    record.times, record.tokens = list(answer.times), [1] * len(answer.times)
    record.error_kind, record.error = kind, message


async def get(client: aiohttp.ClientSession, target: Target, path: str) -> bytes | None:
    """A page beside the measured ones; None if the server has none. raises PeerError if no server answers."""
    import aiohttp

    try:
        async with asyncio.timeout(CONNECT_S), client.get(target.url(path)) as response:
            return await response.read() if response.status == 200 else None
    except aiohttp.ClientConnectorError as error:
        raise PeerError(f"no server answers at {target.base_url}: {error.os_error.strerror or error}") from error
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"--base-url is {target.base_url!r}; it is no valid address") from error
    except TimeoutError as error:
        raise PeerError(f"{target.url(path)} does not answer within {CONNECT_S:g} s") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise PeerError(f"{target.url(path)} answers with no HTTP: {error}") from error


async def first_model(client: aiohttp.ClientSession, target: Target) -> str:
    """The first name of /v1/models. raises PeerError."""
    page = await get(client, target, "/v1/models")
    try:
        return str(json.loads(page or b"")["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise PeerError(f"{target.url('/v1/models')} lists no model; name one with --model"
                        + (" (an API key may be needed: --api-key)" if target.api_key is None else "")) from None
