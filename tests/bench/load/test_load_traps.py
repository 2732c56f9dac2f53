"""Every way in which load generators have been seen to mislead, against a server whose times are known."""
from __future__ import annotations

import json
import statistics
import time
from typing import Any

import pytest

from ridgeline.bench.serve import metrics, validity
from ridgeline.bench.serve.arrivals import CLOSED, Arrivals
from ridgeline.bench.serve.record import Record
from ridgeline.bench.serve.run import Cell
from ridgeline.bench.serve.workloads import Spec
from streaming_peer import Behaviour, prompt_of, serving, texts


def test_stamps_are_those_of_the_server(load):
    """The peer notes when it wrote each chunk, on the same clock; a stamp is never before that and soon after."""
    with serving(Behaviour(ttft_s=0.03, gap_s=0.004)) as peer:
        start = time.perf_counter()
        result = load(peer, "--max-concurrency", 2, num_prompts=10)
        assert time.perf_counter() - start >= 5 * (0.03 + 7 * 0.004)
    requests = sorted(result["cells"][0]["requests"], key=lambda r: r["sent"])
    seen = sorted(peer.seen[1:], key=lambda s: s.written[0])
    assert [len(r["times"]) for r in requests] == [8] * 10
    offset = min(s.written[0] for s in seen) - min(r["times"][0] for r in requests)
    stamps = sorted(t + offset for r in requests for t in r["times"])
    written = sorted(t for s in seen for t in s.written)
    assert statistics.median(abs(a - b) for a, b in zip(stamps, written)) < 0.003
    assert all(request["times"][0] - request["sent"] >= 0.03 for request in requests)


def test_waiting_for_a_slot_counts_into_ttft(load):
    """Requests come faster than the cap lets them through: TTFT from the schedule grows, service TTFT does not."""
    with serving(Behaviour(ttft_s=0.05, gap_s=0.001)) as peer:
        result = load(peer, "--request-rate", 100, "--burstiness", "constant", "--max-concurrency", 1, num_prompts=10)
    requests = result["cells"][0]["requests"]
    assert [r["scheduled"] for r in requests] == pytest.approx([0.01 * i for i in range(10)])
    last = requests[-1]
    assert last["times"][0] - last["scheduled"] > 9 * 0.05
    assert last["times"][0] - last["sent"] < last["times"][0] - last["scheduled"] - 0.3
    assert last["lateness"] < 0.05                     # waiting for the server is no lag of the client
    lat = result["cells"][0]["summary"]["latencies"]
    assert lat["ttft"]["percentiles"]["50"] > 2 * lat["sttft"]["percentiles"]["50"]


def test_an_open_loop_keeps_its_deadlines_whatever_answers_do(load):
    with serving(Behaviour(ttft_s=0.3)) as peer:
        load(peer, "--request-rate", 50, "--burstiness", "constant", num_prompts=10)
    received = [s.received for s in peer.seen[1:]]
    assert received[-1] - received[0] < 0.3            # all were sent before the first was answered
    assert received[-1] - received[0] >= 9 / 50 - 0.02


def test_no_prompt_comes_twice_not_even_with_the_same_seed(load):
    """Two runs with one seed and a sweep: the peer answers a prompt that it knows 20 times sooner, and is never let to."""
    with serving(Behaviour(ttft_s=0.06, cached_ttft_s=0.003)) as peer:
        results = [load(peer, "--seed", 7, "--max-concurrency", 2, num_prompts=6, warmups=2) for _ in range(2)]
        results.append(load(peer, "--seed", 7, "--sweep", "1,2", "--sweep-over", "concurrency", num_prompts=6, warmups=2))
    assert not any(s.hit for s in peer.seen) and len({prompt_of(s.body) for s in peer.seen}) == len(peer.seen) == 32
    for cell in (cell for result in results for cell in result["cells"]):
        assert cell["summary"]["prefix_hit_rate"] == 0.0
        assert cell["summary"]["latencies"]["ttft"]["lowest"] >= 0.06
    assert "prefix hits" in results[0]["out"]


