"""`ridgeline explain`."""
from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.options import add_measuring_arguments, add_model_argument, add_shape_arguments, engine_options
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.analysis.advise import Question
    from ridgeline.analysis.explain import Findings
    from ridgeline.analysis.hardware import Hardware
    from ridgeline.analysis.subject import Subject
    from ridgeline.config import EngineConfig
    from ridgeline.llm import LLM

VERIFIABLE = ("batch", "quantization", "kv_cache_dtype", "ngram", "prefix", "chunk", "pruned_head")
REPORTS = (".html", ".md", ".json")
WEIGHTS = ("*.safetensors", "*.gguf")
PLANNED_CHUNK = 8192           # rows of a pass on an accelerator, unless told
MOST_BATCH = 32                # sequences that sweeps are measured with, where the cache has room


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline explain MODEL [--batch N] [--context N] [--hardware NAME] [--verify] [--report FILE] [flags]"
    add_model_argument(parser)
    add = parser.add_argument_group("question").add_argument
    add("--batch", type=int, default=1, metavar="N", help="sequences that decode together (default 1)")
    add("--context", type=int, default=512, metavar="N", help="tokens of a prompt (default 512)")
    add("--output", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    add("--hardware", metavar="NAME", help="plan for a machine by its data sheet, without loading the model; `list` names them")
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="with --hardware: devices that share each layer")
    add("--verify", action="store_true", help="apply each lever that the engine has and measure it: interleaved A/B runs")
    add("--levers", metavar="LIST", help=f"those that --verify tries (default all): {','.join(VERIFIABLE)}")
    add("--rounds", type=int, default=9, metavar="N", help="of each A/B run of --verify (default 9)")
    add("--recalibrate", action="store_true", help="measure this machine again instead of using what is known of it")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one object")
    add("--report", action="append", default=[], metavar="FILE",
        help="also write it to a .html, .md or .json file (repeatable)")
    add("--perfetto", metavar="FILE", help="write the spans of the sample request, for ui.perfetto.dev or chrome://tracing")
    add_shape_arguments(parser)
    add_measuring_arguments(parser)
    parser.epilog = "How each figure is counted: docs/explain.md."


def run(options: argparse.Namespace) -> int:
    if options.hardware == "list":
        return _list(options.json)
    _check(options)
    from ridgeline.analysis.advise import Question
    from ridgeline.report.explain_text import text

    question = Question(options.batch, options.context, options.output)
    findings = _plan(options, question) if options.hardware else _measure(options, question)
    result = findings.result
    result["command"] = shlex.join(["ridgeline", *sys.argv[1:]])
    print(json.dumps(result) if options.json else text(result, min(140, shutil.get_terminal_size().columns)))
    _write(options, findings)
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("batch", "context", "output", "rounds", "tensor_parallel_size"):
        value = getattr(options, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be an integer of at least 1")
    _levers(options.levers)
    for path in options.report:
        if Path(path).suffix not in REPORTS:
            raise ConfigError(f"--report is {path!r}; the name must end in {', '.join(REPORTS)}")
    if options.hardware is None and options.tensor_parallel_size > 1:
        raise ConfigError(f"--tensor-parallel-size is {options.tensor_parallel_size}; it plans for a machine that --hardware "
                          "names")
    for flag, given in (("--verify", options.verify), ("--perfetto", options.perfetto), ("--recalibrate", options.recalibrate)):
        if options.hardware is not None and given:
            raise ConfigError(f"{flag} measures on this machine, and --hardware {options.hardware} only plans for another one")


def _levers(text: str | None) -> tuple[str, ...]:
    names = VERIFIABLE if text is None else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in VERIFIABLE]
    if unknown:
        raise ConfigError(f"--levers names {unknown[0]!r}; valid: {', '.join(VERIFIABLE)}")
    return names


