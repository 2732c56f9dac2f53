"""Waterfalls: parts that are measured by themselves add up to the wall time, and what no stamp covers is told."""
from __future__ import annotations

import pytest

from ridgeline import LLM
from ridgeline.analysis.advise import Question
from ridgeline.analysis.sample import acceptance, prompts, run_sample
from ridgeline.analysis.stamps import Run, Span, recorded
from ridgeline.analysis.waterfall import MOST_RESIDUAL, of_request, of_steps
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import RequestMetrics
from tiny_checkpoint import write_checkpoint

MS = 1_000_000


def span(name: str, start: float, end: float, component: bool = False) -> Span:
    return Span(name, round(start * MS), round(end * MS), component=component)


def made_up() -> list[Span]:
    """A request that arrives at 10 ms: 2 ms of tokenising, 3 in the queue, a step of 20, 1 of nothing, a step of 10."""
    run = Run()
    run._spans = [
        span("tokenise", 10, 12),
        span("step", 15, 35), span("engine", 15, 34), span("schedule", 15, 16), span("execute", 16, 33),
        span("forward", 17, 31),
        span("mlp.up", 17, 25, True), span("mlp.down", 26, 31, True), span("choose", 31, 33), span("head", 31, 32, True),
        span("detokenise", 34, 35),
        span("step", 36, 46), span("engine", 36, 46), span("schedule", 36, 37), span("execute", 39, 46),
        span("forward", 39, 45),
        span("mlp.up", 39, 45, True), span("choose", 45, 46)]
    return run.spans()


def test_a_request_by_hand() -> None:
    metrics = RequestMetrics(arrival=0.010, scheduled=0.0155, first_token=0.034, last_token=0.046, finished=0.046)
    fall = of_request(made_up(), metrics)
    ms = {name: round(1e3 * seconds, 6) for name, seconds in fall.parts.items()}
    assert ms == {"tokenise": 2, "queue": 3, "prefill": 14, "decode: mlp.up": 6, "sampling": 2, "detokenise": 1, "idle": 1,
                  "dispatch": 1 + 1 + 1 + 1}          # schedule, batch, gap in the pass; schedule
    assert fall.wall_s == pytest.approx(0.036)
    # 1 ms between the pass and the end of the first step, 2 before the second pass: no stamp covers them.
    assert fall.residual_s == pytest.approx(0.003) and fall.residual_share == pytest.approx(3 / 36)


def test_a_step_by_hand() -> None:
    fall = of_steps(made_up(), [1])
    ms = {name: round(1e3 * seconds, 6) for name, seconds in fall.parts.items()}
    assert ms == {"mlp.up": 6, "sampling": 1, "dispatch": 1} and fall.residual_s == pytest.approx(0.002)


def test_steps_that_were_interrupted_are_left_out() -> None:
    run = Run()
    run._spans = [s for i, wall in enumerate((10, 10, 90, 11, 9)) for s in (
        span("step", 100 * i, 100 * i + wall), span("engine", 100 * i, 100 * i + wall),
        span("mlp.up", 100 * i, 100 * i + wall, True))]
    fall = of_steps(run.spans(), range(5))
    assert fall.wall_s == pytest.approx((10 + 10 + 11) / 3 / 1e3) and fall.parts["mlp.up"] == pytest.approx(fall.wall_s)


def test_wrapping_leaves_no_trace(tmp_path) -> None:
    llm = LLM(write_checkpoint(tmp_path), threads=1)
    before = {name: set(vars(owner)) for name, owner in (("frontend", llm.frontend), ("engine", llm.engine))}
    with recorded(llm) as run:
        llm.generate(["The sea"], SamplingParams(temperature=0, presence_penalty=0.1, max_tokens=3))
    assert before == {name: set(vars(owner)) for name, owner in (("frontend", llm.frontend), ("engine", llm.engine))}
    spans = run.spans()
    assert {"tokenise", "step", "engine", "schedule", "execute", "forward", "choose", "detokenise"} <= {s.name for s in spans}
    assert all(s.own_ns >= 0 for s in spans) and any(s.component and s.layer == 1 for s in spans)
    count = len(spans)
    llm.generate(["The sea"], SamplingParams(temperature=0, max_tokens=3))
    assert len(run.spans()) == count


@pytest.mark.parametrize("batch", [1, 3])
def test_a_real_model_adds_up(batch: int) -> None:
    llm = LLM("gemma3-270m", max_num_seqs=4)
    sample = run_sample(llm, Question(batch, 64, 12), batch)
    for fall in (sample.request, *sample.steps.values()):
        assert abs(fall.residual_share) <= MOST_RESIDUAL and min(fall.parts.values()) >= 0
    assert {"queue", "tokenise", "prefill", "decode: attention.core", "decode: head", "detokenise", "dispatch",
            "idle"} <= set(sample.request.parts)
    assert sample.request.parts["prefill"] > 0 and len(sample.answer) == 12
    assert sum(sample.steps["decode"].parts.values()) == pytest.approx(sample.steps["decode"].wall_s, rel=MOST_RESIDUAL)


def test_acceptance_is_what_the_strategy_accepts(tmp_path) -> None:
    """Greedy output is the same with and without drafts, so look-up can be worked out from the plain answer."""
    folder = write_checkpoint(tmp_path, max_position_embeddings=512)
    plain = LLM(folder, threads=1)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    given = prompts(plain, 1, 40)[0]
    answer = plain.generate([given], params)[0]
    drafted = LLM(folder, threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    other = drafted.generate([given], params)[0]
    tokens, drafts = acceptance(answer.prompt_token_ids, answer.outputs[0].token_ids, 3)
    steps = other.metrics.target_steps - 1                    # the first one is the prefill's
    # The prefill's pass drafts as well, from the prompt's own tokens, so counts may differ by what it accepted.
    assert answer.outputs[0].token_ids == other.outputs[0].token_ids
    assert 59 / tokens == pytest.approx(steps, abs=4)
    assert drafts <= 3
