"""This engine beside llama.cpp: the same file and work, on the same threads, in turn.

    python -m benchmarks.peers MODEL [--work pp512,tg64,d8,d32] [--python PEER_PYTHON] [--repeat 3] [--json]

MODEL is a .gguf file or the name of a packaged model. The engine runs as `ridgeline bench latency --json`, llama.cpp through
its C API in PEER_PYTHON, the Python of an environment with llama-cpp-python (benchmarks/llamacpp.py). Each is a process of
its own, one at a time, this engine first, and again for each repeat; each warms up before it is timed. A peer that is not
installed, or cannot read the model, is named as such. OpenVINO and vLLM are not run: they read other formats than GGUF.

How the figures are counted:
    pp512     prompt tokens / time to the first token (llama.cpp: / time of its passes)
    tg64, dN  decoded tokens / time of the steps; this engine samples greedily within them, llama.cpp does not sample
    ratio     median of this engine / median of the peer
    share     median of this engine / the highest limit that its runs measured; see docs/metrics.md, `ridgeline bench`
"""
from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from ridgeline.bench.work import DEFAULT_WORK, TEXT_TOKENS, Work, parse_work
from ridgeline.errors import RidgelineError
from ridgeline.hub import resolve

OURS, LLAMA_CPP = "ridgeline", "llama.cpp"
LLAMA_SCRIPT = Path(__file__).with_name("llamacpp.py")


class PeerError(Exception):
    """Why a peer does not run: for people to read."""


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


def run_ours(model: str, works: Sequence[Work], options: argparse.Namespace) -> dict[str, Any]:
    """The object that `ridgeline bench latency --json` prints."""
    found: dict[str, Any] = json.loads(output([
        sys.executable, "-m", "ridgeline", "bench", "latency", model, "--work", ",".join(w.name for w in works),
        "--repeat", "1", "--json", "--threads", str(options.threads), *shlex.split(options.engine_args)]))
    return found


def run_llama_cpp(path: Path, works: Sequence[Work], options: argparse.Namespace) -> dict[str, Any]:
    wanted = [{"name": w.name, "sequences": w.sequences, "prompt": w.prompt_len or TEXT_TOKENS, "steps": w.steps}
              for w in works]
    printed = output([options.python, str(LLAMA_SCRIPT), str(path), str(options.threads), "1", json.dumps(wanted)])
    found: dict[str, Any] = json.loads(printed.rstrip().rpartition("\n")[2])
    return found


def find_llama_cpp(path: Path, python: str) -> None:
    """raises PeerError where llama.cpp is not there or cannot read the model."""
    if path.suffix != ".gguf":
        raise PeerError(f"reads .gguf files only, not {path.name}")
    try:
        output([python, "-c", "import llama_cpp"])
    except PeerError as error:
        raise PeerError(f"not installed for {python}: {error}") from error


def compare(path: Path, works: Sequence[Work], options: argparse.Namespace) -> dict[str, Any]:
    """Run everything in turn. raises PeerError where an engine fails on the way."""
    peer: dict[str, Any] = {"peer": LLAMA_CPP, "installed": True}
    try:
        find_llama_cpp(path, options.python)
    except PeerError as error:
        peer = {"peer": LLAMA_CPP, "installed": False, "reason": str(error)}
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(options.repeat):
        ours.append(run_ours(options.model, works, options))
        if peer["installed"]:
            theirs.append(run_llama_cpp(path, works, options))
            peer["version"] = theirs[-1]["version"]
    return {
        "benchmark": "peers", "machine": ours[0]["machine"], "model": ours[0]["model"], "threads": options.threads,
        "repeats": options.repeat, "peers": [peer],
        "results": [row(index, work.name, ours, theirs) for index, work in enumerate(works)],
    }


def row(index: int, work: str, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [run["results"][index]["tokens_per_s"] for run in ours]
    # Whatever else the machine does can only lower a limit that is measured.
    limit = max(run["results"][index]["limit_tokens_per_s"] for run in ours)
    engines = {OURS: {"tokens_per_s": statistics.median(own), "runs": own}}
    if theirs:
        other = [rate for run in theirs for rate in run["tokens_per_s"][work]]
        engines[LLAMA_CPP] = {"tokens_per_s": statistics.median(other), "runs": other}
    rate = statistics.median(own)
    return {"work": work, "engines": engines, "limit_tokens_per_s": limit, "share_of_limit": rate / limit,
            "ratios": {name: rate / found["tokens_per_s"] for name, found in engines.items() if name != OURS}}


def report(result: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    on, model = result["machine"], result["model"]
    console.print(f"machine    {on['cpu']}, {result['threads']} threads, {on['instruction_set']}; reads "
                  f"{on['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, computes {on['peak_ops_per_s'] / 1e9:.0f} GOPS "
                  f"({on['peak_of']})", markup=False)
    console.print(f"model      {model['file']} ({model['backend']}, {model['format']})", markup=False)
    for peer in result["peers"]:
        console.print(f"{peer['peer']:10} {peer['version'] if peer['installed'] else peer['reason']}", markup=False)
    console.print(f"figures    tokens/s, medians of {result['repeats']} alternating runs (lowest, highest)\n", markup=False)
    names = [OURS, *(peer["peer"] for peer in result["peers"] if peer["installed"])]
    table = Table("work", *names, *(f"{OURS} / {name}" for name in names[1:]), "limit", "share", box=None, pad_edge=False)
    for each in result["results"]:
        cells = []
        for name in names:
            found = each["engines"][name]
            cells.append(f"{found['tokens_per_s']:.1f} ({min(found['runs']):.1f}, {max(found['runs']):.1f})")
        table.add_row(each["work"], *cells, *(f"{each['ratios'][name]:.2f}" for name in names[1:]),
                      f"{each['limit_tokens_per_s']:.1f}", f"{each['share_of_limit']:.1%}")
    console.print(table)
    if warning := machine.warn_if_busy(on):
        console.print(f"caution    {warning}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--work", default=DEFAULT_WORK, metavar="LIST")
    parser.add_argument("--python", default=sys.executable, metavar="PEER_PYTHON", help="Python that has llama_cpp")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=machine.describe()["cores"], metavar="N")
    parser.add_argument("--engine-args", default="", metavar="FLAGS", help="further flags of `ridgeline bench latency`")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    if options.repeat < 1 or options.threads < 1:
        parser.error(f"--repeat {options.repeat}, --threads {options.threads}: both must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        works = parse_work(options.work)
        result = compare(resolve(options.model), works, options)
    except (RidgelineError, PeerError) as error:
        print(f"benchmarks.peers: error: {error}", file=sys.stderr)
        return 2
    report(result)
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
