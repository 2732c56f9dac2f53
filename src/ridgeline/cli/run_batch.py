"""`ridgeline run-batch`."""
from __future__ import annotations

import argparse
import sys

from ridgeline.cli.options import add_engine_arguments, engine_options
from ridgeline.cli.serve import require
from ridgeline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline run-batch [MODEL] -i IN.jsonl -o OUT.jsonl [flags]"
    parser.add_argument("model", metavar="MODEL", nargs="?", help="default: the \"model\" of the first request")
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE",
                        help="one request a line: {\"custom_id\", \"method\": \"POST\", \"url\": \"/v1/...\", \"body\"}")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE",
                        help="one answer a line, in the order in which they end; requests that have one are not run again")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that requests may use")
    parser.epilog = "The exit code is 1 where a request failed; its line in the output says why."
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    require("fastapi", "prometheus_client")
    import asyncio

    from ridgeline.cli.progress import bar, load_llm
    from ridgeline.server.batch import Line, answered, read_lines, run_batch
    from ridgeline.server.config import ServerConfig
    from ridgeline.server.metrics import Metrics
    from ridgeline.server.service import Service

    lines = read_lines(options.input_file)
    done = answered(options.output_file)
    todo = [line for line in lines if line.custom_id not in done]
    print(f"ridgeline: {len(lines)} requests, {len(lines) - len(todo)} answered before", file=sys.stderr)
    if not todo:
        return 0
    model = options.model or _model_of(todo[0].value)
    names = options.served_model_name or [model]
    llm = load_llm(model, **engine_options(options))

    async def main(todo: list[Line]) -> int:
        from ridgeline.async_llm import AsyncLLM

        config = ServerConfig(model=model, served_model_name=names, max_queue=len(todo) + 1_000_000)
        async with AsyncLLM(llm) as engine:
            service = Service(engine, config, Metrics(llm.engine.stats, names[0]))
            count = 0
            with open(options.output_file, "a", encoding="utf-8") as output, bar("Answering", unit="requests") as advance:
                def tell(good: bool) -> None:
                    nonlocal count
                    count += 1
                    advance(count, len(todo), f"{llm.stats.generation_tokens} tokens")

                return await run_batch(service, todo, output, tell)

    failed = asyncio.run(main(todo))
    if failed:
        print(f"ridgeline: error: {failed} of {len(todo)} requests failed; see {options.output_file}", file=sys.stderr)
    return 1 if failed else 0


def _model_of(request: dict[str, object]) -> str:
    body = request.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    if not isinstance(model, str) or not model:
        raise ConfigError("no MODEL is given and the first request names none")
    return model
