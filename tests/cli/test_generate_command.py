"""`ridgeline generate` as a stranger and as a script meet it."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams

GREEDY = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos", "--threads", 1)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    llm = LLM(folder, threads=1)

    def text(prompt: Any, **options: Any) -> str:
        given = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **options}
        return llm.generate([prompt], SamplingParams(**given))[0].outputs[0].text

    return text


def test_standard_output_is_the_text_and_nothing_else(run: Any, folder: Path, expected: Any) -> None:
    for more in ((), ("--stream",)):
        ran = run("generate", folder, "-p", "The sea 🙂", *GREEDY, *more)
        assert (ran.code, ran.out) == (0, expected("The sea 🙂") + "\n")
        assert ran.err.count("\n") == 1 and all(word in ran.err for word in ("TTFT", "ITL", "tokens/s", "6 generated"))
    assert run("generate", folder, "-p", "The sea", *GREEDY, "--stream", "--echo").out.startswith("The sea")


def test_prompts_from_everywhere_in_order(run: Any, folder: Path, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("first line\nsecond 海\n", encoding="utf-8")
    (tmp_path / "many.jsonl").write_text('"a sea"\n\n{"prompt": "line\u2028separator"}\n[0, 70, 71]\n'
                                         '{"prompt_token_ids": [0, 72]}\n', encoding="utf-8")
    ran = run("generate", folder, "-p", "x", "--prompt-file", tmp_path / "one.txt", "--prompt", "y", "--prompt-file",
              tmp_path / "many.jsonl", *GREEDY, "--json")
    found = json.loads(ran.out)
    prompts = ["x", "y", "first line\nsecond 海", "a sea", "line\u2028separator", None, None]
    assert (ran.code, ran.err, [o["prompt"] for o in found]) == (0, "", prompts)
    assert [o["text"] for o in found] == [expected(p) for p in [*prompts[:5], [0, 70, 71], [0, 72]]]


def test_standard_input_is_one_prompt(run: Any, folder: Path, expected: Any) -> None:
    for data in ("two\nlines 🙂\n", "two\nlines 🙂", "two\nlines 🙂\r\n"):
        assert run("generate", folder, *GREEDY, stdin=data.encode()).out == expected("two\nlines 🙂") + "\n"


def test_several_answers_say_which_is_which(run: Any, folder: Path) -> None:
    ran = run("generate", folder, "-p", "a", "-p", "b " * 50, "--n", 2, "--max-tokens", 3, "--ignore-eos")
    heads = [line for line in ran.out.splitlines() if line.startswith("--- ")]
    assert heads[0] == "--- prompt 1, sample 1: a" and len(heads) == 4 and all(len(h) < 100 for h in heads)
    assert "12 generated" in ran.err and "median TTFT" in ran.err


def test_json(run: Any, folder: Path) -> None:
    ran = run("generate", folder, "-p", "The sea", "-p", "", *GREEDY, "--json", "--logprobs", 1, "--n", 2)
    good, bad = json.loads(ran.out)
    assert ran.code == 2 and "prompt 2: the prompt is empty" in ran.err
    for one in (good, bad):
        assert {"text", "token_ids", "finish_reason", "metrics"} <= one.keys()
        assert {"ttft_s", "tpot_s", "e2e_s", "prompt_tokens", "completion_tokens"} <= one["metrics"].keys()
    metrics = good["metrics"]
    assert good["finish_reason"] == "length" and metrics["completion_tokens"] == len(good["token_ids"]) == 6
    assert 0 < metrics["ttft_s"] < metrics["e2e_s"] and metrics["tpot_s"] > 0 and len(metrics["itl_s"]) == 5
    assert len(good["samples"]) == 2 and good["samples"][0]["text"] == good["text"]
    told = good["logprobs"]
    assert bytes(b for p in told for b in p["bytes"]).decode("utf-8", "replace") == good["text"]
    assert [p["token_id"] for p in told] == good["token_ids"] and told[0]["top_logprobs"][0]["rank"] == 1
    assert bad["error"]["type"] == "InvalidPrompt" and bad["text"] == "" and bad["finish_reason"] == "error"


def test_scoring(run: Any, folder: Path) -> None:
    ran = run("generate", folder, "-p", "a sea", "--max-tokens", 0, "--prompt-logprobs", 0, "--json")
    found = json.loads(ran.out)[0]
    assert found["token_ids"] == [] and found["prompt_logprobs"][0] is None and found["prompt_logprobs"][1]["logprob"] < 0


def test_flags_reach_the_sampler(run: Any, folder: Path, expected: Any) -> None:
    def text(*flags: object) -> str:
        return str(json.loads(run("generate", folder, "-p", "The sea", *GREEDY, "--json", *flags).out)[0]["text"])

    assert text("--logit-bias", '{"32": 90}', "--presence-penalty", 1.5) == "=" * 6
    assert text("--logit-bias", '{"32": 90}', "--bad-words", "=") != "=" * 6
    assert text("--allowed-token-ids", 32, 33).strip("=>") == ""
    assert text("--logit-bias", '{"32": 90}', "--stop", "===", "--include-stop-str-in-output") == "==="
    assert text("--logit-bias", '{"32": 90}', "--stop", "===") == ""
    assert text("--speculative-config", '{"method": "ngram"}', "--max-num-batched-tokens", 8) == expected("The sea")


def test_a_model_without_a_tokenizer_prints_ids(run: Any, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text("[5, 6, 7]\n")
    whole = run("generate", bare, "--prompt-file", tmp_path / "ids.jsonl", *GREEDY)
    assert whole.code == 0 and len(whole.out.split()) == 6 and all(t.isdigit() for t in whole.out.split())
    for flags in ((), ("--speculative-config", '{"method": "ngram"}', "--logit-bias", '{"9": 90}')):
        found = [run("generate", bare, "--prompt-file", tmp_path / "ids.jsonl", *GREEDY, *flags, *more).out.split()
                 for more in ((), ("--stream",))]
        assert found[0] == found[1] and (not flags or found[0] == ["9"] * 6)


@pytest.mark.parametrize(("flags", "words"), [
    (("-p", ""), "empty"), (("-p", "x", "--max-tokens", 0), "nothing would come back"), (("-p", "x", "--top-p", 3), "top_p"),
    (("-p", "x", "--max-tokens", 2, "--min-tokens", 3), "min_tokens <= max_tokens"),
    (("-p", "x", "--temperature", "nan"), "temperature"),
    (("-p", "a " * 400), "at most 255"), (("-p", "x", "--logprobs", 50), "max_logprobs"), (("-p", "\udcff"), "surrogate"),
    (("-p", "x", "--logit-bias", "{"), "not JSON"), (("-p", "x", "--logit-bias", "[1]"), "must be a JSON object"),
    (("-p", "x", "--logit-bias", '{"a": 1}'), "--logit-bias"), (("-p", "x", "--logit-bias", '{"5": "b"}'), "logit_bias"),
    (("-p", "x", "--logit-bias", '{"999": 1}'), "out of range"), (("-p", "x", "--allowed-token-ids", 320), "out of range"),
    (("--prompt-file", "nosuch.txt"), "nosuch.txt"), (("--prompt-file", "BAD"), "byte 0xff at offset 2"),
    (("--prompt-file", "DIR"), "directory"), (("--prompt-file", "EMPTY"), "empty"),
    (("--prompt-file", "NONE.jsonl"), "no prompt"),
    (("--prompt-file", "WRONG.jsonl"), "line 2"), (("--prompt-file", "NUMBER.jsonl"), "line 1"),
    (("-p", "x", "--stream", "--json"), "--stream"), (("-p", "x", "-p", "y", "--stream"), "there are 2"),
    (("-p", "x", "--dtype", "int4"), "dtype is 'int4'"), (("-p", "x", "--device", "warp"), "device 'warp'"),
    (("-p", "x", "--scheduling-policy", "lifo"), "fcfs"),
    (("-p", "x", "--speculative-config", '{"method": "x"}'), "valid: ngram"),
    (("-p", "x", "--chat-template", "nosuch.jinja"), "nosuch.jinja"), (("-p", "x", "--max-model-len", 0), "max_model_len is 0"),
    (("-p", "x", "--max-token", 5), "did you mean --max-tokens"), (("-p", "x", "--max-tokens", "many"), "--max-tokens"),
    (("-p", "x", "y"), "an argument too many: y"), (("-p",), "expected one argument")], ids=lambda value: str(value)[:40])
def test_mistakes_are_one_line_and_exit_2(run: Any, folder: Path, tmp_path: Path, flags: tuple[Any, ...], words: str) -> None:
    files = {"BAD": b"ok\xff", "EMPTY": b"", "NONE.jsonl": b"\n\n", "WRONG.jsonl": b'"a"\n{"prompt"\n', "NUMBER.jsonl": b"5\n"}
    (tmp_path / "DIR").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    ran = run("generate", folder, *(tmp_path / f if f in {*files, "DIR"} else f for f in flags))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("ridgeline: error: ") and ran.err.count("\n") == 1 and words in ran.err, ran.err


def test_bad_standard_input(run: Any, folder: Path) -> None:
    ran = run("generate", folder, stdin=b"ab\xc3(")
    assert (ran.code, ran.out) == (2, "") and "standard input is not UTF-8: byte 0xc3 at offset 2" in ran.err
    assert "empty" in run("generate", folder, stdin=b"\n").err


def test_wrong_models(run: Any, folder: Path, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "mamba9"}')
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x05")
    (tmp_path / "other.gguf").write_bytes(b"not a model at all")
    cases = [("nosuch", "no such folder or file"), ("gemma3-270", "did you mean gemma3-270m"),
             (tmp_path / "none", "no *.safetensors"), (tmp_path / "odd", "config.json"),
             (tmp_path / "cut.gguf", "cut.gguf"), (tmp_path / "other.gguf", "other.gguf"),
             (bare, "no tokenizer")]
    for model, words in cases:
        ran = run("generate", model, "-p", "x", *(["--load-format", "dummy"] if model == tmp_path / "odd" else []))
        words = "known: " if model == tmp_path / "odd" else words
        assert (ran.code, ran.out) == (2, "") and words in ran.err and ran.err.count("\n") == 1, ran.err


def test_a_fault_of_the_engine_is_exit_1(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.runner import Runner

    def fail(*_: object) -> None:
        raise FloatingPointError("a fault")

    monkeypatch.setattr(Runner, "execute", fail)
    ran = run("generate", folder, "-p", "x")
    assert ran.code == 1 and "a fault" in ran.err
