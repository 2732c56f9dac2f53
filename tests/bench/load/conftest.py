from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.serve import report
from ridgeline.cli import main
from streaming_peer import Peer

Load = Callable[..., dict[str, Any]]


@pytest.fixture
def load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Load:
    """`ridgeline bench serve` against a peer: the saved result, the exit code under "code", what was printed under "out"."""

    def run(peer: Peer, *flags: object, num_prompts: int = 8, input_len: int | None = 20, output_len: int | None = 8,
            warmups: int | None = 1) -> dict[str, Any]:
        path = tmp_path / "result.json"
        lengths = [("--input-len", input_len), ("--output-len", output_len), ("--num-warmups", warmups)]
        given = [str(part) for name, value in lengths if value is not None for part in (name, value)]
        code = main(["bench", "serve", "--base-url", peer.url, "--num-prompts", str(num_prompts), *given,
                     "--save-result", str(path), *map(str, flags)])
        captured = capsys.readouterr()
        return {**report.load(str(path)), "code": code, "out": captured.out, "err": captured.err}

    return run
