"""A snapshot of a stream costs the same however long the answer is."""
from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.types import Beginning, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tiny_checkpoint import Script


def grown(count: int) -> RequestOutput:
    """The answer so far of a request that has `count` tokens."""
    entry = Logprob(5, "x", b"x", -1.0, 1)
    times = [float(i) for i in range(count)]
    metrics = RequestMetrics(arrival=0.0, first_token=0.0, last_token=times[-1], token_times=times)
    sample = CompletionOutput(0, ["x"] * count, [5] * count, logprobs=[entry] * count, metrics=metrics)
    return RequestOutput("a", "x", [5], [sample])


def seconds(output: RequestOutput) -> float:
    """The least time of a snapshot, and of reading what a stream reads of it."""
    best = 1.0
    for _ in range(200):
        start = time.perf_counter()
        sample = output.take().outputs[0]
        _ = sample.delta, sample.token_ids[-2:], len(sample.token_ids), (sample.logprobs or [])[-2:]
        best = min(best, time.perf_counter() - start)
    return best


def test_the_cost_of_a_snapshot_does_not_grow() -> None:
    """400,000 tokens beside 10. To copy their four lists takes 1,000 times as long."""
    assert seconds(grown(400_000)) < 4 * seconds(grown(10))


def test_a_snapshot_stays_what_it_was(folder: Path) -> None:
    llm = LLM(folder, threads=1)
    llm.engine.strategies["script"] = Script(range(10, 110), (1, 3, 2))
    params = SamplingParams(max_tokens=100, logprobs=1, ignore_eos=True)
    expected = llm.generate("The sea", params, strategy="script")[0].outputs[0]
    snapshots = list(llm.stream("The sea", params, strategy="script"))
    counts = [1, 4, *range(6, 101, 2)]
    assert [len(s.outputs[0].token_ids) for s in snapshots] == counts
    for count, snapshot in zip(counts, snapshots):
        sample = snapshot.outputs[0]
        assert sample.token_ids == list(range(10, 10 + count)) and sample.metrics is not None and sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.metrics.token_times) == count == sample.metrics.completion_tokens
        assert len(sample.metrics.itl_s) == count - 1
        assert expected.text.startswith(sample.text)
    assert f"text={expected.text!r}, token_ids=[10, 11, " in repr(expected)
    assert "".join(s.outputs[0].delta for s in snapshots) == snapshots[-1].outputs[0].text == expected.text
    assert json.dumps(snapshots[-1].outputs[0].token_ids) == json.dumps(expected.token_ids)     # lists at the end


def test_the_beginning_of_a_list() -> None:
    items = [1, 2, 3, 4]
    seen: Any = Beginning(items)
    items += [5, 6]
    assert seen == [1, 2, 3, 4] == list(seen) and seen != [1, 2, 3, 4, 5, 6] and len(seen) == 4 and repr(seen) == "[1, 2, 3, 4]"
    assert seen[-1] == 4 and seen[1:] == [2, 3, 4] and seen[2:99] == [3, 4]
    assert seen[::-1] == [4, 3, 2, 1] and seen[::2] == [1, 3]
    assert 5 not in seen and 4 in seen and seen == Beginning([1, 2, 3, 4])
    for index in (4, -5):
        with pytest.raises(IndexError):
            seen[index]
    with pytest.raises(TypeError):
        hash(seen)
