from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import LLM
from tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("grammar"), max_position_embeddings=512)


@pytest.fixture(scope="session")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, threads=1, backend="torch", max_num_seqs=16)


@pytest.fixture(scope="session")
def looking_up(tiny: Path) -> LLM:
    """The same model, verifying continuations that it finds in the text."""
    return LLM(tiny, threads=1, backend="torch", max_num_seqs=16,
               speculative_config={"method": "ngram", "num_speculative_tokens": 4})
