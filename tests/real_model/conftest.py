from __future__ import annotations

import pytest
import torch

from ridgeline import LLM, hub
from ridgeline.errors import ModelNotFound

torch.set_num_threads(1)         # on a busy machine two threads spend most of their time waiting for each other


@pytest.fixture(scope="package")
def gemma() -> LLM:
    """The packaged model in fp32."""
    try:
        hub.resolve("gemma3-270m")
    except ModelNotFound as missing:
        pytest.skip(f"needs the packaged model: {missing}")
    return LLM("gemma3-270m", dtype="float32", max_model_len=2048, progress=False)
