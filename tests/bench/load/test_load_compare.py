"""`ridgeline bench compare`: real differences are told from chance, different questions are not compared."""
from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from ridgeline.bench.serve import stats
from ridgeline.bench.serve.compare import NONE_SHOWN, compare
from ridgeline.bench.serve.record import Record
from ridgeline.cli import main
from ridgeline.errors import ConfigError


def result(seed: int, slower: float = 1.0, count: int = 120, failing: int = 0) -> dict[str, Any]:
    """One client after another; times are log-normal around 100 ms to the first token and 10 ms a token."""
    draw, clock, requests = random.Random(seed), 0.0, []
    for i in range(count):
        first = clock + slower * 0.1 * draw.lognormvariate(0, 0.3)
        gap = slower * 0.01 * draw.lognormvariate(0, 0.1)
        record = Record(i, 0, 50, 8, clock, clock, first + 7 * gap, times=[first + k * gap for k in range(8)], tokens=[1] * 8,
                        counted="usage", prompt_tokens=50)
        if i < failing:
            record.error_kind = record.error = "timeout"
        clock = record.ended
        requests.append(record.as_json())
    return {"kind": "ridgeline bench serve", "version": 1, "salt": "s", "command": "x",
            "server": {"base_url": f"http://{seed}", "endpoint": "/v1/completions", "model": f"m{seed}", "version": None},
            "client": {"cpu": "c", "cores": 2, "load": 0.0, "python": "3", "aiohttp": "3", "ridgeline": "0"},
            "workload": {"spec": {"dataset": "random", "input_len": 50}, "num_prompts": count, "ignore_eos": False,
                         "body": {"temperature": 0.0}},
            "wanted": {"metrics": ["ttft"], "percentiles": [50], "goodput_ms": {"ttft": 130.0}},
            "cells": [{"arrivals": {"kind": "closed", "name": "1 client", "short": "1 client", "concurrency": 1,
                                    "stagger_s": 0.0}, "warmups": 1, "grade": "valid",
                       "summary": {"steady_window_s": [0.0, clock]}, "requests": requests}]}


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in found["cells"][0]["rows"]}


def test_no_difference_is_shown_between_runs_of_the_same():
    """Twenty pairs, twelve rows each, at a level of 99 %: two or three false alarms are expected, a dozen are not."""
    alarms = sum(verdict != NONE_SHOWN for pair in range(20)
                 for verdict in verdicts(compare(result(pair), result(100 + pair))).values())
    assert alarms <= 10


def test_a_fifth_slower_is_a_difference():
    found = compare(result(1), result(2, slower=1.2))
    told = verdicts(found)
    for name in ("median_ttft_ms", "mean_ttft_ms", "median_tpot_ms", "median_itl_ms", "mean_e2el_ms"):
        assert told[name] == "B is higher: worse", name
    assert told["output_tokens_per_s"] == "B is lower: worse" and told["attainment"] == "B is lower: worse"
    assert told["failed"] == NONE_SHOWN
    rows = {row["name"]: row for row in found["cells"][0]["rows"]}
    low, high = rows["mean_tpot_ms"]["interval"]
    assert low < 1.2 < high and rows["mean_tpot_ms"]["ratio"] == pytest.approx(1.2, abs=0.05)
    faster = verdicts(compare(result(2, slower=1.2), result(1)))
    assert faster["median_ttft_ms"] == "B is lower: better" and faster["output_tokens_per_s"] == "B is higher: better"


def test_failures_are_compared_as_shares():
    rows = {row["name"]: row for row in compare(result(1), result(2, failing=40))["cells"][0]["rows"]}
    assert rows["failed"]["kind"] == "difference" and rows["failed"]["verdict"] == "B is higher: worse"
    assert rows["failed"]["b"] == pytest.approx(100 / 3)


def test_few_requests_show_nothing():
    told = verdicts(compare(result(1, count=6), result(2, slower=2.0, count=6)))
    assert told["median_ttft_ms"] == "fewer than 10 samples on a side"


def save(tmp_path, **sides: dict[str, Any]) -> list[str]:
    for name, found in sides.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return [str(tmp_path / f"{name}.json") for name in sides]


def test_different_workloads_are_refused_by_name(tmp_path, capsys):
    a, b = result(1), result(2)
    b["workload"]["spec"]["input_len"], b["workload"]["body"]["temperature"] = 60, 1.0
    b["cells"][0]["arrivals"]["concurrency"] = 2
    paths = save(tmp_path, a=a, b=b)
    assert main(["bench", "compare", *paths]) == 2
    err = capsys.readouterr().err
    for part in ("spec.input_len is 50 in A and 60 in B", "body.temperature is 0.0 in A and 1.0 in B",
                 "concurrency is 1 in A and 2 in B", "--force"):
        assert part in err
    assert err.count("\n") == 1 and "salt" not in err and "m2" not in err       # servers may differ, and words must
    assert main(["bench", "compare", *paths, "--force", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["differs"]) == 3


def test_the_table_names_both_sides(tmp_path, capsys):
    assert main(["bench", "compare", *save(tmp_path, a=result(1), b=result(2, slower=1.5))]) == 0
    out = capsys.readouterr().out
    assert "A  m1 at http://1" in out and "B  m2 at http://2" in out and "B is higher: worse" in out and "99 % interval" in out


def test_sweeps_are_compared_load_by_load():
    sweeps = []
    for seed, loads in ((1, (1, 2, 4)), (2, (2, 4, 8))):
        whole = result(seed)
        cells = [copy.deepcopy(whole["cells"][0]) for _ in loads]
        for cell, clients in zip(cells, loads):
            cell["arrivals"] |= {"concurrency": clients, "name": f"{clients} clients", "short": f"{clients} clients"}
        sweeps.append({**whole, "cells": cells})
    assert [cell["load"] for cell in compare(*sweeps)["cells"]] == ["2 clients", "4 clients"]
    sweeps[1]["cells"] = sweeps[1]["cells"][2:]
    with pytest.raises(ConfigError, match="no load was measured in both"):
        compare(*sweeps)


@pytest.mark.parametrize("content, message", [
    ("{", "is no result that `bench serve --save-result` wrote"), ("[]", "is no result"),
    ('{"kind": "other", "version": 1}', "is a result of other, version 1"), (None, "cannot be read")])
def test_files_that_are_no_results(tmp_path, capsys, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "compare", str(path), str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_intervals_cover_the_truth_nineteen_times_in_twenty():
    draw = random.Random(0)
    hits = 0
    for _ in range(100):
        low, high = stats.interval([draw.gauss(5, 1) for _ in range(60)], "mean") or (0, 0)
        hits += low <= 5 <= high
    assert 88 <= hits <= 100


def test_an_interval_over_gaps_draws_whole_requests():
    """Gaps within a request are equal here: 10 requests tell no more than 10 gaps do."""
    values = [v for v in range(10) for _ in range(50)]
    grouped = stats.interval(values, "mean", [v for v in range(10) for _ in range(50)])
    alone = stats.interval(values, "mean")
    assert grouped is not None and alone is not None
    assert grouped[1] - grouped[0] > 4 * (alone[1] - alone[0])
    assert stats.interval([1.0] * 4, "mean") is None
