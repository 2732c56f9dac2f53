"""`ridgeline bench serve` as a command: errors in one line, saved results, sweeps, interrupts."""
from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from ridgeline.bench.serve import report
from ridgeline.bench.serve.metrics import Wanted, summarise
from ridgeline.bench.serve.record import Record
from ridgeline.bench.serve.run import Cell
from ridgeline.bench.serve.scrape import parse_counters
from ridgeline.cli import main
from streaming_peer import Behaviour, serving, texts

FAST = ("--num-prompts", "4", "--output-len", "4", "--num-warmups", "1", "--max-concurrency", "2")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and the one line that a mistake is worth."""
    try:
        code = main(["bench", "serve", *arguments])
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    return code, captured.err


@pytest.mark.parametrize("arguments, message", [
    (("--num-prompts", "0"), "--num-prompts is 0; it must be an integer of at least 1"),
    (("--request-rate", "-1"), "--request-rate is -1; it must be a number above 0"),
    (("--range-ratio", "2"), "--range-ratio is 2; it must be 0 to 1"),
    (("--turns", "3"), "--turns is a flag of --dataset-name agent, not of random"),
    (("--dataset-name", "sharegpt", "--input-len", "9"), "--input-len is a flag of --dataset-name random, prefix, agent"),
    (("--dataset-name", "trace"), "--dataset-name trace needs --dataset-path FILE"),
    (("--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "1"), "--request-rate contradicts --dataset-name"),
    (("--request-rate", "1", "--ramp", "1:2"), "--request-rate and --ramp exclude each other"),
    (("--ramp", "1-2"), "--ramp is '1-2'; it must be FROM:TO"),
    (("--burstiness", "0.5"), "--burstiness needs --request-rate, --ramp or --sweep"),
    (("--burstiness", "no"), "'no' must be a number above 0, or constant"),
    (("--request-rate", "1", "--stagger", "1"), "--stagger is for a closed loop"),
    (("--sweep", "1,x"), "--sweep is '1,x'; it must be rates above 0"),
    (("--sweep", "1.5", "--sweep-over", "concurrency"), "it must be numbers of clients"),
    (("--sweep", "--ramp", "1:2"), "--sweep and --ramp exclude each other"),
    (("--sweep", "--sweep-over", "concurrency", "--request-rate", "1"), "it takes no --request-rate"),
    (("--goodput", "ttft:x"), "--goodput names 'ttft:x'; it must be NAME:MILLISECONDS"),
    (("--goodput", "itl:5"), "with a name of ttft, sttft, tpot, e2el"),
    (("--percentile-metrics", "ttft,foo"), "--percentile-metrics names 'foo'; valid: ttft, sttft"),
    (("--metric-percentiles", "50,100"), "--metric-percentiles is '50,100'"),
    (("--base-url", "localhost:1"), "--base-url is 'localhost:1'; it must begin with http://"),
    (("--endpoint", "/v1/embeddings"), "--endpoint is '/v1/embeddings'; it must end in"),
    (("--prompt-form", "ids", "--backend", "openai-chat"), "--prompt-form ids needs /v1/completions"),
    (("--save-result", "x.csv"), "--save-result is 'x.csv'; the name must end in .json or .jsonl"),
    (("--extra-body", "[1]"), "'[1]' must be a JSON object"),
    (("--max-concurency", "3"),
     "unknown flag --max-concurency; did you mean --max-concurrency? (see `ridgeline bench serve --help`)"),
])
def test_mistakes_of_bench_serve_are_one_line(capsys, arguments, message):
    code, err = fails(capsys, *arguments)
    assert code == 2 and message in err


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize("named", [(), ("--model", "m")])
def test_no_server(capsys, named):
    code, err = fails(capsys, "--base-url", f"http://127.0.0.1:{free_port()}", *named, *FAST)
    assert code == 1 and "127.0.0.1" in err and "Connect" in err


@pytest.mark.parametrize("behaviour, flags, message", [
    (Behaviour(), ("--endpoint", "/v2/completions"), "the first request to {url}/v2/completions failed: HTTP 404: Not Found"),
    (Behaviour(status=401), (), "HTTP 401: no, thanks"),
    (Behaviour(status=503), ("--model", "m"), "HTTP 503: no, thanks"),
    (Behaviour(plain=True), (), "the answer is application/json, no stream of events"),
    (Behaviour(break_after=2), (), "the connection broke after 2 chunks"),
    (Behaviour(hang_after=1), ("--timeout", "0.2"), "no whole answer within 0.2 s"),
    (Behaviour(garbage_after=1), (), "an event is not JSON"),
    (Behaviour(error_after=1), (), "the server reports out of pages"),
])
def test_a_server_that_cannot_be_measured_is_one_line(capsys, behaviour, flags, message):
    with serving(behaviour) as peer:
        code, err = fails(capsys, "--base-url", peer.url, *FAST, *flags)
        assert code == 1 and message.format(url=peer.url) in err


@pytest.mark.parametrize("behaviour, kind", [
    (Behaviour(fails=lambda number: number % 2 == 0), "HTTP 500"),
    (Behaviour(fails=lambda number: number > 1), "HTTP 500"),
])
def test_errors_are_counted_per_request(load, behaviour, kind):
    with serving(behaviour) as peer:
        result = load(peer, "--max-concurrency", 1, "--goodput", "ttft:5000")
    summary, cell = result["cells"][0]["summary"], result["cells"][0]
    assert summary["errors"] == {kind: summary["failed"]} and summary["failed"] in (4, 8) and cell["grade"] == "invalid"
    assert summary["attainment"] == 1 - summary["failed"] / 8 and summary["first_error"] == "HTTP 500: no, thanks"
    assert result["code"] == (0 if summary["failed"] == 4 else 1)
    if summary["failed"] == 8:
        assert "no request was answered (HTTP 500: no, thanks)" in result["out"]


@pytest.mark.parametrize("behaviour, flags, kind", [
    (Behaviour(break_after=2), (), "broken stream"), (Behaviour(hang_after=2), ("--timeout", "0.3"), "timeout")])
def test_broken_streams_and_timeouts_are_counted(load, behaviour, flags, kind):
    with serving(behaviour) as peer:
        summary = load(peer, "--max-concurrency", 8, *flags, warmups=0)["cells"][0]["summary"]
    assert summary["errors"] == {kind: 8} and summary["output_tokens"] == 0


def test_the_key_goes_to_the_server_and_not_into_the_report(load, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ridgeline", "bench", "serve", "--api-key", "sesame", "--json"])
    with serving() as peer:
        result = load(peer, "--api-key", "sesame", "--max-concurrency", 2, "--extra-body", '{"top_k": 1}')
        assert peer.seen[-1].headers["authorization"] == "Bearer sesame" and peer.seen[-1].body["top_k"] == 1
    assert "sesame" not in json.dumps(result) and result["command"] == "ridgeline bench serve --api-key KEY --json"
    assert result["server"] == {"base_url": peer.url, "endpoint": "/v1/completions", "model": "known-times", "version": "9.9"}


def test_json_lines_hold_the_same_as_json(load, tmp_path, capsys):
    with serving() as peer:
        result = load(peer, "--max-concurrency", 2, "--json")
    printed = json.loads(result["out"])
    assert "requests" not in printed["cells"][0] and printed["cells"][0]["summary"]["completed"] == 8
    saved = {k: v for k, v in result.items() if k not in ("code", "out", "err")}
    report.save(saved, str(tmp_path / "r.jsonl"))
    again = report.load(str(tmp_path / "r.jsonl"))
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + 1 + 8
    first, second = saved["cells"][0], again["cells"][0]
    assert second["summary"] == first["summary"]
    assert [Record.of(r) for r in second["requests"]] == [Record.of(r) for r in first["requests"]]


def test_numbers_can_be_counted_again_from_what_was_saved(load):
    with serving() as peer:
        result = load(peer, "--request-rate", 100, "--goodput", "ttft:500")
    cell = result["cells"][0]
    again = Cell(load_arrivals(), cell["requested"], [Record.of(r) for r in cell["requests"]])
    summary = summarise(again, Wanted.of(result["wanted"]))
    for name, found in summary["latencies"].items():
        assert found["percentiles"]["50"] == pytest.approx(cell["summary"]["latencies"][name]["percentiles"]["50"], abs=2e-6)
    assert summary["attainment"] == cell["summary"]["attainment"]


def load_arrivals():
    from ridgeline.bench.serve.arrivals import OPEN, Arrivals

    return Arrivals(OPEN, 100.0)


def test_markdown_says_the_same(load, tmp_path):
    with serving() as peer:
        result = load(peer, "--max-concurrency", 2, "--markdown", tmp_path / "r.md")
    page = (tmp_path / "r.md").read_text()
    assert report.verdict(result) in page and "| TTFT |" in page and result["command"] in page


def test_a_sweep_finds_the_knee_of_a_server_with_slots(load):
    """2 slots of about 0.1 s: some 20 requests/s. Doubling from 5 ends past it, and the knee is below."""
    with serving(Behaviour(ttft_s=0.06, gap_s=0.005, slots=2)) as peer:
        result = load(peer, "--sweep", "--request-rate", 5, "--burstiness", "constant", num_prompts=20, warmups=2)
    rates = [cell["arrivals"]["rate"] for cell in result["cells"]]
    assert rates == sorted(rates) and rates[0] == 5.0 and result["cells"][-1]["saturated"] and len(rates) >= 4
    knee = result["cells"][result["knee"]["cell"]]
    assert not knee["saturated"] and 5 <= knee["arrivals"]["rate"] < 25
    assert "Carries" in result["out"] and "saturated" in result["out"] and "knee" in result["out"]


def test_a_sweep_over_clients_ends_when_tokens_no_longer_grow(load):
    with serving(Behaviour(ttft_s=0.03, gap_s=0.008, slots=2)) as peer:
        result = load(peer, "--sweep", "--sweep-over", "concurrency", num_prompts=16, warmups=2)
    clients = [cell["arrivals"]["concurrency"] for cell in result["cells"]]
    assert clients[0] == 1 and result["cells"][-1]["saturated"] and max(clients) <= 16
    assert 2 <= result["cells"][result["knee"]["cell"]]["arrivals"]["concurrency"] <= 8


def test_a_sweep_under_objectives_ends_where_too_few_meet_them(load):
    with serving(Behaviour(ttft_s=0.05, slots=1)) as peer:
        result = load(peer, "--sweep", "1,4", "--sweep-over", "concurrency", "--stagger", 0, "--goodput", "ttft:150",
                      num_prompts=12)
    assert [cell["saturated"] for cell in result["cells"]] == [False, True] and result["knee"]["cell"] == 0


INTERRUPTED = 130


def hear_interrupts() -> None:
    """A shell's background jobs ignore SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_control_c_prints_what_was_measured(tmp_path):
    path = tmp_path / "r.json"
    with serving(Behaviour(ttft_s=0.02)) as peer:
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline", "bench", "serve", "--base-url", peer.url, "--num-prompts", "5000",
             "--max-concurrency", "2", "--output-len", "4", "--num-warmups", "1", "--save-result", str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts)
        deadline = time.monotonic() + 30
        while len(peer.seen) < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED and "interrupted: what was measured until then is above" in err
    assert "Traceback" not in err and "requests answered" in out and "ended early" in out
    cell = report.load(str(path))["cells"][0]
    assert 5 <= cell["summary"]["completed"] < 5000 and cell["summary"]["interrupted"] <= 2 and cell["summary"]["failed"] == 0
    assert any("ended early" in text for text in texts(cell))


def test_counters_of_a_metrics_page():
    page = ('# HELP x y\nvllm:prefix_cache_hits_total{engine="0",model="a b"} 3.0\nvllm:prefix_cache_hits_total{engine="1"} 4\n'
            'vllm:prefix_cache_queries_total{engine="0"} 1e2\nother 5\nridgeline:prefix_cache_hits_created 9\n')
    assert parse_counters(page) == (7.0, 100.0)
    assert parse_counters("ridgeline:prefix_cache_hits 1\nridgeline:prefix_cache_queries 2\n") == (1.0, 2.0)
    assert parse_counters("nothing") is None and parse_counters("a:prefix_cache_hits x") is None


def test_a_missing_client_library_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, err = fails(capsys, *FAST)
    assert code == 2 and "pip install 'ridgeline[bench]'" in err
