"""The `ridgeline` command: one file a sub-command, imported when it is used, so that --help answers at once."""
from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ridgeline import __version__
from ridgeline.errors import RidgelineError

COMMANDS = {
    "generate": "continue one prompt or many",
    "chat": "talk with a model that has a chat template",
    "info": "what a model is made of, and the memory it needs",
    "perplexity": "how well a model predicts a text, alone or against a reference",
}
USAGE_ERROR = 2          # also what argparse exits with
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. A user's mistake is one line on standard error, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="ridgeline", description="An inference engine for language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="MODEL is a folder, a .gguf file, a hub id (org/name) or a packaged model (gemma3-270m).\n"
               "`ridgeline COMMAND --help` lists a command's flags.")
    parser.add_argument("--version", action="version", version=f"ridgeline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:                  # only this command's flags are needed
            importlib.import_module(f"ridgeline.cli.{name}").add_arguments(sub)
    options = parser.parse_args(arguments)
    try:
        code: int = importlib.import_module(f"ridgeline.cli.{options.command}").run(options)
        sys.stdout.flush()
        return code
    except RidgelineError as error:
        print(f"ridgeline: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:                 # the reader has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
