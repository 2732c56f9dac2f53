from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """A folder with the configuration of a tiny Llama, to be loaded with made-up weights."""

    def write(**fields: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
            **fields}))
        return str(tmp_path)

    return write
