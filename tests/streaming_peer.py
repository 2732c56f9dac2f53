"""A server of its own that speaks the OpenAI streaming protocol at known times: what load is measured against in tests.

It runs in a thread, notes when it wrote what (time.perf_counter, one clock for all threads), and misbehaves on request.
"""
from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Behaviour:
    """Seconds and counts of an answer. slots: requests served at once; cached_ttft_s: for a prompt whose first 64
    characters came before; first_use_s: added to the first of each new number of running requests, as compilation is."""

    ttft_s: float = 0.02
    gap_s: float = 0.002
    first_chunk: int = 1                    # tokens in the first chunk, and in the others
    chunk: int = 1
    slots: int = 1000
    channel: str = "content"                # or reasoning_content, tool_calls
    role_frame_s: float | None = None       # a frame with a role alone, this long after the request
    usage: str = "end"                      # end, running (in each chunk), none
    finish: str = "length"
    stop_after: int | None = None           # tokens after which the text ends by itself
    cached_ttft_s: float | None = None
    first_use_s: float = 0.0
    status: int = 200
    break_after: int | None = None          # chunks after which the connection closes
    hang_after: int | None = None
    garbage_after: int | None = None
    error_after: int | None = None
    closes: bool = False                    # the connection ends right behind the stream, unannounced
    plain: bool = False                     # one JSON object instead of a stream
    metrics: bool = False
    fails: Callable[[int], bool] = lambda number: False     # which requests, by number, get 500


@dataclass
class Seen:
    body: Body
    path: str
    headers: dict[str, str]
    received: float
    written: list[float] = field(default_factory=list)      # of chunks with tokens
    hit: bool = False
    running: int = 0


class Peer:
    def __init__(self, behaviour: Behaviour):
        self.behaviour, self.seen = behaviour, list[Seen]()
        self.prefixes, self.sizes = set[str](), set[int]()
        self.hits = self.queries = self.running = 0
        self.url = ""

    async def start(self) -> asyncio.Server:
        self.slots = asyncio.Semaphore(self.behaviour.slots)
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *lines = head.decode().strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = request.split(" ")
                if method == "GET":
                    await self._page(path, writer)
                elif not await self._answer(path, headers, json.loads(data), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _page(self, path: str, writer: asyncio.StreamWriter) -> None:
        pages = {"/v1/models": json.dumps({"data": [{"id": "known-times"}, {"id": "other"}]}),
                 "/version": json.dumps({"version": "9.9"})}
        if self.behaviour.metrics:
            pages["/metrics"] = ("# TYPE some:prefix_cache_hits counter\n"
                                 f'some:prefix_cache_hits_total{{engine="0"}} {self.hits}\n'
                                 f'some:prefix_cache_queries_total{{engine="0"}} {self.queries}\n')
        await _whole(writer, 200 if path in pages else 404, pages.get(path, "nothing here"))

    async def _answer(self, path: str, headers: dict[str, str], body: Body, writer: asyncio.StreamWriter) -> bool:
        b = self.behaviour
        seen = Seen(body, path, headers, time.perf_counter())
        self.seen.append(seen)
        if path not in ("/v1/completions", "/v1/chat/completions"):
            await _whole(writer, 404, json.dumps({"detail": "Not Found"}))
            return True
        if b.status != 200 or b.fails(len(self.seen)):
            await _whole(writer, b.status if b.status != 200 else 500, json.dumps({"error": {"message": "no, thanks"}}))
            return True
        if b.plain:
            await _whole(writer, 200, json.dumps({"choices": [{"text": "all at once"}]}))
            return True
        async with self.slots:
            self.running += 1
            try:
                return await self._stream(path.startswith("/v1/chat"), seen, writer)
            finally:
                self.running -= 1

    async def _stream(self, chat: bool, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        b, body = self.behaviour, seen.body
        text = prompt_of(body)
        length = len(text.split()) if isinstance(text, str) else len(text)
        begin = str(text)[:64]
        seen.hit, seen.running = b.cached_ttft_s is not None and begin in self.prefixes, self.running
        self.prefixes.add(begin)
        self.queries += length
        self.hits += length * seen.hit
        wait = b.cached_ttft_s if seen.hit and b.cached_ttft_s is not None else b.ttft_s
        if self.running not in self.sizes:
            self.sizes.add(self.running)
            wait += b.first_use_s
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if b.role_frame_s is not None:
            await asyncio.sleep(b.role_frame_s)
            await _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(wait)
        total = min(body["max_tokens"], b.stop_after or body["max_tokens"])
        done = chunks = 0
        while done < total:
            for limit, act in ((b.break_after, "break"), (b.hang_after, "hang"), (b.garbage_after, "garbage"),
                               (b.error_after, "error")):
                if limit is not None and chunks >= limit:
                    return await self._misbehave(act, writer)
            tokens = min(b.first_chunk if not chunks else b.chunk, total - done)
            if chunks:
                await asyncio.sleep(b.gap_s)
            done, chunks = done + tokens, chunks + 1
            event: Body = {"choices": [_choice(chat, b.channel, "word " * tokens)]}
            if b.usage == "running":
                event["usage"] = {"prompt_tokens": length, "completion_tokens": done}
            seen.written.append(time.perf_counter())
            await _event(writer, event)
        finish = "stop" if b.stop_after is not None and total < body["max_tokens"] else b.finish
        last = _choice(chat, "content", "")
        await _event(writer, {"choices": [{**last, "finish_reason": finish}]})
        if b.usage != "none" and body.get("stream_options", {}).get("include_usage"):
            usage: Body = {"prompt_tokens": length, "completion_tokens": total}
            if b.cached_ttft_s is not None and not b.metrics:
                usage["prompt_tokens_details"] = {"cached_tokens": length if seen.hit else 0}
            await _event(writer, {"choices": [], "usage": usage})
        await _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not b.closes

    async def _misbehave(self, act: str, writer: asyncio.StreamWriter) -> bool:
        if act == "hang":
            await asyncio.sleep(3600)
        elif act == "garbage":
            await _event(writer, "{not json")
        elif act == "error":
            await _event(writer, {"error": {"message": "out of pages", "code": 500}})
        return False


def prompt_of(body: Body) -> Any:
    """Everything that the model would read: one text, or ids."""
    if "messages" in body:
        return " ".join(message["content"] for message in body["messages"])
    return body["prompt"]


def texts(cell: dict[str, Any]) -> list[str]:
    """What the badges of a measured load say."""
    return [badge["text"] for badge in cell["badges"]]


def _choice(chat: bool, channel: str, text: str) -> Body:
    if not chat:
        return {"text": text, "finish_reason": None}
    if channel == "tool_calls" and text:
        return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}, "finish_reason": None}
    return {"delta": {channel: text} if text else {}, "finish_reason": None}


async def _event(writer: asyncio.StreamWriter, event: Any) -> None:
    data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


async def _whole(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    data = text.encode()
    kind = "application/json" if text.startswith("{") else "text/plain"
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


@contextmanager
def serving(behaviour: Behaviour | None = None) -> Iterator[Peer]:
    """A peer that listens on a free port."""
    peer, ready, loop = Peer(behaviour or Behaviour()), threading.Event(), asyncio.new_event_loop()
    servers: list[asyncio.Server] = []

    async def start() -> None:
        servers.append(await peer.start())
        ready.set()

    def body() -> None:
        asyncio.set_event_loop(loop)
        loop.create_task(start())
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield peer
    finally:
        loop.call_soon_threadsafe(servers[0].close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
