"""Runs the engines in turn and reports medians and ratios; see the package's docstring."""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import benchmarks.peers
from benchmarks import machine
from benchmarks.peers.engines import OURS, Peer, PeerError, parse_peer, run_ours
from ridgeline.bench.work import DEFAULT_WORK, Work, parse_work
from ridgeline.errors import RidgelineError
from ridgeline.hub import resolve


def compare(path: Path, works: Sequence[Work], options: argparse.Namespace) -> dict[str, Any]:
    """Run everything in turn. raises PeerError where an engine fails on the way."""
    told: list[dict[str, Any]] = []
    able: dict[str, Peer] = {}
    for text in options.peer or [f"llama.cpp={sys.executable}"]:
        peer = parse_peer(text, path)
        if any(each["peer"] == peer.name for each in told):
            raise PeerError(f"--peer names {peer.name} twice")
        told.append({"peer": peer.name, "installed": True, "file": peer.path.name})
        try:
            peer.check()
            able[peer.name] = peer
        except PeerError as error:
            told[-1] = {"peer": peer.name, "installed": False, "reason": str(error)}
    ours: list[dict[str, Any]] = []
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in able}
    for repeat in range(options.repeat):
        for name in (OURS, *able):
            print(f"run {repeat + 1} of {options.repeat}: {name}", file=sys.stderr)
            if name == OURS:
                ours.append(run_ours(options.model, works, options.threads, options.engine_args))
            else:
                theirs[name].append(able[name].run(works, options.threads))
    for each in told:
        if each["installed"]:
            each["version"] = theirs[each["peer"]][-1]["version"]
    return {
        "benchmark": "peers", "machine": ours[0]["machine"], "model": ours[0]["model"], "threads": options.threads,
        "repeats": options.repeat, "peers": told,
        "results": [row(index, work.name, ours, theirs) for index, work in enumerate(works)],
    }


def row(index: int, work: str, ours: Sequence[dict[str, Any]],
        theirs: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    own = [run["results"][index]["tokens_per_s"] for run in ours]
    # Whatever else the machine does can only lower a limit that is measured.
    limit = max(run["results"][index]["limit_tokens_per_s"] for run in ours)
    engines = {OURS: {"tokens_per_s": statistics.median(own), "runs": own}}
    for name, runs in theirs.items():
        other = [rate for run in runs for rate in run["tokens_per_s"][work]]
        engines[name] = {"tokens_per_s": statistics.median(other), "runs": other}
    rate = statistics.median(own)
    return {"work": work, "engines": engines, "limit_tokens_per_s": limit, "share_of_limit": rate / limit,
            "ratios": {name: rate / found["tokens_per_s"] for name, found in engines.items() if name != OURS}}


def report(result: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    on, model = result["machine"], result["model"]
    console.print(f"machine    {on['cpu']}, {result['threads']} threads, {on['instruction_set']}; reads "
                  f"{on['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, computes {on['peak_ops_per_s'] / 1e9:.0f} GOPS "
                  f"({on['peak_of']})", markup=False)
    console.print(f"model      {model['file']} ({model['backend']}, {model['format']})", markup=False)
    for peer in result["peers"]:
        about = f"{peer['version']}, {peer['file']}" if peer["installed"] else peer["reason"]
        console.print(f"{peer['peer']:10} {about}", markup=False)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=benchmarks.peers.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="what this engine runs: a file, a folder or a packaged model's name")
    parser.add_argument("--work", default=DEFAULT_WORK, metavar="LIST")
    parser.add_argument("--peer", action="append", metavar="NAME=PYTHON[,MODEL]",
                        help="may be repeated; default: llama.cpp in this Python")
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
