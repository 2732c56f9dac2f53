"""`ridgeline chat`."""
from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ridgeline.cli.options import (
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    engine_options,
    not_utf8,
    sampling_options,
)
from ridgeline.errors import InvalidParams, InvalidPrompt, RequestError

if TYPE_CHECKING:
    from ridgeline.llm import LLM
    from ridgeline.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, Ctrl-C ends an answer, /exit or Ctrl-D leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline chat MODEL [--system TEXT] [flags]"
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.epilog = "From a pipe, each line of standard input is one message of the user."
    add_sampling_arguments(parser, max_tokens=512)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    params_given = sampling_options(options)
    if params_given.get("n", 1) != 1 or params_given.get("echo"):
        raise InvalidParams("chat shows one answer a question; --n and --echo are for `ridgeline generate`")
    from ridgeline.cli.progress import load_llm
    from ridgeline.sampling_params import SamplingParams

    params = SamplingParams(**params_given)
    llm = load_llm(options.model, **engine_options(options))
    start: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    # Fails now, not after the first question, where the model has no chat template or no tokenizer.
    llm.frontend.render([*start, {"role": "user", "content": "Hello"}])
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{options.model}: {HELP}", file=sys.stderr)
    messages = list(start)
    while (question := _ask(interactive)) is not None and question.strip() != "/exit":
        if question.strip() == "/reset":
            messages = list(start)
            continue
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            messages.append({"role": "assistant", "content": _answer(llm, messages, params, interactive)})
        except RequestError as error:
            if not interactive:
                raise
            print(f"ridgeline: error: {error}", file=sys.stderr)
            messages.pop()
    return 0


def _ask(interactive: bool) -> str | None:
    """The next message, None at the end. raises InvalidPrompt for one from a pipe that is not UTF-8."""
    if not interactive:
        line = sys.stdin.buffer.readline()
        try:
            return line.decode("utf-8").rstrip("\r\n") if line else None
        except UnicodeDecodeError as error:
            raise InvalidPrompt(not_utf8("standard input", error)) from error
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except UnicodeDecodeError as error:
            print(f"ridgeline: error: {not_utf8('the message', error)}", file=sys.stderr)


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, interactive: bool) -> str:
    text = ""
    try:
        for output in llm.stream(llm.frontend.render(messages), params):
            text += output.outputs[0].delta
            sys.stdout.write(output.outputs[0].delta)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not interactive:
            raise
    print()
    return text
