from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from ridgeline import LLM, hub
from ridgeline.errors import ModelNotFound


@pytest.fixture(scope="package")
def gemma() -> Iterator[LLM]:
    """The packaged model in fp32 on every core; other tests run on one thread, which they get back."""
    try:
        hub.resolve("gemma3-270m")
    except ModelNotFound as missing:
        pytest.skip(f"needs the packaged model: {missing}")
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield LLM("gemma3-270m", dtype="float32", max_model_len=2048, progress=False)
    torch.set_num_threads(threads)
