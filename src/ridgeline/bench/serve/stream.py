"""The streaming protocol: server-sent events into chunks of an answer. The caller takes the stamps, before any of this."""
from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ridgeline.bench.serve.record import CHUNKS, USAGE, Record, share_out

DONE = b"[DONE]"
TEXTS = ("content", "reasoning_content", "reasoning", "refusal")       # channels of a chat delta that hold text


class BrokenAnswer(Exception):
    """kind: what it is counted as; the text is the line that is shown."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class Events:
    """Splits bytes, however they are cut, into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


@dataclass(slots=True)
class Answer:
    """An answer as it arrives. Only a delta that is not empty is a chunk: a frame with a role or a usage alone is none."""

    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)          # characters of each chunk
    running: list[int | None] = field(default_factory=list)  # tokens so far when each chunk came, if the server says so
    texts: list[str] = field(default_factory=list)          # of the channel that goes into a history
    usage: dict[str, int | None] = field(default_factory=dict)      # prompt_tokens, completion_tokens, cached_tokens
    ids: int = 0
    finish_reason: str | None = None
    finished: float | None = None
    done: bool = False

    def take(self, data: bytes, now: float) -> None:
        """One event. raises BrokenAnswer for what is no event of this protocol, or an error that the server reports."""
        if data == DONE:
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise BrokenAnswer("bad event", f"an event is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict) or event.get("object") == "error" or event.get("error"):
            raise BrokenAnswer("error event", f"the server reports {message_of(event)}")
        try:
            if event.get("usage"):
                self.usage = _usage(event["usage"])
            for choice in event.get("choices") or ():
                self._choice(choice, now)
        except (AttributeError, TypeError, KeyError):
            raise BrokenAnswer("bad event", f"an event has another form than the protocol's: {data[:200]!r}") from None

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        """raises AttributeError or TypeError for a choice that is none."""
        delta = choice.get("delta")
        if delta is not None:
            text = "" + (delta.get("content") or "")
            size = sum(len(delta.get(channel) or "") for channel in TEXTS) + _tool_size(delta)
        else:
            text = "" + (choice.get("text") or "")
            size = len(text)
        # Tokens whose bytes the server still holds back come with an empty text; they belong to the next chunk.
        self.ids += len(choice.get("token_ids") or ())
        if size:
            self.times.append(now)
            self.sizes.append(size)
            self.running.append(self.usage.get("completion_tokens") or self.ids or None)
            self.texts.append(text)
        if choice.get("finish_reason"):
            self.finish_reason, self.finished = choice["finish_reason"], now

    def settle(self, record: Record) -> None:
        """Write chunks and counts into a record. raises BrokenAnswer if the stream ended too early or held no token."""
        record.times, record.finish_reason = self.times, self.finish_reason
        record.tokens = [1] * len(self.times)
        record.prompt_tokens, record.cached_tokens = self.usage.get("prompt_tokens"), self.usage.get("cached_tokens")
        total = self.usage.get("completion_tokens") or self.ids or None
        record.counted = CHUNKS if total is None else USAGE
        if not self.done and self.finish_reason is None:
            raise BrokenAnswer("broken stream", f"the stream ended after {len(self.times)} chunks without a finish reason")
        if total is None:
            if not self.times:
                raise BrokenAnswer("no token", "the answer holds no token")
            return
        if not self.times:
            if self.finished is None:
                raise BrokenAnswer("no token", "the answer holds no token")
            record.times, record.tokens = [self.finished], [total]      # only tokens without a text, as the end of the text
            return
        self._spread(record, total)

    def _spread(self, record: Record, total: int) -> None:
        """Tokens of each chunk: as the server counted them on the way, else one each, else by the length of the text."""
        known = [count for count in self.running if count is not None]
        counted = len(known) == len(self.times) and known == sorted(set(known)) and known[-1] <= total
        last = known[-1] if counted else len(self.times)
        # The token that ends a text has none itself: it came when the finish reason did.
        ends = self.finished is not None and self.finish_reason == "stop" and (total > last if counted else total == last + 1)
        if counted:
            record.tokens = [b - a for a, b in zip([0, *known], known)]
            if not ends:
                record.tokens[-1] += total - last
        elif not ends:
            record.spread = total != len(self.times)
            record.tokens = share_out(total, self.sizes)
        if ends:
            assert self.finished is not None
            record.times, record.tokens = [*self.times, self.finished], [*record.tokens, total - last]


def _usage(found: dict[str, Any]) -> dict[str, int | None]:
    """raises AttributeError or TypeError for counts that are none."""
    counts = {name: found.get(name) for name in ("prompt_tokens", "completion_tokens")}
    counts["cached_tokens"] = (found.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {name: None if count is None else operator.index(count) for name, count in counts.items()}


def _tool_size(delta: dict[str, Any]) -> int:
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    calls.append(delta.get("function_call") or {})
    return sum(len(call.get("name") or "") + len(call.get("arguments") or "") for call in calls)


def message_of(body: Any) -> str:
    """The message in an error of any server: {"error": {"message"}}, {"message"}, {"detail"}, or what there is."""
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        return repr(error)[:300] if not isinstance(error, str) else error[:300]
    return repr(body)[:300]
