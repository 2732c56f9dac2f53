"""`ridgeline quantize`: from a float folder to one that runs, and every mistake in one line."""
from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from ridgeline.cli import main
from tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("float") / "model", hidden_size=64, intermediate_size=96,
                            num_attention_heads=4)


def test_a_folder_that_generates(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "four"
    assert main(["quantize", str(source), str(out)]) == 0
    told = capsys.readouterr().out
    assert "linear layers                       14" in told and "embeddings and head                  2" in told
    assert f"written to {out}" in told
    before, after = ((p / "model.safetensors").stat().st_size for p in (source, out))
    assert after < 0.3 * before                       # from 32 bits to 4.5 and 8.5
    for folder in (source, out):
        flags = ["--prompt", "The sea", "--max-tokens", "4", "--temperature", "0", "--strict-native"]
        assert main(["generate", str(folder), *flags]) == 0
    assert main(["info", str(out)]) == 0
    assert "INT4" in capsys.readouterr().out


def test_other_recipes(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The keeper of the lighthouse opened the door, and the wind came in. 灯台守は扉を開けた。" * 60)
    own, eight, plain = tmp_path / "own", tmp_path / "eight", tmp_path / "plain"
    assert main(["quantize", str(source), str(own), "--calibration", str(text), "--keep-embeddings"]) == 0
    assert main(["quantize", str(source), str(eight), "--quantization", "int8", "--group-size", "64"]) == 0
    assert main(["quantize", str(source), str(plain), "--method", "nearest", "--keep-embeddings"]) == 0
    up = "model.layers.0.mlp.up_proj.weight_packed"
    words = {folder: load_file(folder / "model.safetensors")[up] for folder in (own, eight, plain)}
    assert [w.shape[1] for w in words.values()] == [8, 16, 8]
    assert (words[own] != words[plain]).any()


@pytest.mark.parametrize(("flags", "message"), [
    (["--quantization", "int3"], "quantization is 'int3'; valid: int4, int8"),
    (["--group-size", "48"], "group_size is 48; valid: 32, 64, 128"),
    (["--method", "magic"], "method is 'magic'; valid: calibrated, search, nearest"),
    (["--calibration", "nowhere.txt"], "calibration file 'nowhere.txt' cannot be read: No such file"),
    (["--quantization", "int8", "--calibration", "x"], "--calibration is for --quantization int4 --method calibrated"),
    (["--method", "search", "--calibration", "x"], "--calibration is for --quantization int4 --method calibrated"),
])
def test_mistakes_are_named(flags: list[str], message: str, source: Path, tmp_path: Path,
                            capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(source), str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_short_calibration_text_and_a_full_folder(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("Too short.")
    assert main(["quantize", str(source), str(tmp_path / "out"), "--calibration", str(text)]) == 2
    assert "tokens; at least 512 are needed" in capsys.readouterr().err
    assert main(["quantize", str(source), str(source)]) == 2
    assert "exists and is not an empty folder; name a new one" in capsys.readouterr().err
    (source / "tokenizer.json").rename(source / "away")
    try:
        assert main(["quantize", str(source), str(tmp_path / "out")]) == 2
    finally:
        (source / "away").rename(source / "tokenizer.json")
    assert "tokenizer" in capsys.readouterr().err
