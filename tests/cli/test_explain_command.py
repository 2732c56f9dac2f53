"""`ridgeline explain`: the object it prints, its files, its mistakes."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from explain_kit import MACHINE
from ridgeline.analysis import this_machine

DATA = Path(__file__).parents[1] / "data"
STAGE = {"stage", "batch", "context", "tokens", "flops", "bytes", "intensity", "ridge", "bound", "predicted_s", "measured_s",
         "share_of_roof", "components"}
COMPONENT = {"component", "flops", "bytes", "intensity", "ridge", "bound", "roof_s", "predicted_s", "measured_s",
             "share_of_roof"}


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration takes seconds and is tested by itself."""
    monkeypatch.setattr(this_machine, "machine_for", lambda *_, **__: MACHINE)
    monkeypatch.setattr(this_machine, "speed_of", lambda _: None)


def test_the_object(run: Any, folder: Path) -> None:
    ran = run("explain", folder, "--batch", 2, "--context", 48, "--output", 12, "--threads", 1, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert {"hardware", "stages", "waterfall", "advice"} <= set(found)
    assert [s["stage"] for s in found["stages"]] == ["prefill", "decode"]
    for stage in found["stages"]:
        assert set(stage) >= STAGE and all(set(one) >= COMPONENT for one in stage["components"])
        assert stage["bound"] in ("compute", "memory", "kv", "overhead") and stage["measured_s"] > 0
        measured = {one["component"]: one["measured_s"] for one in stage["components"]}
        assert measured["attention.core"] > 0 and measured["mlp.up"] > 0
    assert (found["stages"][0]["tokens"], found["stages"][1]["tokens"]) == (48, 2)
    fall = found["waterfall"]
    assert sum(fall["parts"].values()) == pytest.approx(fall["wall_s"] * (1 - fall["residual_share"]))
    for advice in found["advice"]:
        assert {"lever", "predicted_gain", "verified_gain", "interval", "reason", "cost"} <= set(advice)
    assert any(row["measured_itl_s"] for row in found["sweeps"]["batch"])
    assert found["verdict"].startswith("Prefill of 48 tokens is bound by")


def test_the_files(run: Any, folder: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("r.html", "r.md", "r.json")]
    reports = [word for path in files for word in ("--report", path)]
    trace = tmp_path / "trace.json"
    ran = run("explain", folder, "--context", 32, "--output", 8, "--threads", 1, *reports, "--perfetto", trace)
    assert ran.code == 0, ran.err
    assert "decode, by component" in ran.out and "levers" in ran.out and "where the time goes" in ran.out
    assert files[0].read_text().startswith("<!doctype html>") and files[1].read_text().startswith("# Explain: ")
    assert json.loads(files[2].read_text())["kind"] == "ridgeline explain"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"step", "forward", "attention.core", "mlp.down"} <= {e["name"] for e in events}


def plan(run: Any, tmp_path: Path, *flags: object) -> dict[str, Any]:
    """Llama-3.1-70B's public shape, of which nothing but the config is there."""
    (tmp_path / "config.json").write_text((DATA / "llama-3.1-70b.json").read_text())
    ran = run("explain", tmp_path, "--hardware", "H100", "--json", *flags)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_a_plan_says_what_does_not_fit(run: Any, tmp_path: Path) -> None:
    found = plan(run, tmp_path)
    assert found["verdict"].startswith(
        "It does not fit: weights and cache need 141.3 GB, H100 has 80.0 GB, 61.3 GB are missing")
    assert found["badges"][0][0] == "invalid" and found["waterfall"] is None
    assert not any(stage["measured_s"] for stage in found["stages"])
    parallel = next(a for a in found["advice"] if a["lever"].startswith("tensor parallel"))
    assert 1.5 < parallel["predicted_gain"] < 2


def test_a_plan_with_four_bits_on_two_devices(run: Any, tmp_path: Path) -> None:
    found = plan(run, tmp_path, "--quantization", "int4", "-tp", 2, "--batch", 8)
    limits = found["limits"]
    assert limits["batch_compute"] < limits["batch_stops"] < limits["batch_kv"]
    assert found["memory"]["fits"] and 19e9 < found["memory"]["weights"] < 22e9
    names = {one["component"] for one in found["stages"][1]["components"]}
    assert {"attention.allreduce", "mlp.allreduce", "head.allgather"} <= names
    assert found["stages"][1]["predicted_s"] == pytest.approx(found["sweeps"]["batch"][3]["itl_s"], rel=0.01)


def test_stored_weights_are_planned_as_they_are(run: Any, folder: Path) -> None:
    ran = run("explain", folder, "--hardware", "a100", "--context", 64, "--output", 8, "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and found["model"]["weight_types"] == ["f32"] and found["hardware"]["name"] == "A100-80GB"
    assert run("explain", folder, "--hardware", "list").out.startswith("name")


def test_levers_named_alone_are_verified(run: Any, folder: Path) -> None:
    ran = run("explain", folder, "--context", 32, "--output", 8, "--threads", 1, "--json", "--verify", "--levers", "prefix",
              "--rounds", 5)
    found = json.loads(ran.out)
    assert [v["lever"] for v in found["verification"]] == ["prefix cache"]
    assert [a["lever"] for a in found["advice"] if a["verified_gain"] is not None] == ["prefix cache"]


@pytest.mark.parametrize("arguments, message", [
    (["--batch", 0], "--batch is 0; it must be an integer of at least 1"),
    (["--context", 250, "--output", 40], "needs 290 positions; the context of the model is 256"),
    (["--report", "r.pdf"], "--report is 'r.pdf'; the name must end in .html, .md, .json"),
    (["-tp", 2], "it plans for a machine that --hardware names"),
    (["--hardware", "H100", "--verify"], "--verify measures on this machine"),
    (["--hardware", "H1000"], "H1000"),
    (["--verify", "--levers", "batch,heads"], "--levers names 'heads'; valid: batch, quantization, kv_cache_dtype, ngram"),
    (["--batch", 600, "--context", 8, "--output", 8], "a pass has at most 512 rows"),
])
def test_mistakes_are_one_line(run: Any, folder: Path, arguments: list[object], message: str) -> None:
    ran = run("explain", folder, *arguments)
    assert ran.code == 2 and message in ran.err and ran.err.count("\n") == 1
