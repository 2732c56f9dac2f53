"""Runs both servers in turn and reports medians and ratios; see the package's docstring."""
from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import benchmarks.servers
from benchmarks import machine
from benchmarks.servers.processes import Load, Server, ServerError, llama_server, measure, ours
from ridgeline.errors import RidgelineError
from ridgeline.hub import resolve

# Name -> title, and the factor from the client's unit to it.
METRICS = {"throughput": ("tokens/s", 1.0), "ttft": ("p50 TTFT, ms", 1e3), "tpot": ("p50 TPOT, ms", 1e3)}


def figures(cell: dict[str, Any]) -> dict[str, float]:
    """tokens/s, and medians in seconds. raises ServerError where answers are too short to have them."""
    found, latencies = cell["summary"], cell["summary"]["latencies"]
    values = {"throughput": found["output_tokens_per_s"],
              "ttft": latencies["ttft"]["percentiles"]["50"], "tpot": latencies["tpot"]["percentiles"]["50"]}
    for name, value in values.items():
        if value is None:
            raise ServerError(f"{found['completed']} answers tell of no {name}: ask for more or longer ones")
    return values


def compare(servers: Sequence[Server], load: Load, repeats: int) -> dict[str, Any]:
    """Run everything in turn. raises ServerError."""
    before = machine.describe()
    runs: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    badges: list[str] = []
    for repeat in range(repeats):
        for server in servers:
            print(f"run {repeat + 1} of {repeats}: {server.name}", file=sys.stderr)
            with server.running() as url:
                cell = measure(url, load)
            runs[server.name].append(figures(cell))
            print(f"    {runs[server.name][-1]}", file=sys.stderr)
            badges += [f"{server.name}: {badge['grade']}: {badge['text']}" for badge in cell["badges"]
                       if badge["grade"] != "valid"]
    medians = {name: {metric: statistics.median(run[metric] for run in found) for metric in METRICS}
               for name, found in runs.items()}
    return {"benchmark": "servers", "machine": before, "runs": runs, "medians": medians, "badges": badges,
            "commands": {server.name: shlex.join(server.command) for server in servers},
            "ratios": {name: {metric: medians[servers[0].name][metric] / found[metric] for metric in METRICS}
                       for name, found in medians.items() if name != servers[0].name}}


def report(result: dict[str, Any], load: Load) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(f"machine    {machine.line(result['machine'])}", markup=False)
    console.print(f"load       {load.clients} clients, prompts of about {load.input_len} tokens, {load.output_len} out, "
                  f"{load.requests} requests a run", markup=False)
    for name, command in result["commands"].items():
        console.print(f"{name:10} {command}", markup=False)
    console.print("figures    medians of alternating runs (lowest, highest)\n", markup=False)
    table = Table("", *result["medians"], *(f"ridgeline / {name}" for name in result["ratios"]), box=None, pad_edge=False)
    for metric, (title, factor) in METRICS.items():
        cells = []
        for name, found in result["medians"].items():
            values = [run[metric] * factor for run in result["runs"][name]]
            cells.append(f"{found[metric] * factor:.1f} ({min(values):.1f}, {max(values):.1f})")
        table.add_row(title, *cells, *(f"{ratios[metric]:.2f}" for ratios in result["ratios"].values()))
    console.print(table)
    for badge in result["badges"]:
        console.print(badge, markup=False)
    if warning := machine.warn_if_busy(result["machine"]):
        console.print(f"caution    {warning}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=benchmarks.servers.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or a packaged model's name")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server; without it this server runs alone")
    for flag, default in (("--clients", 16), ("--input-len", 430), ("--output-len", 128), ("--num-prompts", 48),
                          ("--repeat", 2), ("--threads", machine.describe()["cores"])):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--engine-args", default="", metavar="FLAGS", help="further flags of `ridgeline serve`")
    parser.add_argument("--llama-args", default="", metavar="FLAGS", help="further flags of llama-server")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    for name in ("clients", "input_len", "output_len", "num_prompts", "repeat", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    load = Load(options.clients, options.input_len, options.output_len, options.num_prompts)
    try:
        servers = [ours(options.model, options.threads, shlex.split(options.engine_args))]
        if options.llama_server is not None:
            servers.append(llama_server(options.llama_server, str(resolve(options.model)), load, options.threads,
                                        shlex.split(options.llama_args)))
        result = compare(servers, load, options.repeat)
    except (RidgelineError, ServerError) as error:
        print(f"benchmarks.servers: error: {error}", file=sys.stderr)
        return 2
    report(result, load)
    if options.json:
        print(json.dumps(result))
    return 0
