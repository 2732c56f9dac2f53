"""`ridgeline chat`."""
from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ridgeline.cli.options import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_options,
    sampling_options,
)
from ridgeline.errors import InvalidPrompt, RequestError

if TYPE_CHECKING:
    from ridgeline.llm import LLM
    from ridgeline.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /exit or end of input leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_sampling_arguments(parser, max_tokens=512)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from ridgeline.cli.progress import load_llm
    from ridgeline.sampling_params import SamplingParams

    params = SamplingParams(**sampling_options(options))
    llm = load_llm(options.model, **engine_options(options))
    start: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    # Fails now, not after the first question, where the model has no chat template.
    llm.frontend.render([*start, {"role": "user", "content": "Hello"}])
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{options.model}; {HELP}", file=sys.stderr)
    messages = list(start)
    while True:
        question = _ask(interactive)
        if question is None or question.strip() == "/exit":
            return 0
        if question.strip() == "/reset":
            messages = list(start)
        elif question.strip():
            messages.append({"role": "user", "content": question})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
            except RequestError as error:
                if not interactive:
                    raise
                print(f"ridgeline: error: {error}", file=sys.stderr)
                messages.pop()


def _ask(interactive: bool) -> str | None:
    if interactive:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").rstrip("\n") if line else None
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is not UTF-8: byte 0x{error.object[error.start]:02x}") from error


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    text = ""
    for output in llm.stream(llm.frontend.render(messages), params):
        text += output.outputs[0].delta
        sys.stdout.write(output.outputs[0].delta)
        sys.stdout.flush()
    print()
    return text
