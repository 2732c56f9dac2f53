"""Who runs when: budgets, chunks, preemption, priorities, static batches; and what the metrics say about it."""
from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine_kit import Answer, Rig, model, prompt, same
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import EngineRequest, RequestMetrics

TINY = {"pages": 22, "page_size": 4, "max_num_batched_tokens": 24}      # one sequence of 80 tokens and no more


def alone(kind: str, length: int, **params: Any) -> Answer:
    return Rig(model(kind)).one(prompt(length, seed=length), **params)


def running(r: Rig) -> set[str]:
    return {seq.request_id for seq in r.engine.scheduler.running}


# Preemption.


@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
@pytest.mark.parametrize("kind", ["softmax", "sliding", "hybrid"])
def test_preempted_requests_give_the_same_output(kind: str, policy: str) -> None:
    sizes = [(10, 40), (12, 40), (14, 40), (30, 20), (5, 60)]
    r = Rig(model(kind), **TINY, scheduling_policy=policy)
    for n, most in sizes:
        r.add(str(n), prompt(n, seed=n), max_tokens=most, temperature=0.7, seed=n, logprobs=1)
    answers = r.finish()
    assert r.engine.stats.preemptions == sum(a.metrics.preemptions for a in answers.values()) > 0
    assert answers["10", 0].metrics.preemptions == 0                     # the first to come is never put back
    for n, most in sizes:
        assert same(answers[str(n), 0], alone(kind, n, max_tokens=most, temperature=0.7, seed=n, logprobs=1))


def test_a_preempted_request_reuses_what_is_left_of_its_pages() -> None:
    def recomputed(prefix_caching: bool) -> int:
        r = Rig(model("softmax"), **TINY, prefix_caching=prefix_caching)
        for n in (30, 31, 32):
            r.add(str(n), prompt(n, seed=n), max_tokens=30)
        r.finish()
        assert r.engine.stats.preemptions > 0
        return r.engine.stats.prompt_tokens

    assert recomputed(True) < recomputed(False)


# Priorities.


def test_a_higher_priority_takes_the_seat() -> None:
    r = Rig(model("softmax"), scheduling_policy="priority", max_num_seqs=2)
    r.add("low", prompt(10, seed=10), max_tokens=20, priority=5)
    r.add("mid", prompt(11, seed=11), max_tokens=20, priority=3)
    for _ in range(4):
        r.step()
    r.add("equal", prompt(13, seed=13), max_tokens=5, priority=5)
    r.step()
    assert running(r) == {"low", "mid"}                       # equals do not displace each other
    r.add("high", prompt(12, seed=12), max_tokens=5, priority=1)
    r.step()
    assert running(r) == {"mid", "high"}
    answers = r.finish()
    assert (answers["low", 0].metrics.preemptions, answers["mid", 0].metrics.preemptions) == (1, 0)
    assert answers["high", 0].metrics.finished < answers["mid", 0].metrics.finished
    assert answers["low", 0].metrics.scheduled < answers["high", 0].metrics.scheduled
    for name, n, most in (("low", 10, 20), ("mid", 11, 20), ("high", 12, 5), ("equal", 13, 5)):
        assert same(answers[name, 0], alone("softmax", n, max_tokens=most))


def test_a_higher_priority_takes_the_memory() -> None:
    r = Rig(model("softmax"), scheduling_policy="priority", **TINY)
    r.add("low", prompt(60, seed=60), max_tokens=18, priority=1)
    for _ in range(6):
        r.step()
    r.add("high", prompt(50, seed=50), max_tokens=18, priority=0)
    r.step()
    assert running(r) == {"high"}
    answers = r.finish()
    assert answers["low", 0].metrics.preemptions == 1
    assert same(answers["low", 0], alone("softmax", 60, max_tokens=18))
    assert same(answers["high", 0], alone("softmax", 50, max_tokens=18))


def test_samples_that_wait_for_their_prompt_displace_nobody() -> None:
    """They cannot run yet, so that taking a seat for them would only throw work away."""
    r = Rig(model("softmax"), scheduling_policy="priority", max_num_seqs=2, max_num_batched_tokens=8)
    r.add("low", prompt(10, seed=10), max_tokens=20, priority=5)
    r.step()
    r.step()
    r.add("high", prompt(40, seed=40), n=2, max_tokens=5, priority=1, temperature=1.0, seed=3)
    for _ in range(3):
        r.step()
    assert running(r) == {"low", "high"}
    answers = r.finish()
    assert answers["low", 0].metrics.preemptions == 1                    # once, when the second sample could start
    assert same(answers["low", 0], alone("softmax", 10, max_tokens=20))