def _measure(options: argparse.Namespace, question: Question) -> Findings:
    from ridgeline.analysis import verify
    from ridgeline.analysis.advise import BATCHED
    from ridgeline.analysis.explain import explain
    from ridgeline.analysis.read import spec_of
    from ridgeline.analysis.subject import Subject
    from ridgeline.analysis.this_machine import machine_for, speed_of
    from ridgeline.cli.progress import bar, load_llm
    from ridgeline.config import EngineConfig
    from ridgeline.loading import activation_dtype, describe

    config = {**engine_options(options), "enable_prefix_caching": True,
              "max_num_seqs": max(MOST_BATCH, BATCHED * options.batch)}
    resolved = EngineConfig.of({"progress": False, **config})
    shapes = describe(options.model, resolved)
    _check_context(question, shapes.model.config.max_model_len, resolved)
    llm = load_llm(options.model, **config)
    _check_context(question, llm.engine.max_model_len, resolved)
    if llm.engine.strategies[llm.engine.default_strategy].align > 1:
        raise ConfigError(f"{options.model} decodes whole blocks; explain measures models that decode token by token")
    with bar("Explaining", unit="steps") as advance:
        count = 0

        def progress(note: str) -> None:
            nonlocal count
            advance(count, 12, note)
            count += 1

        progress("this machine")
        hardware = machine_for(llm.loaded, activation_dtype(resolved), recalibrate=options.recalibrate)
        # Read whole here: the sample run tells how much of it pruning leaves out.
        spec = replace(spec_of(llm.loaded, shapes, resolved), head_split=False)
        subject = Subject(spec, hardware, resolved.max_num_batched_tokens, speed_of(hardware))
        findings = explain(subject, question, llm=llm, machines=_machines(), model=_model_json(llm, subject), progress=progress)
        if options.verify:
            verify.verify(findings, llm, options.model, config, rounds=options.rounds, levers=_levers(options.levers),
                          progress=progress)
    return findings


def _check_context(question: Question, most: int, config: EngineConfig) -> None:
    need = question.context + question.output
    if need > most:
        raise ConfigError(f"--context {question.context} with --output {question.output} needs {need} positions; the context "
                          f"of the model is {most}")
    if question.batch > config.max_num_batched_tokens:
        raise ConfigError(f"--batch is {question.batch}; a pass has at most {config.max_num_batched_tokens} rows "
                          "(--max-num-batched-tokens)")


def _machines() -> list[Hardware]:
    from ridgeline.analysis.catalogue import HARDWARE

    return list(HARDWARE.values())


def _model_json(llm: LLM, subject: Subject) -> dict[str, Any]:
    from ridgeline.analysis.subject import spec_json

    loaded = llm.loaded
    backend = "torch" if loaded.report is None else f"native, {loaded.report.isa}"
    return {"name": loaded.name, "format": loaded.checkpoint.format, "architecture": loaded.model.config.model_type,
            "backend": backend, **spec_json(subject.spec)}


def _write(options: argparse.Namespace, findings: Findings) -> None:
    from ridgeline.report.text import write

    _levers(options.levers)
    for path in options.report:
        if path.endswith(".json"):
            write(path, json.dumps(findings.result) + "\n")
        elif path.endswith(".md"):
            from ridgeline.report.explain_text import markdown

            write(path, markdown(findings.result))
        else:
            from ridgeline.report.explain_html import html

            write(path, html(findings.result))
    if options.perfetto is not None:
        from ridgeline.analysis.stamps import as_trace

        write(options.perfetto, as_trace(findings.spans, findings.result["model"]["name"]))


def _list(as_json: bool) -> int:
    from ridgeline.report.text import si, table

    machines = _machines()
    if as_json:
        print(json.dumps([machine.as_json() for machine in machines]))
        return 0
    rows = [["name", "reads", "computes", "memory", ""]]
    for m in machines:
        compute, peak = max(m.peaks.items(), key=lambda item: item[1])
        rows.append([m.name, si(m.bandwidth, "B/s"), f"{si(peak, 'FLOP/s')} {compute}", si(m.memory_bytes, "B"), ""])
    print(table(rows))
    return 0


def _plan(options: argparse.Namespace, question: Question) -> Findings:
    """On a machine from the table: nothing is loaded, a config.json is enough."""
    from ridgeline.analysis import catalogue
    from ridgeline.analysis.explain import explain
    from ridgeline.analysis.planned_model import planned
    from ridgeline.analysis.subject import Subject
    from ridgeline.config import EngineConfig

    machine, devices = catalogue.hardware(options.hardware), options.tensor_parallel_size
    flags = engine_options(options)
    folder = Path(options.model)
    if "load_format" not in flags and folder.is_dir() and not any(p for end in WEIGHTS for p in folder.glob(end)):
        flags["load_format"] = "dummy"
    config = EngineConfig.of({"progress": False, **flags})
    spec, model = planned(options.model, config, machine, devices)
    _check_context(question, config.max_model_len or spec.max_context or question.context + question.output, config)
    chunk = options.max_num_batched_tokens or (PLANNED_CHUNK if machine.device == "gpu" else config.max_num_batched_tokens)
    others = [m for m in _machines() if m.name != machine.name] if devices == 1 else []
    return explain(Subject(spec, machine, chunk), question, machines=others, model=model)