@pytest.mark.parametrize("from_page", [False, True])
def test_prefix_hits_on_prompts_that_should_be_new_make_a_run_invalid(load, from_page):
    """With --salt the same texts come again: by the usage of each answer, or by the counters of /metrics."""
    with serving(Behaviour(cached_ttft_s=0.001, metrics=from_page)) as peer:
        first = load(peer, "--salt", "s", "--max-concurrency", 2)
        again = load(peer, "--salt", "s", "--max-concurrency", 2)
    assert first["cells"][0]["summary"]["prefix_hit_rate"] == 0.0
    cell = again["cells"][0]
    assert cell["summary"]["prefix_hit_rate"] == 1.0 and cell["grade"] == "invalid"
    assert any("100% of the prompt tokens came from the prefix cache" in text for text in texts(cell))


def test_prefix_hits_of_a_workload_that_shares_are_reported_only(load):
    with serving(Behaviour(cached_ttft_s=0.001)) as peer:
        result = load(peer, "--dataset-name", "prefix", "--prefix-len", 30, "--num-prefixes", 2, "--max-concurrency", 1,
                      "--max-client-lag", 2000)
    cell = result["cells"][0]
    assert cell["summary"]["prefix_hit_rate"] == 6 / 8 and cell["grade"] != "invalid"


def test_a_bundled_first_chunk(load):
    """4 tokens in the first chunk, 1 in the others: TPOT is the gap of 10 ms, not 4/7 of it, and there are 4 gaps of tokens."""
    with serving(Behaviour(first_chunk=4, gap_s=0.01, usage="running")) as peer:
        result = load(peer, "--max-concurrency", 1, num_prompts=4)
    assert all(r["tokens"] == [4, 1, 1, 1, 1] for r in result["cells"][0]["requests"])
    tpot = result["cells"][0]["summary"]["latencies"]["tpot"]
    assert tpot["mean"] > 0.008 and result["cells"][0]["summary"]["latencies"]["itl"]["count"] == 4 * 4


def test_chunks_of_several_tokens_are_told_in_tokens(load):
    with serving(Behaviour(first_chunk=2, chunk=2, gap_s=0.02)) as peer:
        result = load(peer, "--max-concurrency", 1, "--percentile-metrics", "itl,icl,tpot", num_prompts=4)
    lat = result["cells"][0]["summary"]["latencies"]
    assert (lat["itl"]["count"], lat["icl"]["count"]) == (4 * 6, 4 * 3)
    assert lat["icl"]["mean"] >= 0.018 and lat["itl"]["mean"] == pytest.approx(lat["icl"]["mean"] / 2, rel=1e-6)
    assert any("chunks held several tokens" in text for text in texts(result["cells"][0]))


@pytest.mark.parametrize("channel", ["content", "reasoning_content", "tool_calls"])
def test_a_role_frame_is_no_token_and_reasoning_is_one(load, channel):
    with serving(Behaviour(role_frame_s=0.0, ttft_s=0.06, channel=channel)) as peer:
        result = load(peer, "--backend", "openai-chat", "--max-concurrency", 1, num_prompts=3)
    summary = result["cells"][0]["summary"]
    assert summary["completed"] == 3 and summary["output_tokens"] == 24
    assert summary["latencies"]["ttft"]["lowest"] >= 0.06
    assert peer.seen[0].path == "/v1/chat/completions" and peer.seen[0].body["messages"][0]["role"] == "user"


def test_every_number_stands_beside_its_formula(load):
    with serving() as peer:
        out = load(peer, "--max-concurrency", 2, "--goodput", "ttft:900", "tpot:100")["out"]
    lines = out.splitlines()
    for name, formula in (("TTFT ", "t1 - t_sched"), ("service TTFT", "t1 - t_send"), ("TPOT", "(tN - t1) / (n - n1)"),
                          ("ITL", "gap D / k"), ("E2E", "tN - t_sched"), ("output tokens/s", "/ duration"),
                          ("goodput", "requests within all objectives / duration"), ("prefix hits", "/ prompt tokens")):
        assert any(line.startswith(name) and formula in line for line in lines), name


