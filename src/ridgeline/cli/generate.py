"""`ridgeline generate`."""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.options import (
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    engine_options,
    not_utf8,
    read_text,
    sampling_options,
)
from ridgeline.cli.report import as_json, summary
from ridgeline.errors import ConfigError, EngineError, InvalidPrompt

if TYPE_CHECKING:
    from ridgeline.frontend import Prompt
    from ridgeline.llm import LLM
    from ridgeline.sampling_params import SamplingParams
    from ridgeline.types import RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline generate MODEL [-p TEXT ...] [--prompt-file FILE ...] [flags]"
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="a prompt (repeatable)")
    parser.add_argument("--prompt-file", action="append", metavar="FILE",
                        help="a file that is one prompt, or a .jsonl file with one prompt a line: a string, a list of token "
                             "ids, or an object with \"prompt\" or \"prompt_token_ids\" (repeatable)")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes (one prompt)")
    parser.add_argument("--json", action="store_true", help="print a list with one object a prompt")
    parser.epilog = ("Without -p and --prompt-file the prompt is standard input. The line break at the end of a file or of\n"
                     "standard input is not part of the prompt.")
    add_sampling_arguments(parser, max_tokens=128)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    given = sampling_options(options)
    if options.stream and (options.json or given.get("n", 1) != 1):
        raise ConfigError("--stream prints one sample as text; leave out --json and --n")
    prompts = _prompts(options)
    if options.stream and len(prompts) > 1:
        raise ConfigError(f"--stream prints the answer to one prompt; there are {len(prompts)}")
    if not any(prompts):
        raise InvalidPrompt("the prompt is empty; it needs at least one token")
    from ridgeline.cli.progress import bar, load_llm
    from ridgeline.sampling_params import SamplingParams

    params = SamplingParams(**given)
    llm = load_llm(options.model, **engine_options(options))
    if options.stream:
        return _stream(llm, prompts[0], params)
    with bar("Generating", unit="prompts") as advance:
        outputs = llm.generate(prompts, params, on_progress=lambda done, total, stats: advance(
            done, total, f"{stats.generation_tokens} tokens, {stats.running} running, {stats.waiting} waiting"))
    if options.json:
        print(json.dumps([as_json(o) for o in outputs], indent=1, ensure_ascii=False))
    else:
        _print(outputs, tokenizer=llm.tokenizer is not None)
    failed = [(i, o.error) for i, o in enumerate(outputs, 1) if o.error is not None]
    for number, error in failed:
        where = f"prompt {number}: " if len(outputs) > 1 else ""
        print(f"ridgeline: error: {where}{error}", file=sys.stderr)
    if not failed:
        return 0
    return 1 if all(isinstance(error, EngineError) for _, error in failed) else 2


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    prompts: list[Prompt] = list(options.prompt or ())
    for path in options.prompt_file or ():
        text = read_text(path, "prompt")
        prompts += _lines(path, text) if Path(path).suffix == ".jsonl" else [_without_line_break(text)]
    if options.prompt is None and options.prompt_file is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt; give -p TEXT, --prompt-file FILE, or text on standard input")
        try:
            prompts = [_without_line_break(sys.stdin.buffer.read().decode("utf-8"))]
        except UnicodeDecodeError as error:
            raise InvalidPrompt(not_utf8("standard input", error)) from error
    if not prompts:
        raise InvalidPrompt(f"no prompt in {', '.join(options.prompt_file)}")
    return prompts


def _without_line_break(text: str) -> str:
    """Editors and `echo` end a text with a line break, which would make a model begin a new line."""
    return text.removesuffix("\n").removesuffix("\r")


def _lines(path: str, text: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidPrompt(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(value, (str, list, dict)):
                raise InvalidPrompt(f"{path}, line {number}: {line.strip()[:60]}; expected a string, a list of token ids, or "
                                    "an object with \"prompt\" or \"prompt_token_ids\"")
            prompts.append(value)
    return prompts


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> int:
    last, shown = None, 0
    for last in llm.stream(prompt, params):
        sample = last.outputs[0]
        # A model without a tokenizer has no text; its token ids are the answer.
        sys.stdout.write(sample.delta if llm.tokenizer is not None else "".join(f"{t} " for t in sample.token_ids[shown:]))
        sys.stdout.flush()
        shown = len(sample.token_ids)
    print()
    if last is not None:
        print(summary([last]), file=sys.stderr)
    return 0


def _print(outputs: list[RequestOutput], *, tokenizer: bool) -> None:
    done = [(i, o) for i, o in enumerate(outputs, 1) if o.error is None]
    for number, output in done:
        for sample in output.outputs:
            if len(outputs) > 1 or len(output.outputs) > 1:
                name = f"prompt {number}" + (f", sample {sample.index + 1}" if len(output.outputs) > 1 else "")
                print(f"--- {name}: {_one_line(output.prompt or '')}")
            print(sample.text if tokenizer else " ".join(map(str, sample.token_ids)))
    if done:
        print(summary([o for _, o in done]), file=sys.stderr)


def _one_line(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[:width - 1] + "…"