# Budget and chunks.


@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
@pytest.mark.parametrize("strategy", ["autoregressive", "ngram", "lookup_tree", "draft_model"])
def test_no_step_exceeds_its_budget(strategy: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the target in one pass; and the smallest budget gets everything done."""
    names = [strategy] if strategy != "autoregressive" else []
    r = Rig({"target": model("softmax"), "draft": model("softmax", noise=0.1)}, names, max_num_batched_tokens=9,
            scheduling_policy=policy)
    rows: list[int] = []
    execute = r.engine.runners["target"].execute
    monkeypatch.setattr(r.engine.runners["target"], "execute",
                        lambda slices: rows.append(sum(s.count for s in slices)) or execute(slices))
    for n in (3, 9, 10, 31, 45):
        r.add(str(n), prompt(n, seed=n), strategy, max_tokens=8)
    answers = r.finish(most_steps=200)
    assert max(rows) <= 9 and sum(rows) == r.engine.stats.target_rows
    for n in (3, 9, 10, 31, 45):
        assert same(answers[str(n), 0], alone("softmax", n, max_tokens=8))


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    r = Rig(model("softmax"), max_num_batched_tokens=8)
    r.add("first", prompt(5, seed=5), max_tokens=30)
    r.step()
    r.add("long", prompt(45, seed=45), max_tokens=3)
    for _ in range(7):                                                   # 7 steps with 7 rows of prompt, one of decode
        outputs = r.step()
        assert any(out.request_id == "first" and len(out.new_tokens) == 1 for out in outputs)
    assert len(r.answers["long", 0].tokens) == 1


def test_decoding_sequences_wait_for_small_pieces_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone a prompt gets the whole budget; beside decoding sequences, together with other prompts, the mixed limit."""
    r = Rig(model("softmax"), max_num_batched_tokens=24, max_mixed_prefill_tokens=6)
    pieces: list[dict[str, int]] = []
    runner = r.engine.runners["target"]
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda slices: pieces.append({s.seq.request_id: s.count for s in slices})
                        or execute(slices))
    r.add("first", prompt(20, seed=20), max_tokens=30)
    r.step()
    r.add("long", prompt(40, seed=40), max_tokens=3)
    r.add("short", prompt(4, seed=4), max_tokens=3)
    answers = r.finish()
    assert pieces[:8] == [{"first": 20}, *[{"first": 1, "long": 6}] * 6, {"first": 1, "long": 4, "short": 2}]
    for key, n, most in (("first", 20, 30), ("long", 40, 3), ("short", 4, 3)):
        assert same(answers[key, 0], alone("softmax", n, max_tokens=most))


def test_requests_join_and_leave_a_running_batch() -> None:
    r = Rig(model("softmax"))
    r.add("a", prompt(5, seed=5), max_tokens=20)
    r.step()
    r.add("b", prompt(6, seed=6), max_tokens=3)
    r.step()
    assert running(r) == {"a", "b"} and len(r.answers["b", 0].tokens) == 1


# Static batches, the baseline.


def test_nothing_joins_a_static_batch() -> None:
    r = Rig(model("softmax"), scheduling_policy="static", max_num_seqs=3, max_num_batched_tokens=16)
    for n, most in ((5, 3), (6, 12), (7, 7), (8, 2)):
        r.add(str(n), prompt(n, seed=n), max_tokens=most)
    batches = []
    while r.engine.has_work:
        if len(batches) == 2:
            r.add("late", prompt(4, seed=4), max_tokens=2)
        r.step()
        batches.append(running(r))
    for before, after in pairwise(batches):
        assert after <= before or not before, "a sequence joined a running batch"
    assert batches[0] == {"5", "6", "7"}
    assert r.answers["6", 0].metrics.finished <= r.answers["8", 0].metrics.scheduled
    continuous = Rig(model("softmax"), max_num_seqs=3, max_num_batched_tokens=16)
    for n, most in ((5, 3), (6, 12), (7, 7), (8, 2)):
        continuous.add(str(n), prompt(n, seed=n), max_tokens=most)
    answers = continuous.finish()
    assert continuous.steps < len(batches)
    assert all(same(answers[key], r.answers[key]) for key in answers)
    assert answers["8", 0].metrics.scheduled < answers["6", 0].metrics.finished


