"""`ridgeline bench serve`."""
from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from ridgeline.cli.options import json_object
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.bench.serve.arrivals import Arrivals
    from ridgeline.bench.serve.measure import Plan, Sweep
    from ridgeline.bench.serve.metrics import Wanted
    from ridgeline.bench.serve.workloads import Spec

DATASETS = ("random", "sharegpt", "prefix", "agent", "trace")
# Flag -> datasets that read it, and its default there.
OWN = {"input_len": (("random", "prefix", "agent"), 256), "output_len": (("random", "prefix", "agent"), 128),
       "range_ratio": (("random",), 0.0), "prefix_len": (("prefix", "agent"), 256), "num_prefixes": (("prefix",), 1),
       "turns": (("agent",), 4), "think_time": (("agent",), 0.0), "dataset_path": (("trace",), None),
       "trace_speed": (("trace",), 1.0)}
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}
INTERRUPTED = 130         # as main has it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default %(default)s")
    add("--backend", choices=tuple(BACKENDS), default="openai", help="kind of server; decides the default of --endpoint")
    add("--endpoint", metavar="PATH", help="/v1/completions (default) or /v1/chat/completions")
    add("--model", metavar="NAME", help="default: the first that /v1/models lists")
    add("--api-key", metavar="KEY", help="default: the environment's OPENAI_API_KEY, if set")
    add("--timeout", type=float, default=3600.0, metavar="S", help="for a whole answer; longer is an error (default 3600)")
    add("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    add("--ignore-eos", action="store_true", help="ask the server to generate --output-len tokens whatever they are")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of each request")
    add("--no-usage", action="store_true", help="do not ask for token counts: for servers that refuse stream_options")
    add = parser.add_argument_group("workload").add_argument
    add("--dataset-name", choices=DATASETS, default="random",
        help="random: words; sharegpt: lengths of ShareGPT conversations; prefix: prompts that share their opening; agent: "
             "sessions with a growing history; trace: a Mooncake JSONL file")
    add("--num-prompts", type=int, default=100, metavar="N", help="requests of each load (default 100)")
    add("--input-len", type=int, metavar="N",
        help="tokens of a prompt; prefix: after its opening; agent: that a turn adds (default 256)")
    add("--output-len", type=int, metavar="N", help="tokens to generate (default 128)")
    add("--range-ratio", type=float, metavar="R", help="random: lengths are uniform within 1-R to 1+R of those (default 0)")
    add("--prefix-len", type=int, metavar="N", help="prefix: tokens of an opening; agent: of the system prompt (default 256)")
    add("--num-prefixes", type=int, metavar="N", help="prefix: different openings (default 1)")
    add("--turns", type=int, metavar="N", help="agent: requests of a session (default 4)")
    add("--think-time", type=float, metavar="S", help="agent: pause before each further turn (default 0)")
    add("--dataset-path", metavar="FILE", help="trace: {timestamp, input_length, output_length, hash_ids} a line")
    add("--trace-speed", type=float, metavar="X", help="trace: this many times as fast (default 1)")
    add("--prompt-form", choices=("words", "ids"), default="words",
        help="words: about one token each with common tokenizers; ids: random token ids, exact (/v1/completions)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals (default 0)")
    add("--salt", metavar="TEXT", help="of the prompts' words; default: new each time, so that no prefix cache knows them")
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=float, metavar="R", help="open loop: requests a second, Poisson unless --burstiness says more")
    add("--burstiness", type=_burstiness, metavar="B", help="shape of the gamma distribution of gaps: 1 Poisson (default), "
        "below 1 burstier, constant: equal gaps")
    add("--ramp", metavar="FROM:TO", help="open loop: the rate grows from FROM to TO requests a second over the run")
    add("--max-concurrency", type=int, metavar="N", help="without a rate: closed loop of N clients; with one: at most N at "
        "once, and waiting counts into TTFT (default without either: all requests at once)")
    add("--stagger", type=float, metavar="S",
        help="closed loop: seconds over which clients start (default: one request's time)")
    add("--sweep", nargs="?", const="auto", metavar="LIST",
        help="several loads, e.g. 1,2,4,8; without a list: doubling until saturation, then closing in on the knee")
    add("--sweep-over", choices=("rate", "concurrency"), default="rate", help="what --sweep varies (default rate)")
    add("--num-warmups", type=int, metavar="N",
        help="requests before each load: one alone, the others at once (default: one more than its clients)")
    add = parser.add_argument_group("report").add_argument
    add("--percentile-metrics", default="ttft,sttft,tpot,itl,e2el", metavar="LIST",
        help="of ttft, sttft (from the sending), tpot, itl, icl (gaps between chunks), e2el (default %(default)s)")
    add("--metric-percentiles", default="50,90,95,99", metavar="LIST",
        help="default %(default)s; those that enough samples tell of")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives of a request, e.g. ttft:500 tpot:50 e2el:9000")
    add("--max-client-lag", type=float, default=10.0, metavar="MS", help="p99 above which a run is invalid (default 10)")
    add("--json", action="store_true", help="print one object instead of the report")
    add("--save-result", metavar="FILE", help=".json or .jsonl, with every request; `bench compare` reads it")
    add("--markdown", metavar="FILE", help="the report as markdown")
    add("--html", metavar="FILE", help="the report with charts, one file without links to elsewhere")


