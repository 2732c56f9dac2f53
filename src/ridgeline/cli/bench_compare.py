"""`ridgeline bench compare`."""
from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A.json", help="what `bench serve --save-result` wrote")
    parser.add_argument("second", metavar="B.json", help="the same for what is compared with it")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--force", action="store_true", help="compare although the workloads differ")


def run(options: argparse.Namespace) -> int:
    from ridgeline.bench.serve import compare, report

    found = compare.compare(report.load(options.first), report.load(options.second), force=options.force)
    print(json.dumps(found, indent=1) if options.json else compare.text(found))
    return 0
