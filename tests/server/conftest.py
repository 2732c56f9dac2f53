from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from ridgeline import LLM
from script_kit import TALKING_TEMPLATE
from server_kit import Running, client_of
from tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def running(folder: Path) -> Iterator[Running]:
    """One server for many tests; each leaves it idle."""
    with Running(LLM(folder, threads=1, max_num_seqs=8), model="tiny") as server:
        yield server


@pytest.fixture
def server(running: Running) -> Iterator[Running]:
    yield running
    running.wait_idle()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def parsing(folder: Path) -> Iterator[Running]:
    """A server that reads calls and reasoning; what its model says is set by `says`."""
    with Running(LLM(folder, threads=1, chat_template=TALKING_TEMPLATE), model="tiny", tool_call_parser="hermes",
                 reasoning_parser="qwen3") as server:
        yield server