def test_clients_of_a_closed_loop_do_not_start_at_once(load):
    """Clients that start together queue behind each other, and that burst is then the p99 of the run."""
    with serving(Behaviour(ttft_s=0.02, gap_s=0.01, slots=1)) as peer:
        burst, spread, auto = (load(peer, "--max-concurrency", 4, *flags, num_prompts=12)["cells"][0]
                               for flags in (("--stagger", 0), ("--stagger", 0.4), ()))
    assert [r["scheduled"] for r in burst["requests"][:4]] == [0.0] * 4
    assert {0.0, 0.1, 0.2, 0.3} <= {round(r["scheduled"], 6) for r in spread["requests"]}
    stagger = auto["arrivals"]["stagger_s"]
    assert 0.09 <= stagger < 1                          # one request's time, by the warm-up
    assert {round(stagger * c / 4, 6) for c in range(4)} <= {round(r["scheduled"], 6) for r in auto["requests"]}


def test_counts_are_the_engines_and_chunks_are_said_to_be_chunks(load):
    with serving(Behaviour(usage="none")) as peer:
        result = load(peer, "--max-concurrency", 2)
        assert result["cells"][0]["summary"]["tokens_counted"] == "chunks"
        assert any("tokens are counted as chunks" in text for text in texts(result["cells"][0]))
        load(peer, "--no-usage")
        assert "stream_options" not in peer.seen[-1].body
    with serving(Behaviour(first_chunk=2, chunk=2)) as peer:
        assert load(peer, "--max-concurrency", 2)["cells"][0]["summary"]["output_tokens"] == 8 * 8


def test_the_first_use_of_every_load_is_paid_by_its_warm_up(load):
    """The peer takes 0.3 s more at the first request of each new number of running requests."""
    with serving(Behaviour(first_use_s=0.3, ttft_s=0.03)) as peer:
        result = load(peer, "--sweep", "1,3", "--sweep-over", "concurrency", "--stagger", 0, num_prompts=6, warmups=None)
    assert [cell["warmups"] for cell in result["cells"]] == [2, 4]
    for cell in result["cells"]:
        assert cell["summary"]["latencies"]["ttft"]["highest"] < 0.3


def records(count: int, lateness: float = 0.0, **more: object) -> list[Record]:
    return [Record(i, 0, 10, 2, scheduled=float(i), sent=i + 0.01, ended=i + 0.5, lateness=lateness, times=[i + 0.1, i + 0.5],
                   tokens=[1, 1], counted="usage", prompt_tokens=10, **more) for i in range(count)]  # type: ignore[arg-type]


def graded(cell: Cell) -> tuple[dict[str, Any], list[dict[str, str]]]:
    summary = metrics.summarise(cell, metrics.Wanted(goodput=(("ttft", 0.2),)))
    return summary, validity.badges(cell, summary, Spec())


@pytest.mark.parametrize("lateness, wakeup, invalid", [(0.0, 0.001, False), (0.02, 0.001, True), (0.0, 0.05, True)])
def test_a_client_that_lags_makes_its_numbers_invalid(lateness, wakeup, invalid):
    cell = Cell(Arrivals(CLOSED, concurrency=1), 120, records(120, lateness), [wakeup] * 200)
    summary, badges = graded(cell)
    assert summary["client"]["send_lateness_p99_s"] == lateness and summary["client"]["wakeup_lateness_p99_s"] == wakeup
    assert (validity.grade(badges) == "invalid") == invalid
    assert any("the client itself was late" in badge["text"] for badge in badges) == invalid


def test_a_busy_event_loop_is_noticed(load, monkeypatch):
    """Real lag: every event of an answer costs the client 30 ms."""
    from ridgeline.bench.serve import stream

    take = stream.Answer.take

    def slow(self, data, now):
        time.sleep(0.03)
        take(self, data, now)

    monkeypatch.setattr(stream.Answer, "take", slow)
    with serving() as peer:
        cell = load(peer, "--max-concurrency", 2, num_prompts=4)["cells"][0]
    assert cell["summary"]["client"]["wakeup_lateness_p99_s"] > 0.015 and cell["grade"] == "invalid"


@pytest.mark.parametrize("count, told", [(99, False), (100, True)])
def test_p99_needs_a_hundred_samples(count, told):
    summary, badges = graded(Cell(Arrivals(CLOSED, concurrency=1), count, records(count)))
    assert (summary["latencies"]["ttft"]["percentiles"]["99"] is not None) == told
    assert any("too few for p99" in badge["text"] for badge in badges) != told
    assert summary["latencies"]["ttft"]["percentiles"]["90"] is not None


