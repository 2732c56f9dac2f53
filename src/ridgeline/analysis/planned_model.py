"""A model of which nothing is loaded, on a machine that is not here: from a config.json, or from the headers of its weights."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.plan import plan
from ridgeline.analysis.read import spec_of
from ridgeline.analysis.shard import sharded
from ridgeline.analysis.spec import Spec
from ridgeline.analysis.subject import spec_json
from ridgeline.config import EngineConfig
from ridgeline.loading import build, open_model, survey


def planned(name: str, config: EngineConfig, machine: Hardware, devices: int) -> tuple[Spec, dict[str, Any]]:
    """The share of one of `devices`, and facts about the whole model for the report.

    Weights are planned as they are stored; those of a bare config.json in 16 bits, or as the configuration's `quantization`
    says.
    raises what opening a model raises, UnsupportedModel, and ConfigError where layers cannot be cut into so many parts.
    """
    opened = open_model(name, config)
    kv_dtype = "bfloat16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    raw = opened.checkpoint.config
    whole = plan(raw, machine, name=name, quantization=config.quantization, kv_dtype=kv_dtype).spec
    if opened.checkpoint.format != "dummy":
        shapes = build(opened, config, config.max_model_len)
        stored = survey(shapes, config)
        if not isinstance(stored, str):
            read = spec_of(replace(shapes, report=stored), shapes, config)
            whole = replace(read, kernels=whole.kernels, stream=whole.stream, precision=whole.precision, kv_dtype=kv_dtype)
    kernels = "fused kernels" if whole.kernels == "fused" else "native kernels"
    on = machine.name if devices == 1 else f"{devices} x {machine.name}, tensor parallel"
    model = {"name": name, "format": opened.checkpoint.format, "architecture": raw.get("model_type"),
             "backend": f"planned for {on}, {kernels}", **spec_json(whole)}
    return sharded(whole, devices), model
