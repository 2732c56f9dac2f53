"""`ridgeline serve`."""
from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from ridgeline.cli.options import add_engine_arguments, add_model_argument, engine_options
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from ridgeline.server.config import ServerConfig

KEY_VARIABLE = "RIDGELINE_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline serve MODEL [--host ADDRESS] [--port N] [flags]"
    add_model_argument(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1; 0.0.0.0 for all)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on (default 8000; 0 for a free one)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names that requests may use (default: MODEL)")
    add("--api-key", nargs="+", metavar="KEY", help=f"keys of which requests need one (also in {KEY_VARIABLE})")
    add("--max-queue", type=int, metavar="N",
        help="answers that may wait beyond those that run; more get 429 (default 1024)")
    add("--max-request-bytes", type=int, metavar="N", help="largest body; larger ones get 413 (default 33554432)")
    add("--shutdown-timeout", type=float, metavar="S",
        help="seconds that running requests get to finish after SIGTERM or SIGINT (default 30)")
    add("--allowed-origins", nargs="+", metavar="URL", help="origins of other web pages that may use the server (CORS)")
    add("--allowed-methods", nargs="+", metavar="NAME", help="methods that these may use (default *)")
    add("--allowed-headers", nargs="+", metavar="NAME", help="headers that these may send (default *)")
    add("--allow-credentials", action="store_true", default=None, help="let them send cookies and keys")
    add("--access-log", metavar="FILE", help="where each request becomes a line of JSON (default -, standard output)")
    add("--disable-access-log", action="store_true", help="no access log")
    add("--generation-config", metavar="NAME", help="auto: the model's sampling defaults (default); none: OpenAI's")
    add("--pooling-type", metavar="NAME", help="which hidden states are an embedding: last (default) or mean")
    add("--tool-call-parser", metavar="NAME", help="the model's format of tool calls: hermes, llama3_json, mistral, pythonic, "
        "deepseek_v3, qwen3_coder or gpt_oss (default: requests with tools are refused)")
    add("--enable-auto-tool-choice", action="store_true", help="as vLLM has it; --tool-call-parser alone is enough")
    add("--reasoning-parser", metavar="NAME", help="the model's format of reasoning: deepseek_r1, qwen3 or gpt_oss")
    add("--response-store-size", type=int, metavar="N", help="responses kept for previous_response_id (default 1000)")
    add("--otlp-traces-endpoint", metavar="URL", help="an OpenTelemetry collector that gets a span of each request, by OTLP "
        "over HTTP with protobuf; needs ridgeline[otel]")
    add_engine_arguments(parser)


SERVER_FLAGS = ("served_model_name", "api_key", "max_queue", "max_request_bytes", "shutdown_timeout", "allowed_origins",
                "allowed_methods", "allowed_headers", "allow_credentials", "access_log", "generation_config",
                "pooling_type", "tool_call_parser", "reasoning_parser", "response_store_size", "otlp_traces_endpoint")


def run(options: argparse.Namespace) -> int:
    require("fastapi", "uvicorn", "prometheus_client")
    import asyncio

    from ridgeline.cli.progress import load_llm
    from ridgeline.server.lifecycle import Server, listen

    config = server_config(options)
    listener = listen(options.host, options.port)        # a port that is taken is told before a model is loaded
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = Server(load_llm(options.model, **engine_options(options)), config, listener)

    async def main() -> None:
        server.end_on_signals()
        await server.run(lambda: print(f"ridgeline: serving {config.names[0]} at {address(listener)}", file=sys.stderr,
                                       flush=True))

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def server_config(options: argparse.Namespace) -> ServerConfig:
    from ridgeline.server.config import ServerConfig

    given: dict[str, Any] = {name: getattr(options, name) for name in SERVER_FLAGS
                             if getattr(options, name, None) is not None}
    if "api_key" not in given and os.environ.get(KEY_VARIABLE):
        given["api_key"] = [os.environ[KEY_VARIABLE]]
    if options.disable_access_log:
        given["access_log"] = None
    return ServerConfig(model=options.model, **given)


def require(*modules: str) -> None:
    """raises ConfigError that tells how to install what is missing."""
    import importlib.util

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}; install it with: pip install 'ridgeline[serve]'")


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
