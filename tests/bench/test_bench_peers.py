from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.peers import compare, engines


def run(rate: float, limit: float) -> dict:
    return {"results": [{"work": "tg4", "tokens_per_s": rate, "limit_tokens_per_s": limit}]}


def test_medians_and_ratios():
    theirs = [{"tokens_per_s": {"tg4": [rate]}} for rate in (4.0, 5.0, 90.0)]
    row = compare.row(0, "tg4", [run(10, 40), run(30, 50), run(20, 45)], {"llama.cpp": theirs})
    assert row["engines"]["ridgeline"] == {"tokens_per_s": 20, "runs": [10, 30, 20]}
    assert row["engines"]["llama.cpp"]["tokens_per_s"] == 5
    assert row["ratios"] == {"llama.cpp": 4} and row["limit_tokens_per_s"] == 50 and row["share_of_limit"] == 0.4


def test_a_peer_that_cannot_read_the_model_is_named_and_the_engine_still_runs(model, capsys):
    """The last line is the JSON object; the table above it has no column for the peer."""
    code = compare.main([model(), "--work", "pp8,tg4", "--repeat", "1", "--threads", "1", "--json",
                       "--engine-args=--load-format dummy --quantization int8"])
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    result = json.loads(last)
    assert code == 0 and "llama.cpp  reads .gguf files only" in text and "ridgeline / llama.cpp" not in text
    assert result["peers"] == [{"peer": "llama.cpp", "installed": False, "reason": result["peers"][0]["reason"]}]
    assert [row["work"] for row in result["results"]] == ["pp8", "tg4"]
    assert all(row["engines"].keys() == {"ridgeline"} and row["ratios"] == {} for row in result["results"])
    assert result["model"]["quantization"] == "int8" and result["machine"]["threads"] == 1


def test_each_peer_reads_its_own_kind_of_model(tmp_path):
    """A folder is no GGUF file, an empty one no export and no checkpoint; each says what it reads."""
    for name, reason in (("llama.cpp", "reads .gguf files only"), ("openvino", "has no openvino_model.xml"),
                         ("vllm", "has no config.json")):
        with pytest.raises(engines.PeerError, match=reason):
            engines.Peer(name, "python3", tmp_path).check()


def test_a_peer_that_is_not_installed_says_for_which_python(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(engines.PeerError, match="not installed for /no/such/python: /no/such/python cannot be run"):
        engines.parse_peer("llama.cpp=/no/such/python", tmp_path / "model.gguf").check()


def test_a_peer_may_have_a_model_of_its_own():
    assert engines.parse_peer("vllm=python3,folder", Path("model.gguf")) == engines.Peer("vllm", "python3", Path("folder"))
    assert engines.parse_peer("llama.cpp=python3", Path("model.gguf")).path == Path("model.gguf")


@pytest.mark.parametrize("text", ["llamacpp=python3", "llama.cpp", "llama.cpp="])
def test_a_wrong_peer_is_told_the_names(text):
    with pytest.raises(engines.PeerError, match=r"expected NAME=PYTHON.*llama.cpp, openvino, vllm"):
        engines.parse_peer(text, Path("model.gguf"))


@pytest.mark.parametrize("work, engine_args, message", [
    ("pp8,what", "", "--work names 'what'; valid"),
    ("pp8", "--load-format dummy --no-such-flag", "unknown flag --no-such-flag"),
])
def test_mistakes_end_with_one_line(model, capsys, work, engine_args, message):
    assert compare.main([model(), "--work", work, f"--engine-args={engine_args}"]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1] and "Traceback" not in err
