from __future__ import annotations

import json

import pytest

from ridgeline.bench import measure
from ridgeline.bench.work import parse_work
from ridgeline.cli import main
from ridgeline.llm import LLM

DUMMY = ("--load-format", "dummy", "--threads", "1")
RESULT = {"work", "tokens_per_s", "lowest_tokens_per_s", "highest_tokens_per_s", "limit_tokens_per_s", "share_of_limit",
          "bound", "sequences", "prompt_tokens", "tokens", "passes", "bytes_per_pass", "operations_per_pass",
          "head_rows_scored", "repeats"}


@pytest.mark.parametrize("flags", [("--quantization", "int8"), ("--quantization", "int4"), ("--backend", "torch")])
def test_latency_prints_one_object(model, capsys, flags):
    assert main(["bench", "latency", model(), "--work", "pp40,tg6,d3,tg4@70", "--repeat", "2", "--json", *DUMMY, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "model", "results"}
    assert found["machine"]["bandwidth_bytes_per_s"] > 1e8 and found["machine"]["peak_ops_per_s"] > 1e8
    assert found["machine"]["threads"] == 1
    assert found["model"]["backend"] == ("torch" if "torch" in flags else "native")
    assert [r["work"] for r in found["results"]] == ["pp40", "tg6", "d3", "tg4@70"]
    for result in found["results"]:
        assert set(result) == RESULT and result["repeats"] == 2
        assert 0 < result["lowest_tokens_per_s"] <= result["tokens_per_s"] <= result["highest_tokens_per_s"]
        assert result["share_of_limit"] == pytest.approx(result["tokens_per_s"] / result["limit_tokens_per_s"])
    pruned = {r["work"]: r["head_rows_scored"] for r in found["results"]}
    if "torch" in flags:
        assert set(pruned.values()) == {None}
    else:                      # greedy decoding of few rows scores the leading candidate and what could still beat it
        assert pruned["tg6"] is None or 1 / 512 <= pruned["tg6"] <= 1
    assert [(r["tokens"], r["passes"]) for r in found["results"]] == [(40, 1), (6, 6), (3 * 48, 48), (4, 4)]


def test_latency_prints_a_table_with_both_limits(model, capsys):
    assert main(["bench", "latency", model(), "--work", "pp8", "--repeat", "1", *DUMMY]) == 0
    out = capsys.readouterr().out
    assert " GB/s, computes " in out and "passes   of at most 512 rows" in out and "figures  one run" in out
    head, row = next((a.split(), b.split()) for a, b in zip(out.splitlines(), out.splitlines()[1:]) if a.startswith("work "))
    assert head[:6] == ["work", "tokens/s", "lowest", "highest", "limit", "share"] and row[0] == "pp8"
    assert row[5].endswith("%")


def test_throughput(model, capsys):
    flags = ["--num-prompts", "5", "--input-len", "20", "--output-len", "3", "--max-num-seqs", "2"]
    assert main(["bench", "throughput", model(), *flags, "--json", *DUMMY]) == 0
    result, = json.loads(capsys.readouterr().out)["results"]
    assert set(result) == RESULT | {"output_len", "requests_per_s", "total_tokens_per_s", "seconds", "median_ttft_s",
                                    "median_itl_s", "preemptions"}
    assert result["tokens"] == 15 and result["tokens_per_s"] == pytest.approx(15 / result["seconds"])
    assert result["total_tokens_per_s"] == pytest.approx(5 * 23 / result["seconds"])
    assert main(["bench", "throughput", model(), *flags, *DUMMY]) == 0
    assert "5 prompts of 20 tokens, 3 generated each" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (("latency", "--work", "pp512,xx"), "--work names 'xx'; valid: ppN"),
    (("latency", "--work", "d8,d8"), "--work names 'd8' twice"),
    (("latency", "--work", "pp8,tg32@4096"), "work tg32@4096 does not fit: a sequence takes 4129 positions, and the context"),
    (("latency", "--work", "pp100", "--max-model-len", "50"), "is 50"),
    (("latency", "--work", "d600"), "work d600 decodes 600 rows in a pass; --max-num-batched-tokens is 512"),
    (("latency", "--repeat", "0"), "--repeat is 0; it must be an integer of at least 1"),
    (("latency", "--num-prompts", "3"), "--num-prompts is a flag of `bench throughput`; `bench latency` takes --work"),
    (("throughput", "--work", "pp8"), "--work is a flag of `bench latency`"),
    (("throughput", "--num-prompts", "3"), "`bench throughput` needs --input-len, --output-len"),
    (("throughput", "--num-prompts", "1", "--input-len", "2000", "--output-len", "9"), "a sequence takes 2009 positions"),
    (("latency", "--work", "d4", "--kv-cache-memory-bytes", "100000", "--max-model-len", "190"),
     "tokens does not hold 4 sequences of 179 together; give it more --kv-cache-memory-bytes"),
])
def test_mistakes_are_one_line(model, capsys, arguments, message):
    assert main(["bench", arguments[0], model(), *arguments[1:], *DUMMY]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_passes_of_a_batched_decode_hold_every_sequence(model):
    """Prompts of 128 tokens come in pieces of 64 rows, and the first sequence decodes long before the last."""
    llm = LLM(model(), load_format="dummy", max_num_batched_tokens=64, max_num_seqs=3, enable_prefix_caching=False)
    work, = parse_work("d3")
    run = measure.run_once(llm, work, measure.prompts_of(llm, work))
    assert len(run.passes) == 48
    for index, rows in enumerate(run.passes):
        assert len(rows) == 3 and all(r.tokens == r.wanted == 1 for r in rows)
        assert min(r.start for r in rows) == 128 + index
    assert not llm.engine.has_work


def test_a_prefill_wants_the_head_for_its_last_row_only(model):
    llm = LLM(model(), load_format="dummy", max_num_batched_tokens=64, enable_prefix_caching=False)
    work, = parse_work("pp150")
    run = measure.run_once(llm, work, measure.prompts_of(llm, work))
    assert [rows[0][:3] for rows in run.passes] == [(0, 64, 0), (64, 64, 0), (128, 22, 1)]
    assert run.tokens == 150
