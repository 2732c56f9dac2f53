"""Many clients at once, some of which go, ask nonsense or send giant prompts: no answer is lost or mixed up."""
from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline import LLM, SamplingParams
from server_kit import Running, events, until

PROMPTS = [f"{i} the sea 🙂" for i in range(50)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.mark.parametrize("clients, seconds", [(40, 4), pytest.param(200, 120, marks=pytest.mark.slow)])
def test_answers_stay_right_among_clients_that_misbehave(folder: Path, clients: int, seconds: float) -> None:
    alone = LLM(folder, threads=1)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = [output.outputs[0].text for output in alone.generate(PROMPTS, params)]
    done = {"right": 0, "gone": 0, "refused": 0}

    async def client(http: httpx.AsyncClient, seed: int, end: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            index = rng.randrange(len(PROMPTS))
            body = {"prompt": PROMPTS[index], **GREEDY}
            kind = rng.random()
            if kind < 0.35:
                answer = await http.post("/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == expected[index]
                done["right"] += 1
            elif kind < 0.7:
                answer = await http.post("/v1/completions", json={**body, "stream": True})
                assert "".join(c["choices"][0]["text"] for c in events(answer)) == expected[index]
                done["right"] += 1
            elif kind < 0.85:
                try:
                    await http.post("/v1/completions", json={**body, "max_tokens": 200, "stream": rng.random() < 0.5},
                                    timeout=rng.uniform(0.001, 0.2))
                except httpx.TimeoutException:
                    done["gone"] += 1
            else:
                odd = rng.choice([{"prompt": "sea " * 20_000}, {"prompt": [-1]}, {"temperature": -1}, {"n": 0}])
                assert (await http.post("/v1/completions", json={**body, **odd})).status_code == 400
                done["refused"] += 1

    async def main(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            end = time.monotonic() + seconds
            await asyncio.gather(*(client(http, seed, end) for seed in range(clients)))

    llm = LLM(folder, threads=1, max_num_seqs=16)
    with Running(llm, model="tiny") as server:
        asyncio.run(main(server.url))
        server.wait_idle()
        stats = llm.engine.store.stats()
        until(lambda: not llm.frontend.has_work)
        assert llm.engine.stats.running == llm.engine.stats.waiting == 0 and stats.usage == 0
    assert min(done.values()) > 0 and done["right"] >= clients, done
