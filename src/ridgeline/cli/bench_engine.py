"""`ridgeline bench latency` and `ridgeline bench throughput`."""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ridgeline.bench.work import ALLOWED, DEFAULT_WORK, Work, parse_work
from ridgeline.cli.options import add_measuring_arguments, add_model_argument, add_shape_arguments, engine_options
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.bench.limits import Shape
    from ridgeline.bench.machine import Machine
    from ridgeline.llm import LLM

BUSY = 0.5               # load average above which something else is being measured as well
FLAGS = {"latency": ("work",), "throughput": ("num_prompts", "input_len", "output_len", "max_num_seqs")}
REPEATS = {"latency": 3, "throughput": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--work", metavar="LIST", help=f"latency: {ALLOWED} (default {DEFAULT_WORK})")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="throughput: requests")
    parser.add_argument("--input-len", type=int, metavar="L", help="throughput: tokens of each prompt")
    parser.add_argument("--output-len", type=int, metavar="M", help="throughput: tokens to generate for each")
    parser.add_argument("--repeat", type=int, metavar="N",
                        help="runs after the warm-up (default: latency 3, throughput 1); figures are medians")
    parser.add_argument("--json", action="store_true", help="print one object with machine, model and results")
    add_shape_arguments(parser)
    add = add_measuring_arguments(parser)
    add("--max-num-seqs", type=int, metavar="N", help="throughput: sequences that run at once (default 64)")
    parser.epilog = "How each figure and its limit are counted: docs/metrics.md."


def run(options: argparse.Namespace) -> int:
    from ridgeline.config import EngineConfig

    works = _check(options)
    config = {**engine_options(options), "enable_prefix_caching": False}
    if works:
        config["max_num_seqs"] = max(work.sequences for work in works)
        # Whole passes of prompts, beside sequences that already decode too: what counts begins when all do.
        config["max_mixed_prefill_tokens"] = EngineConfig.of(config).max_num_batched_tokens
    from ridgeline.bench import report
    from ridgeline.bench.limits import Shape
    from ridgeline.bench.machine import measure
    from ridgeline.cli.progress import load_llm
    from ridgeline.loading import describe

    resolved = EngineConfig.of({"progress": False, **config})
    needs = _needs(options, works, resolved.max_num_batched_tokens)
    shapes = describe(options.model, resolved)
    _check_context(needs, shapes.model.config.max_model_len, options.model)       # before a weight is read
    llm = load_llm(options.model, **config)
    _check_context(needs, llm.engine.max_model_len, options.model)
    if llm.engine.strategies[llm.engine.default_strategy].align > 1:
        raise ConfigError(f"{options.model} decodes whole blocks; bench measures models that decode token by token")
    shape = Shape.of(llm.loaded, shapes, resolved)
    machine = measure(llm.loaded.report, llm.loaded.dtype, resolved)
    results = _measure(llm, shape, machine, options, works)
    if options.json:
        print(json.dumps(report.as_json(llm, shape, machine, results), indent=1))
        return 0
    repeats = _repeats(options)
    print(report.header(llm, shape, machine))
    print(f"figures  {f'median, lowest and highest of {repeats} runs' if repeats > 1 else 'one run'}\n")
    print(report.table(results))
    if options.mode == "throughput":
        print(f"\n{report.served(results[0])}")
    if machine.load > BUSY:
        print(f"\ncaution: the machine was busy before the run (load average {machine.load})")
    above = [result for result in results if result["share_of_limit"] > 1]
    if any(result["head_rows_scored"] is None for result in above):
        print("\ncaution: above 100 %: something slowed the machine while its limit was measured")
    elif above:
        print("\nnote: above 100 %: the limit reads the whole head, and pruning reads about half of it")
    return 0


def _check(options: argparse.Namespace) -> list[Work]:
    """The workloads of `latency`; none for `throughput`. raises ConfigError for flags that are missing or of the other mode."""
    for mode, names in FLAGS.items():
        given = [name for name in names if getattr(options, name) is not None]
        if given and mode != options.mode:
            raise ConfigError(f"{_flag(given[0])} is a flag of `bench {mode}`; `bench {options.mode}` takes "
                              f"{', '.join(map(_flag, FLAGS[options.mode]))}")
    for name in ("repeat", "num_prompts", "input_len", "output_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} is {value}; it must be an integer of at least 1")
    if options.mode == "latency":
        return parse_work(DEFAULT_WORK if options.work is None else options.work)
    missing = [_flag(name) for name in ("num_prompts", "input_len", "output_len") if getattr(options, name) is None]
    if missing:
        raise ConfigError(f"`bench throughput` needs {', '.join(missing)}")
    return []


def _needs(options: argparse.Namespace, works: Sequence[Work], max_num_batched_tokens: int) -> dict[str, int]:
    """Name of each workload -> positions of one of its sequences."""
    for work in works:
        if work.sequences > max_num_batched_tokens:
            raise ConfigError(f"work {work.name} decodes {work.sequences} rows in a pass; --max-num-batched-tokens is "
                              f"{max_num_batched_tokens}")
    if not works:
        return {f"--input-len {options.input_len} with --output-len {options.output_len}":
                options.input_len + options.output_len}
    return {f"work {work.name}": work.positions(max_num_batched_tokens) for work in works}


def _check_context(needs: dict[str, int], context: int, model: str) -> None:
    for name, positions in needs.items():
        if positions > context:
            raise ConfigError(f"{name} does not fit: a sequence takes {positions} positions, and the context of {model} is "
                              f"{context}")


def _measure(llm: LLM, shape: Shape, machine: Machine, options: argparse.Namespace,
             works: Sequence[Work]) -> list[dict[str, Any]]:
    from ridgeline.bench import measure
    from ridgeline.cli.progress import bar

    repeats = _repeats(options)
    if not works:
        return [measure.throughput(llm, shape, machine, num_prompts=options.num_prompts, input_len=options.input_len,
                                   output_len=options.output_len, repeats=repeats)]
    results = []
    with bar("Measuring", unit="works") as advance:
        for index, work in enumerate(works):
            advance(index, len(works), work.name)
            results.append(measure.measure(llm, work, shape, machine, repeats).as_json())
    return results


def _repeats(options: argparse.Namespace) -> int:
    return options.repeat or REPEATS[options.mode]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
