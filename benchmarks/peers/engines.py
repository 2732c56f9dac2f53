"""The engines that benchmarks.peers knows, and the processes that time them."""
from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.bench.work import TEXT_TOKENS, Work

OURS = "ridgeline"
_HERE = Path(__file__).parent


class PeerError(Exception):
    """Why an engine does not run: for people to read."""


@dataclass(frozen=True)
class Kind:
    """A peer: its script, the module that its environment must have, and what it says of a model it cannot read."""

    script: str
    module: str
    complaint: Callable[[Path], str | None]


def _no_gguf(path: Path) -> str | None:
    return None if path.is_file() and path.suffix == ".gguf" else f"reads .gguf files only, not {path.name}"


def _no_export(path: Path) -> str | None:
    found = (path / "openvino_model.xml").is_file()
    return None if found else f"reads exported folders only; {path.name} has no openvino_model.xml"


def _no_folder(path: Path) -> str | None:
    return None if (path / "config.json").is_file() else f"reads checkpoint folders only; {path.name} has no config.json"


KINDS = {
    "llama.cpp": Kind("run_llamacpp.py", "llama_cpp", _no_gguf),
    "openvino": Kind("run_openvino.py", "openvino_genai", _no_export),
    "vllm": Kind("run_vllm.py", "vllm", _no_folder),
}


@dataclass(frozen=True)
class Peer:
    name: str
    python: str
    path: Path

    def check(self) -> None:
        """raises PeerError where the peer is not there or cannot read the model."""
        kind = KINDS[self.name]
        if complaint := kind.complaint(self.path):
            raise PeerError(complaint)
        try:
            output([self.python, "-c", f"import {kind.module}"])
        except PeerError as error:
            raise PeerError(f"not installed for {self.python}: {error}") from error

    def run(self, works: Sequence[Work], threads: int) -> dict[str, Any]:
        """{"version": ..., "tokens_per_s": {work: [rate]}}. raises PeerError."""
        wanted = [{"name": w.name, "sequences": w.sequences, "prompt": w.prompt_len or TEXT_TOKENS, "steps": w.steps}
                  for w in works]
        printed = output([self.python, str(_HERE / KINDS[self.name].script), str(self.path), str(threads), "1",
                          json.dumps(wanted)])
        result = [line for line in printed.splitlines() if line.startswith('{"version"')]     # vLLM logs to stdout as well
        if not result:
            raise PeerError(f"{self.name} printed no result")
        found: dict[str, Any] = json.loads(result[-1])
        return found


def parse_peer(text: str, model: Path) -> Peer:
    """NAME=PYTHON[,MODEL]. raises PeerError that lists the names."""
    name, equals, rest = text.partition("=")
    python, _, path = rest.partition(",")
    if name not in KINDS or not equals or not python:
        raise PeerError(f"--peer {text!r}: expected NAME=PYTHON[,MODEL] with NAME one of {', '.join(KINDS)}")
    return Peer(name, python, Path(path) if path else model)


def output(command: Sequence[str]) -> str:
    """What a process prints. raises PeerError with the end of its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        complaint = done.stderr.strip().splitlines()
        raise PeerError(complaint[-1] if complaint else f"{command[0]} ended with code {done.returncode}")
    return done.stdout


def run_ours(model: str, works: Sequence[Work], threads: int, engine_args: str) -> dict[str, Any]:
    """The object that `ridgeline bench latency --json` prints. raises PeerError."""
    found: dict[str, Any] = json.loads(output([
        sys.executable, "-m", "ridgeline", "bench", "latency", model, "--work", ",".join(w.name for w in works),
        "--repeat", "1", "--json", "--threads", str(threads), *shlex.split(engine_args)]))
    return found
