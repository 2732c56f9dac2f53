"""Ridgeline: an inference engine for language models that knows where it stands on the roofline.

    from ridgeline import LLM, SamplingParams
    LLM("gemma3-270m").generate("The sea is", SamplingParams(max_tokens=20))
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ridgeline.async_llm import AsyncLLM
    from ridgeline.llm import LLM
    from ridgeline.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "ridgeline.llm", "AsyncLLM": "ridgeline.async_llm", "SamplingParams": "ridgeline.sampling_params"}


def __getattr__(name: str) -> Any:
    """Import on first use: `import ridgeline` must not load torch, or `ridgeline --help` would take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(_HOMES[name]), name)