def run(options: argparse.Namespace) -> int:
    import asyncio

    plan = _plan(options)
    from ridgeline.bench.serve import measure, report
    from ridgeline.cli.progress import bar
    from ridgeline.report.text import write

    if options.save_result is not None and not options.save_result.endswith((".json", ".jsonl")):
        raise ConfigError(f"--save-result is {options.save_result!r}; the name must end in .json or .jsonl")
    with bar("Measuring", unit="requests") as advance:
        result = asyncio.run(measure.measure(plan, advance))
    print(json.dumps(report.without_requests(result), indent=1) if options.json else report.text(result))
    if options.save_result is not None:
        report.save(result, options.save_result)
    if options.markdown is not None:
        write(options.markdown, report.markdown(result))
    if options.html is not None:
        from ridgeline.bench.serve.html import html

        write(options.html, html(result))
    if result["interrupted"]:
        print("interrupted: what was measured until then is above", file=sys.stderr)
        return INTERRUPTED
    return 0 if any(cell["summary"]["completed"] for cell in result["cells"]) else 1


def _plan(options: argparse.Namespace) -> Plan:
    """raises ConfigError for what does not go together."""
    _check_numbers(options)
    from ridgeline.bench.serve.client import Target
    from ridgeline.bench.serve.measure import Plan

    endpoint = options.endpoint or BACKENDS[options.backend]
    body = {"temperature": options.temperature, **({"ignore_eos": True} if options.ignore_eos else {}), **options.extra_body}
    target = Target(options.base_url, endpoint, options.model or "", options.api_key or os.environ.get("OPENAI_API_KEY"),
                    options.timeout, not options.no_usage, body)
    spec = _spec(options)
    if spec.form == "ids" and (target.chat or spec.dataset == "agent"):
        raise ConfigError("--prompt-form ids needs /v1/completions and a workload without a history; use words")
    salt = options.salt or os.urandom(4).hex()
    return Plan(target, spec, _arrivals(options), options.num_prompts, _wanted(options), salt, _sweep(options),
                options.num_warmups, options.think_time or 0.0, options.ignore_eos, options.max_client_lag / 1e3,
                shlex.join(["ridgeline", *_without_key(sys.argv[1:])]))


def _without_key(arguments: list[str]) -> list[str]:
    """The command line as it may be shown: a secret does not go into a report."""
    shown = list(arguments)
    for i, argument in enumerate(shown):
        if argument == "--api-key" and i + 1 < len(shown):
            shown[i + 1] = "KEY"
        elif argument.startswith("--api-key="):
            shown[i] = "--api-key=KEY"
    return shown


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("num_prefixes", 1),
                        ("turns", 1), ("max_concurrency", 1), ("num_warmups", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"{_flag(name)} is {value}; it must be an integer of at least {least}")
    for name in ("request_rate", "trace_speed", "timeout", "max_client_lag"):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{_flag(name)} is {value:g}; it must be a number above 0")
    for name, most in (("stagger", math.inf), ("think_time", math.inf), ("range_ratio", 1.0)):
        value = getattr(options, name)
        if value is not None and not 0 <= value <= most:
            allowed = "at least 0" if math.isinf(most) else f"0 to {most:g}"
            raise ConfigError(f"{_flag(name)} is {value:g}; it must be {allowed}")
    for name, (datasets, _) in OWN.items():
        if getattr(options, name) is not None and options.dataset_name not in datasets:
            raise ConfigError(f"{_flag(name)} is a flag of --dataset-name {', '.join(datasets)}, not of {options.dataset_name}")


