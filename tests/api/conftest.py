from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline import LLM
from tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_llm(folder: Path) -> LLM:
    return LLM(folder, threads=1, max_num_seqs=8)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """One engine for many tests; each leaves it idle and as it was."""
    strategies = dict(shared_llm.engine.strategies)
    yield shared_llm
    shared_llm.engine.strategies.clear()
    shared_llm.engine.strategies.update(strategies)
    assert not shared_llm.engine.scheduler.running and not shared_llm.engine.scheduler.waiting
    while shared_llm.frontend.has_work:
        shared_llm.frontend.step()
    shared_llm.engine.store.check_integrity()
