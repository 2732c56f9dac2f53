"""`ridgeline bench MODE`: one file for each kind of mode, imported when it is used."""
from __future__ import annotations

import argparse
import importlib

MODES = {
    "latency": ("bench_engine", "one workload after another in this process: ppN, tgN, dN"),
    "throughput": ("bench_engine", "many requests at once in this process"),
    "serve": ("bench_serve", "load on a running OpenAI-compatible server, and what its clients see"),
    "compare": ("bench_compare", "two results of `bench serve`: which differences are real"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_subparsers(dest="mode", metavar="MODE", required=True)
    for name, (module, text) in MODES.items():
        mode = modes.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        mode.set_defaults(parser=mode)
        importlib.import_module(f"ridgeline.cli.{module}").add_arguments(mode)
    parser.epilog = "`ridgeline bench MODE --help` lists a mode's flags. How each figure is counted: docs/metrics.md."


def run(options: argparse.Namespace) -> int:
    code: int = importlib.import_module(f"ridgeline.cli.{MODES[options.mode][0]}").run(options)
    return code
