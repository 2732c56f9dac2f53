"""A/B runs: interleaved, paired by round, with an interval; and a verdict about the prediction."""
from __future__ import annotations

import pytest

from explain_kit import MACHINE
from ridgeline import LLM
from ridgeline.analysis import verify
from ridgeline.analysis.advise import Advice, Question
from ridgeline.analysis.explain import Findings, explain
from ridgeline.analysis.read import spec_of
from ridgeline.analysis.subject import Subject
from ridgeline.config import EngineConfig
from ridgeline.loading import describe
from tiny_checkpoint import write_checkpoint


def test_rounds_are_interleaved_and_paired() -> None:
    """Drift that slows both sides tenfold on the way leaves the gain alone."""
    calls: list[str] = []

    def side(name: str, seconds: float):
        def run() -> float:
            calls.append(name)
            return seconds * (1 + (len(calls) - 1) // 2)
        return run

    gains = verify.interleaved(side("a", 3.0), side("b", 2.0), 4)
    assert gains == pytest.approx([1.5] * 4)
    assert "".join(calls) == "ab" + "ba" + "ab" + "ba" + "ab"


@pytest.mark.parametrize("predicted, realised, right", [
    (1.5, 1.2, True), (1.5, 0.9, False), (0.7, 0.8, True), (1.0, 1.04, True), (1.01, 0.97, True), (1.0, 1.2, False)])
def test_signs(predicted: float, realised: float, right: bool) -> None:
    assert verify.same_sign(predicted, realised) is right


def test_an_outcome_is_close_within_a_quarter() -> None:
    advice = Advice("x", "ITL", 2.0, "", "", verified_gain=1.6, interval=(1.5, 1.7))
    found = verify.outcome(advice, 5)
    assert found["close"] and found["sign_right"] and found["error"] == pytest.approx(-0.2)
    advice.verified_gain = 1.4
    assert not verify.outcome(advice, 5)["close"]
    grade, text = verify.summary([found, {"lever": "y", "skipped": "no room"}])
    assert grade == "valid" and text.startswith("1 levers tried: 1 went")


def test_every_lever_of_the_engine_runs(tmp_path) -> None:
    """All levers on a tiny model: each gets a gain and an interval, and the engine is as it was afterwards."""
    folder = str(write_checkpoint(tmp_path, max_position_embeddings=1024))
    config = {"threads": 1, "max_num_seqs": 32, "max_num_batched_tokens": 128}
    llm = LLM(folder, **config)
    resolved = EngineConfig.of(config)
    subject = Subject(spec_of(llm.loaded, describe(folder, resolved), resolved), MACHINE, 128)
    found: Findings = explain(subject, Question(1, 140, 16), llm=llm, model={"name": "tiny"})
    verify.verify(found, llm, folder, config, rounds=5)
    verified = {v["lever"].split(":")[0].split(" ")[0]: v for v in found.result["verification"]}
    assert {"batch", "weights", "KV", "prefix", "speculation", "chunks"} <= set(verified)
    for one in found.result["verification"]:
        low, high = one["interval"]
        assert 0 < low <= one["realised_gain"] <= high
    told = {a["lever"]: a for a in found.result["advice"]}
    assert all(told[v["lever"]]["verified_gain"] == v["realised_gain"] for v in found.result["verification"])
    assert all(a["verified_gain"] is None for a in found.result["advice"] if not a["verifiable"])
    for name in ("KV cache int8", "weights int4"):
        assert "quality: KL" in told[name]["cost"] and "less memory" in told[name]["cost"]
    assert llm.engine.scheduler.max_tokens == 128 and not llm.engine.has_work
    assert "levers tried" in found.result["badges"][-1][1]


def test_what_does_not_fit_is_said_and_skipped(tmp_path) -> None:
    folder = str(write_checkpoint(tmp_path))
    llm = LLM(folder, threads=1, max_num_seqs=2)
    bench = verify.Bench(llm, folder, {"threads": 1, "max_num_seqs": 2}, Question(1, 32, 8))
    with pytest.raises(Exception, match="8 sequences of 40 positions do not fit this configuration"):
        bench.decoding(llm, 8)


def test_the_command_names_what_there_is() -> None:
    from ridgeline.cli.explain import VERIFIABLE

    assert set(VERIFIABLE) == set(verify.SIDES)
