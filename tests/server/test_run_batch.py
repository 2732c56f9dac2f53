"""`ridgeline run-batch`: answers as the server's, errors in their lines, and a second run does only what is left."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli import main


def request(name: str, prompt: Any, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url,
            "body": {"prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **body}}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({entry["custom_id"] for entry in found}) == len(found)
    return {entry["custom_id"]: entry["response"] for entry in found}


def test_a_batch_is_answered_and_resumed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"{i} the sea" for i in range(20)]
    lines = [request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    lines += [{"custom_id": "chat", "url": "/v1/chat/completions", "body": {
        "messages": [{"role": "user", "content": "The sea"}], "max_tokens": 3}},
        {"custom_id": "embed", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["run-batch", str(folder), "-i", str(source), "-o", str(output), "--threads", "1", "--max-num-seqs", "4"]
    assert main(command) == 0
    first = read(output)
    llm = LLM(folder, threads=1)
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert [first[f"r{i}"]["body"]["choices"][0]["text"] for i in range(20)] == [o.outputs[0].text for o in expected]
    assert first["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(first["embed"]["body"]["data"][0]["embedding"]) == 32
    # The last line was cut when the first run was killed; the rest must not be run again.
    kept = output.read_text().splitlines(keepends=True)
    output.write_text("".join(kept[:-3]) + kept[-3][:40])
    assert main(command) == 0
    assert output.read_text().startswith("".join(kept[:-3]))
    assert read(output).keys() == first.keys()
    assert "22 requests, 19 answered before" in capsys.readouterr().err
    assert main(command) == 0                                # nothing left


def test_errors_are_in_their_lines(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [request("good", "The sea"), request("long", [7] * 300), request("typed", "x", temperature="hot"),
             request("other", "x", model="gpt-9"), request("path", "x", url="/v1/images"), request("stream", "x", stream=True),
             {"custom_id": "bare", "url": "/v1/completions"}, request("named", "x", model="tiny")]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert main(["run-batch", str(folder), "-i", str(source), "-o", str(output), "--threads", "1",
                 "--served-model-name", "tiny"]) == 1
    assert {name: entry["status_code"] for name, entry in read(output).items()} == {
        "good": 200, "long": 400, "typed": 400, "other": 404, "path": 404, "stream": 400, "bare": 400, "named": 200}
    assert "the context of 256" in read(output)["long"]["body"]["error"]["message"]
    assert "6 of 8 requests failed" in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [
    ("{", "line 1: not JSON"), ("[]", "expected an object with custom_id"), ('{"custom_id": 5}', "expected an object"),
    ('{"custom_id": "a"}\n\n{"custom_id": "a"}', "line 3: custom_id 'a' is also that of line 1"),
    ('{"custom_id": "a", "body": {}}', "the first request names none"),
])
def test_files_that_are_no_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    assert main(["run-batch", "-i", str(source), "-o", str(output)]) == 2
    assert message in capsys.readouterr().err and not output.exists()


def test_an_output_that_is_something_else_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in.jsonl", [request("a", "x")]), tmp_path / "notes.txt"
    output.write_text("my notes\nmore")
    assert main(["run-batch", "m", "-i", str(source), "-o", str(output)]) == 2
    assert "give another output file" in capsys.readouterr().err and output.read_text() == "my notes\nmore"
