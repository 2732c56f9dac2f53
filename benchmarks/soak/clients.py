"""Clients, good and bad. What they meet goes into a tally; they raise nothing."""
from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PROMPTS = [f"{i} ships lay in the harbour when the light 🙂 went out, and" for i in range(50)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
NONSENSE: tuple[dict[str, Any], ...] = ({"prompt": [-1]}, {"temperature": -1}, {"n": 0}, {"prompt": 5}, {"stop": [""] * 99},
                                        {"max_tokens": "many"}, {"logprobs": 10**9}, {"response_format": {"type": "poem"}})
TIMEOUT_S = 120.0                  # an answer that takes longer is lost


@dataclass
class Tally:
    """counts: what ended as it should; faults: what did not, the first of each kind in full. told: SIGTERM was sent then."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    told: float | None = None

    def fault(self, kind: str, example: str) -> None:
        self.faults[kind] += 1
        self.examples.setdefault(kind, example[:500])


@dataclass
class Crowd:
    """expected: the answer to each of PROMPTS; context: of the model, in tokens."""

    http: aiohttp.ClientSession
    url: str
    expected: Sequence[str]
    context: int
    tally: Tally

    async def run(self, clients: int, end: asyncio.Event, seed: int) -> None:
        await asyncio.gather(*(self._client(random.Random(seed * 10_000 + number), end) for number in range(clients)))

    async def _client(self, rng: random.Random, end: asyncio.Event) -> None:
        while not end.is_set():
            sent = time.monotonic()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._one(rng)
            except TimeoutError:
                self.tally.fault("lost", f"no answer within {TIMEOUT_S:.0f} s")
            except (aiohttp.ClientError, ConnectionError) as error:
                if self._told_before(sent):
                    self.tally.counts["refused while ending"] += 1
                    return
                self.tally.fault("lost", f"{type(error).__name__}: {error}")

    def _told_before(self, sent: float) -> bool:
        return self.tally.told is not None and sent >= self.tally.told

    async def _one(self, rng: random.Random) -> None:
        kind, index = rng.random(), rng.randrange(len(PROMPTS))
        body = {"prompt": PROMPTS[index], **GREEDY}
        if kind < 0.4:
            await self._whole(body, index)
        elif kind < 0.8:
            await self._stream(body, index)
        elif kind < 0.9:
            await self._leave(body, rng)
        elif kind < 0.97:
            await self._nonsense({**body, **rng.choice(NONSENSE)})
        elif kind < 0.98:
            await self._nonsense({**body, "prompt": "sea " * (20 * self.context)})
        else:
            await self._giant(rng)

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        sent = time.monotonic()
        async with self.http.post(f"{self.url}/v1/completions", json=body) as answer:
            data = await answer.read()
        if answer.status == 503 and self._told_before(sent):
            self.tally.counts["refused while ending"] += 1
        return answer.status, data

    def _judge(self, index: int, status: int, text: str | None, data: bytes) -> None:
        if status == 503 and self.tally.told is not None:
            return
        if status != 200 or text is None:
            self.tally.fault("failed", f"status {status}: {data[-300:]!r}")
        elif text != self.expected[index]:
            self.tally.fault("wrong", f"{text!r} instead of {self.expected[index]!r}")
        else:
            self.tally.counts["right"] += 1

    async def _whole(self, body: dict[str, Any], index: int) -> None:
        status, data = await self._post(body)
        self._judge(index, status, json.loads(data)["choices"][0]["text"] if status == 200 else None, data)

    async def _stream(self, body: dict[str, Any], index: int) -> None:
        status, data = await self._post({**body, "stream": True})
        frames = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
        text = None
        if status == 200 and frames[-1] == b"[DONE]" and b'"error"' not in data:
            text = "".join(json.loads(frame)["choices"][0]["text"] for frame in frames[:-1])
        self._judge(index, status, text, data)

    async def _leave(self, body: dict[str, Any], rng: random.Random) -> None:
        """Goes after a moment, whatever has come by then."""
        try:
            async with asyncio.timeout(rng.choice((0.001, 0.05, 0.5, 2.0)) * rng.random()):
                await self._post({**body, "max_tokens": 200, "stream": rng.random() < 0.5})
        except TimeoutError:
            self.tally.counts["gone"] += 1

    async def _nonsense(self, body: dict[str, Any]) -> None:
        status, data = await self._post(body)
        if status == 400 and b'"error"' in data:
            self.tally.counts["told of nonsense"] += 1
        elif status != 503 or self.tally.told is None:
            self.tally.fault("nonsense", f"status {status} for {str(body)[:200]}: {data[:200]!r}")

    async def _giant(self, rng: random.Random) -> None:
        """A prompt of ids that nobody sent before."""
        length = self.context * 3 // 4
        status, data = await self._post({**GREEDY, "prompt": [rng.randrange(10, 300) for _ in range(length)], "max_tokens": 2})
        if status == 200 and json.loads(data)["usage"]["prompt_tokens"] == length:
            self.tally.counts["giant"] += 1
        elif status != 503 or self.tally.told is None:
            self.tally.fault("failed", f"status {status} for a prompt of {length} tokens: {data[:300]!r}")