def test_errors_are_counted_and_fail_goodput():
    good, bad = records(90), records(10, error="x", error_kind="timeout")
    summary, badges = graded(Cell(Arrivals(CLOSED, concurrency=1), 100, good + bad))
    assert summary["errors"] == {"timeout": 10} and summary["completed"] == 90 and summary["attainment"] == 0.9
    assert summary["goodput_requests_per_s"] == pytest.approx(90 / summary["duration_s"])
    assert summary["latencies"]["ttft"]["count"] == 90 and validity.grade(badges) == "invalid"


def test_connections_that_the_server_closes_behind_a_stream_fail_nothing(load):
    """Each client sends its next request the moment its last is answered, often before it hears of the closing."""
    with serving(Behaviour(ttft_s=0.001, gap_s=0.0, closes=True)) as peer:
        result = load(peer, "--max-concurrency", 8, "--stagger", 0, num_prompts=160)
    assert result["cells"][0]["summary"]["failed"] == 0 and len(peer.seen) == 161          # none was answered twice


def test_answers_that_end_early_and_prompts_of_another_length_are_said(load):
    with serving(Behaviour(stop_after=3)) as peer:
        result = load(peer, "--ignore-eos", "--max-concurrency", 2)
        assert peer.seen[0].body["ignore_eos"] is True
    assert any("the server does not heed ignore_eos" in text for text in texts(result["cells"][0]))
    cell = Cell(Arrivals(CLOSED, concurrency=1), 120, records(120))
    for record in cell.records:
        record.prompt_tokens = 40
    assert any("prompts had 40 tokens" in badge["text"] for badge in graded(cell)[1])


def test_a_run_without_blemish_is_valid():
    cell = Cell(Arrivals(CLOSED, concurrency=1), 120, records(120), [0.001] * 200)
    assert [badge["grade"] for badge in graded(cell)[1]] == ["valid"]


def test_throughput_of_the_steady_window():
    """Two clients, the second from 5 s on: 2 tokens/s while both are busy."""
    spans = [(0.0, 10.0), (5.0, 15.0), (10.0, 20.0), (15.0, 25.0)]
    found = [Record(i, 0, 1, 10, a, a, b, times=[a + 1 + k for k in range(10)], tokens=[1] * 10)
             for i, (a, b) in enumerate(spans)]
    cell = Cell(Arrivals(CLOSED, concurrency=2), 4, found)
    summary, _ = graded(cell)
    assert summary["steady_window_s"] == [5.0, 20.0] and summary["steady_output_tokens_per_s"] == 2.0
    assert summary["output_tokens_per_s"] == 40 / 25 and summary["peak_concurrency"] == 2


def test_sessions_grow_their_history(load):
    with serving(Behaviour(ttft_s=0.005)) as peer:
        result = load(peer, "--dataset-name", "agent", "--turns", 3, "--prefix-len", 12, "--endpoint", "/v1/chat/completions",
                      "--max-concurrency", 1, num_prompts=5)
    bodies = [s.body["messages"] for s in peer.seen[1:]]
    assert [[m["role"] for m in body] for body in bodies[:3]] == [
        ["system", "user"], ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"]]
    assert bodies[1][:2] == bodies[0] and bodies[1][2]["content"] == "word " * 8 and len(bodies) == 5
    requests = result["cells"][0]["requests"]
    assert [r["turn"] for r in requests] == [0, 1, 2, 0, 1]
    assert requests[1]["input_len"] == 12 + 20 + 8 + 20 and requests[1]["scheduled"] >= requests[0]["times"][-1]


def test_a_trace_is_replayed_at_its_times(load, tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 + 80 * i, "input_length": 5 + i, "output_length": 2, "hash_ids": [i]} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)))
    with serving() as peer:
        result = load(peer, "--dataset-name", "trace", "--dataset-path", path, input_len=None, output_len=None)
    cell = result["cells"][0]
    assert [r["scheduled"] for r in cell["requests"]] == pytest.approx([0.08 * i for i in range(5)])
    assert [r["prompt_tokens"] for r in cell["requests"]] == [5, 6, 7, 8, 9] and cell["requested"] == 5