def test_a_static_batch_takes_all_samples_of_a_request() -> None:
    r = Rig(model("softmax"), scheduling_policy="static")
    r.add("a", prompt(9), n=3, max_tokens=5, temperature=1.0, seed=1)
    r.step()
    assert len(r.engine.scheduler.running) == 3
    r.finish()
    assert r.steps == 5


# Metrics.


def test_the_formulas_of_a_request() -> None:
    m = RequestMetrics(arrival=10.0, scheduled=11.0, first_token=14.0, last_token=20.0, finished=20.5,
                       token_times=[14.0, 14.0, 15.0, 18.0, 18.0, 18.0, 20.0])
    assert (m.queue_s, m.ttft_s, m.e2e_s) == (1.0, 4.0, 10.5)
    assert m.itl_s == pytest.approx([1.0, 1.0, 1.0, 1.0, 2.0])     # two tokens came with the first, three 3 s later
    assert m.tpot_s == pytest.approx(6.0 / 5)
    assert sum(m.itl_s) == pytest.approx(m.last_token - m.first_token)


def test_a_request_of_one_step_has_no_time_between_tokens() -> None:
    m = RequestMetrics(arrival=0.0, first_token=1.0, last_token=1.0, token_times=[1.0, 1.0])
    assert (m.itl_s, m.tpot_s, m.queue_s, m.e2e_s) == ([], None, None, None)
    assert RequestMetrics(arrival=0.0).ttft_s is None


@pytest.mark.parametrize("strategy", ["autoregressive", "draft_model"])
def test_the_metrics_of_a_run(strategy: str) -> None:
    r = Rig({"target": model("softmax"), "draft": model("softmax")}, ["draft_model"], max_num_seqs=1)
    r.add("a", prompt(20), strategy, max_tokens=11)
    r.add("b", prompt(20), strategy, max_tokens=11)
    answers = r.finish()
    a, b = answers["a", 0].metrics, answers["b", 0].metrics
    for m in (a, b):
        assert m.arrival <= m.scheduled <= m.first_token <= m.last_token <= m.finished
        assert (m.prompt_tokens, m.completion_tokens, len(m.token_times)) == (20, 11, 11)
        assert len(set(m.token_times)) == m.target_steps == (11 if strategy == "autoregressive" else 3)
        assert len(m.itl_s) == 10
        assert sum(m.itl_s) == pytest.approx(m.last_token - m.first_token)
        assert m.tpot_s == pytest.approx((m.last_token - m.first_token) / 10)
        assert m.draft_tokens == m.accepted_tokens == (0 if strategy == "autoregressive" else 8)
    assert b.scheduled >= a.finished and b.queue_s > a.queue_s
    assert (a.cached_tokens, b.cached_tokens) == (0, 16)
    stats = r.engine.stats
    assert (stats.steps, stats.generation_tokens, stats.prompt_tokens) == (r.steps, 22, 20 + 4)
    assert (stats.prefix_queries, stats.prefix_hits, stats.preemptions) == (40, 16, 0)
    assert stats.draft_tokens == stats.accepted_tokens == 2 * a.draft_tokens
    assert stats.target_rows == 24 + (20 if strategy == "autoregressive" else 2 * (5 + 5))


def test_the_gauges_of_a_moment() -> None:
    r = Rig(model("softmax"), max_num_seqs=2, pages=20, page_size=8)
    for n in (9, 17, 5):
        r.add(str(n), prompt(n, seed=n), max_tokens=4)
    r.step()
    stats = r.engine.stats
    assert (stats.running, stats.waiting) == (2, 1)
    assert stats.kv_usage == pytest.approx((2 + 3) / 20) == r.engine.cache_stats().usage
    r.finish()


def test_the_arrival_is_the_callers_where_it_gives_one() -> None:
    r = Rig(model("softmax"), max_num_seqs=1)
    r.engine.add_request(EngineRequest("late", [1, 2], SamplingParams(max_tokens=2), arrival=2.0))
    r.engine.add_request(EngineRequest("early", [1, 2], SamplingParams(max_tokens=2), arrival=1.0))
    answers = r.finish()
    assert answers["early", 0].metrics.finished < answers["late", 0].metrics.finished
    assert answers["early", 0].metrics.arrival == 1.0
