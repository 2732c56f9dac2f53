from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ridgeline.cli import main
from tiny_checkpoint import write_checkpoint, write_model


@dataclass
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without a tokenizer."""
    path = tmp_path_factory.mktemp("bare")
    write_model(path)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: arguments, and bytes on a piped standard input."""

    def ridgeline(*arguments: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return ridgeline
