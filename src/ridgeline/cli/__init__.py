"""The `ridgeline` command: one file a sub-command, imported when it is used, so that --help answers at once."""
from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ridgeline import __version__
from ridgeline.errors import EngineError, PeerError, RidgelineError

COMMANDS = {
    "generate": "continue one prompt or many",
    "chat": "talk with a model that has a chat template",
    "serve": "answer requests over HTTP, as OpenAI's and Anthropic's interfaces have it",
    "run-batch": "answer a file of requests, in the format of OpenAI's batches",
    "info": "what a model is made of, and the memory it needs",
    "explain": "where the time goes, how far from the limit, what would help, and whether it did",
    "perplexity": "how well a model predicts a text, alone or against a reference",
    "quantize": "write a model with weights of 4 or 8 bits",
    "bench": "how fast a model runs here beside the limit of this machine, or a server under load",
}
FAILED = 1
USAGE_ERROR = 2          # also what argparse exits with
INTERRUPTED = 130        # 128 + SIGINT, as shells have it


class Parser(argparse.ArgumentParser):
    """One line for a mistake, with the nearest valid spelling; flags must be written out."""

    def __init__(self, **options: object):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"ridgeline: error: {message} (see `{self.prog} --help`)\n")

    def near(self, flag: str) -> str:
        import difflib

        flags = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        close = difflib.get_close_matches(flag.partition("=")[0], flags, n=1)
        return f"; did you mean {close[0]}?" if close else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. A user's mistake is one line on standard error, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A lone surrogate, from bytes in an argument that are no UTF-8, must not make a message about it fail.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parse(arguments)
        code: int = _module(options.command).run(options)
        print(end="", flush=True)
        return code
    except RidgelineError as error:
        print(f"ridgeline: error: {error}", file=sys.stderr)
        return FAILED if isinstance(error, EngineError | PeerError) else USAGE_ERROR
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)          # the terminal shows ^C where the line had come to
        return INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError):      # there, the reader has gone and nobody is left to tell
            print(f"ridgeline: error: {error}", file=sys.stderr)
        # What is left in the buffer could not be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _module(command: str) -> Any:
    return importlib.import_module(f"ridgeline.cli.{command.replace('-', '_')}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="ridgeline", description="An inference engine for language models.",
        epilog="MODEL is a folder, a .gguf file, a hub id (org/name) or a packaged model (gemma3-270m).\n"
               "`ridgeline COMMAND --help` lists a command's flags.")
    parser.add_argument("--version", action="version", version=f"ridgeline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(chosen, COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        parser.error(f"unknown command {chosen!r}; {hint}Commands: {', '.join(COMMANDS)}")
    sub = parser
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == chosen:                  # only this command's flags are needed
            _module(name).add_arguments(command)
            sub = command
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = next((u for u in unknown if u.startswith("-")), unknown[0])
        what = "unknown flag" if flag.startswith("-") else "an argument too many:"
        inner = getattr(options, "parser", sub)         # of a command with modes
        inner.error(f"{what} {flag}{inner.near(flag)}")
    return options
