"""AsyncLLM: concurrent callers, early leaving, faults and closing. No caller ever waits for ever."""
from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ridgeline import LLM, AsyncLLM, SamplingParams
from ridgeline.errors import EngineError, InvalidParams, InvalidPrompt
from tiny_checkpoint import Script, write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)
# A step takes 0.1 ms: not over before it is left.
ENDLESS = SamplingParams(temperature=0.0, max_tokens=16000, ignore_eos=True)


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=16384), threads=1, max_num_seqs=8)


def run(llm: LLM, body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            await body(engine)

    asyncio.run(asyncio.wait_for(main(), 60))


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> str:
    text = ""
    async for output in engine.generate(prompt, params, **options):
        text += output.outputs[0].delta
        assert output.outputs[0].text == text
    assert output.finished and output.metrics.completion_tokens == len(output.outputs[0].token_ids)
    return text


async def idle(llm: LLM) -> None:
    for _ in range(1000):
        if not llm.engine.scheduler.running and not llm.engine.scheduler.waiting:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("a request goes on that nobody reads")


def test_many_callers_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = [f"{i} the sea 🙂" for i in range(20)]
    expected = [o.outputs[0].text for o in llm.generate(prompts, GREEDY)]

    async def body(engine: AsyncLLM) -> None:
        assert await asyncio.gather(*(collect(engine, p) for p in prompts)) == expected

    run(llm, body)


def test_the_deltas_of_a_slow_reader_add_up(llm: LLM) -> None:
    expected = llm.generate("The sea", LONG)[0].outputs[0].text

    async def body(engine: AsyncLLM) -> None:
        text, count = "", 0
        async for output in engine.generate("The sea", LONG):
            text, count = text + output.outputs[0].delta, count + 1
            before = list(output.outputs[0].token_ids)
            time.sleep(0.02)                               # the event loop stands still, the engine does not
            assert output.outputs[0].token_ids == before   # a snapshot stays what it was
        assert text == expected and count < 240

    run(llm, body)


def test_leaving_early_aborts(llm: LLM) -> None:
    async def body(engine: AsyncLLM) -> None:
        async for _ in engine.generate("The sea", ENDLESS):
            break
        await idle(llm)
        task = asyncio.create_task(collect(engine, "The sea", ENDLESS))
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        assert llm.stats.steps and await collect(engine, "sea")

    before = llm.stats.generation_tokens
    run(llm, body)
    assert llm.stats.generation_tokens - before < 2 * 240


def test_callers_come_and_go_at_random(llm: LLM) -> None:
    """Those who stay get the whole text, whoever leaves beside them and however."""
    expected = [o.outputs[0].text for o in llm.generate([f"{i} sea" for i in range(40)], GREEDY)]
    draw = random.Random(1)

    async def caller(engine: AsyncLLM, i: int, outputs: int | None) -> str | None:
        await asyncio.sleep(draw.random() * 0.2)
        if outputs is None:
            return await collect(engine, f"{i} sea")
        stream = engine.generate(f"{i} sea", ENDLESS)
        for _ in range(outputs):
            await anext(stream)
        await stream.aclose()
        return None

    async def body(engine: AsyncLLM) -> None:
        leave = [draw.choice([None, 0, 1, 3]) for _ in range(40)]
        found = await asyncio.gather(*(caller(engine, i, n) for i, n in enumerate(leave)))
        assert found == [text if n is None else None for text, n in zip(expected, leave)]
        await idle(llm)

    run(llm, body)


def test_one_bad_request_disturbs_no_other(llm: LLM) -> None:
    expected = llm.generate("The sea", GREEDY)[0].outputs[0].text

    async def body(engine: AsyncLLM) -> None:
        jobs = [collect(engine, "The sea"), collect(engine, ""), collect(engine, [999]), collect(engine, object()),
                collect(engine, "x", SamplingParams(logprobs=99)), collect(engine, "The sea")]
        good, *bad, other = await asyncio.gather(*jobs, return_exceptions=True)
        assert good == other == expected
        assert [type(b) for b in bad] == [InvalidPrompt, InvalidPrompt, InvalidPrompt, InvalidParams]

    run(llm, body)


def test_a_fault_in_a_strategy_is_that_request_s_error(llm: LLM) -> None:
    llm.engine.strategies["short"] = Script([5, 6], [1])         # runs out of tokens before the request is done

    async def body(engine: AsyncLLM) -> None:
        good, bad = await asyncio.gather(collect(engine, "The sea"), collect(engine, "The sea", LONG, strategy="short"),
                                         return_exceptions=True)
        assert isinstance(good, str) and isinstance(bad, EngineError)

    run(llm, body)


def test_a_fault_in_the_engine_s_step_reaches_every_caller_and_the_next_are_served(
        llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, faults = llm.engine.step, [ZeroDivisionError("a fault of our own")]

    def failing() -> Any:
        if faults and len(llm.engine.scheduler.running) == 3:
            raise faults.pop()
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)

    async def body(engine: AsyncLLM) -> None:
        found = await asyncio.gather(*(collect(engine, "The sea", LONG) for _ in range(3)), return_exceptions=True)
        assert [type(f) for f in found] == [EngineError] * 3 and "a fault of our own" in str(found[0])
        assert isinstance(found[0], EngineError) and isinstance(found[0].__cause__, ZeroDivisionError)
        await idle(llm)
        assert await collect(engine, "The sea")

    run(llm, body)
    assert not faults


def test_an_engine_that_cannot_even_abort_ends_and_says_so(folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = LLM(str(folder), threads=1)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("beyond repair")

    monkeypatch.setattr(broken.engine, "step", fail)
    monkeypatch.setattr(broken.engine, "abort", fail)

    async def body(engine: AsyncLLM) -> None:
        found = await asyncio.gather(*(collect(engine, "The sea") for _ in range(3)), return_exceptions=True)
        assert [type(f) for f in found] == [EngineError] * 3
        with pytest.raises(EngineError, match="beyond repair"):
            await collect(engine, "The sea")

    run(broken, body)


def test_closing_ends_what_runs(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncLLM(llm)
        tasks = [asyncio.create_task(collect(engine, "The sea", ENDLESS)) for _ in range(12)]
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0.001)
        await asyncio.gather(engine.close(), engine.close())
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, EngineError) and "closed" in str(found)
        with pytest.raises(EngineError, match="closed"):
            await collect(engine, "The sea")
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert not llm.engine.scheduler.running


def test_a_program_that_ends_without_closing_ends_well(folder: object) -> None:
    program = """if True:
        import asyncio, sys
        from ridgeline import AsyncLLM, SamplingParams
        llm = AsyncLLM(sys.argv[1], threads=1)
        async def read():
            async for output in llm.generate("The sea", SamplingParams(max_tokens=240, ignore_eos=True)):
                pass
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(read()) for _ in range(8)]
        loop.run_until_complete(asyncio.sleep(0.1))
        print(len(llm.llm.engine.scheduler.running))
    """
    ran = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (ran.returncode, ran.stdout) == (0, "8\n"), ran.stderr


def test_an_event_loop_that_dies_takes_its_requests_along(llm: LLM) -> None:
    engine = AsyncLLM(llm)
    loop = asyncio.new_event_loop()
    stream = engine.generate("The sea", ENDLESS)
    loop.run_until_complete(stream.__anext__())
    loop.close()                                           # nobody closes the stream

    async def main() -> None:
        await idle(llm)
        assert await collect(engine, "The sea")
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_abort_by_id_and_chat(llm: LLM) -> None:
    async def body(engine: AsyncLLM) -> None:
        task = asyncio.create_task(collect(engine, "The sea", ENDLESS, request_id="mine"))
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0.001)
        with pytest.raises(InvalidParams, match="in use"):
            await collect(engine, "x", request_id="mine")
        await engine.abort("mine")
        await engine.abort("nobody's")
        with pytest.raises(EngineError, match="'mine' was aborted"):
            await task
        await idle(llm)
        messages = [{"role": "user", "content": "sea"}]
        outputs = [output async for output in engine.chat(messages, GREEDY)]
        assert outputs[-1].outputs[0].text == expected
        with pytest.raises(InvalidPrompt, match="role"):
            engine.chat([{"content": "sea"}])

    expected = llm.chat([{"role": "user", "content": "sea"}], GREEDY)[0].outputs[0].text
    run(llm, body)
