"""What was measured, for a person and for a program."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.bench.limits import Shape
from ridgeline.bench.machine import Machine
from ridgeline.llm import LLM

COLUMNS = (("work", "work"), ("tokens/s", "tokens_per_s"), ("lowest", "lowest_tokens_per_s"),
           ("highest", "highest_tokens_per_s"), ("limit", "limit_tokens_per_s"), ("share", "share_of_limit"),
           ("bound by", "bound"), ("head rows", "head_rows_scored"))


def model_json(llm: LLM, shape: Shape) -> dict[str, Any]:
    loaded, config = llm.loaded, llm.config
    return {
        "name": loaded.name, "file": loaded.path.name, "format": loaded.checkpoint.format,
        "architecture": loaded.model.config.model_type, "backend": "torch" if loaded.report is None else "native",
        "dtype": _name(loaded.dtype), "kv_cache_dtype": _name(loaded.layout.kv_dtype), "quantization": config.quantization,
        "matrix_parameters": {"layers": shape.layer_parameters, "head": shape.spec.head.parameters},
        "weight_bytes": {"layers": shape.layer_bytes, "head": shape.spec.head.nbytes},
        "layers_not_native": [] if loaded.report is None else [layer.name for layer in loaded.report.declined],
        "max_num_batched_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs,
    }


def as_json(llm: LLM, shape: Shape, machine: Machine, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": machine.as_json(), "model": model_json(llm, shape), "results": list(results)}


def header(llm: LLM, shape: Shape, machine: Machine) -> str:
    """The machine with both of its limits, and the model as it lies in memory."""
    model = model_json(llm, shape)
    quantised = f", quantised to {model['quantization']}" if model["quantization"] else ""
    left = len(model["layers_not_native"])
    backend = model["backend"] + (f", {left} layers not native" if left else "")
    return "\n".join([
        f"machine  {machine.line()}",
        f"model    {model['name']} ({model['format']}{quantised}; {backend}): {shape.layer_bytes / 1e6:.0f} MB of layers, "
        f"{shape.spec.head.nbytes / 1e6:.0f} MB of head; KV cache {model['kv_cache_dtype']}",
        f"passes   of at most {model['max_num_batched_tokens']} rows; prefix caching off; one warm-up run",
    ])


def table(results: Sequence[dict[str, Any]]) -> str:
    """Median, lowest and highest tokens/s over the repeats, the machine's limit for the same passes, and the share of it."""
    rows = [[title for title, _ in COLUMNS]]
    rows += [[_cell(field, result[field]) for _, field in COLUMNS] for result in results]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]).rstrip()
                     for row in rows)


def served(result: dict[str, Any]) -> str:
    """The line under the table of `bench throughput`."""
    gap = "" if result["median_itl_s"] is None else f", median ITL {result['median_itl_s'] * 1e3:.1f} ms"
    again = f", {result['preemptions']} preemptions" if result["preemptions"] else ""
    return (f"{result['sequences']} prompts of {result['prompt_tokens']} tokens, {result['output_len']} generated each, in "
            f"{result['seconds']:.2f} s: {result['requests_per_s']:.2f} requests/s, {result['total_tokens_per_s']:.1f} "
            f"tokens/s with the prompts; median TTFT {result['median_ttft_s'] * 1e3:.0f} ms{gap}{again}")


def _cell(field: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "all"
    return f"{value:.1%}" if field in ("share_of_limit", "head_rows_scored") else f"{value:.1f}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