def _spec(options: argparse.Namespace) -> Spec:
    from ridgeline.bench.serve.workloads import Spec

    values: dict[str, Any] = {name: default if getattr(options, name) is None else getattr(options, name)
              for name, (_, default) in OWN.items()
                              if name not in ("think_time", "dataset_path")}
    if options.dataset_name == "trace" and options.dataset_path is None:
        raise ConfigError("--dataset-name trace needs --dataset-path FILE")
    return Spec(dataset=options.dataset_name, form=options.prompt_form, path=options.dataset_path, seed=options.seed, **values)


def _arrivals(options: argparse.Namespace) -> Arrivals:
    from ridgeline.bench.serve.arrivals import CLOSED, OPEN, TRACE, Arrivals, parse_ramp

    rate, ramp_to, limit = options.request_rate, None, options.max_concurrency
    timed = [flag for flag, value in (("--request-rate", rate), ("--ramp", options.ramp)) if value is not None]
    if len(timed) > 1:
        raise ConfigError("--request-rate and --ramp exclude each other; --ramp FROM:TO names both rates")
    if options.ramp is not None:
        rate, ramp_to = parse_ramp(options.ramp)
    if options.dataset_name == "trace":
        for flag in (*timed, *(["--sweep"] if options.sweep else []), *(["--burstiness"] if options.burstiness else [])):
            raise ConfigError(f"{flag} contradicts --dataset-name trace: a trace has its own times (--trace-speed)")
        if options.stagger is None:
            return Arrivals(TRACE, concurrency=limit)
    if options.stagger is not None and (rate is not None or options.dataset_name == "trace"):
        raise ConfigError("--stagger is for a closed loop: --max-concurrency without a rate")
    if rate is None and not (options.sweep and options.sweep_over == "rate"):
        if options.burstiness is not None:
            raise ConfigError("--burstiness needs --request-rate, --ramp or --sweep")
        # All at once is a burst that is meant: its clients do not start one after the other.
        return Arrivals(CLOSED, concurrency=limit or options.num_prompts, stagger=options.stagger if limit else 0.0)
    return Arrivals(OPEN, rate, options.burstiness or 1.0, ramp_to, limit)


def _sweep(options: argparse.Namespace) -> Sweep | None:
    from ridgeline.bench.serve.measure import Sweep

    if options.sweep is None:
        return None
    if options.ramp is not None:
        raise ConfigError("--sweep and --ramp exclude each other")
    over_rate = options.sweep_over == "rate"
    if not over_rate and options.request_rate is not None:
        raise ConfigError("--sweep-over concurrency is a closed loop; it takes no --request-rate")
    if options.sweep == "auto":
        return Sweep(over_rate, ())
    try:
        loads = [float(part) for part in options.sweep.split(",")]
    except ValueError:
        loads = []
    if not loads or any(not (load > 0 and math.isfinite(load)) or (not over_rate and load != int(load)) for load in loads):
        what = "rates above 0" if over_rate else "numbers of clients"
        raise ConfigError(f"--sweep is {options.sweep!r}; it must be {what} with commas between, as 1,2,4")
    return Sweep(over_rate, tuple(sorted(loads)))


def _wanted(options: argparse.Namespace) -> Wanted:
    from ridgeline.bench.serve.metrics import METRICS, Wanted, parse_goodput

    names = tuple(dict.fromkeys(name.strip() for name in options.percentile_metrics.split(",") if name.strip()))
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics names {name!r}; valid: {', '.join(METRICS)}")
    try:
        percentiles = tuple(sorted({float(part) for part in options.metric_percentiles.split(",")}))
    except ValueError:
        percentiles = (0.0,)
    if not all(0 < q < 100 for q in percentiles):
        raise ConfigError(f"--metric-percentiles is {options.metric_percentiles!r}; it must be numbers between 0 and 100 with "
                          "commas between, as 50,99")
    return Wanted(names, percentiles, parse_goodput(options.goodput))


def _burstiness(text: str) -> float:
    if text == "constant":
        return math.inf
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, or constant")
    return value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


