"""`ridgeline info`."""
from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ridgeline.cli.options import add_model_argument, add_shape_arguments, engine_options
from ridgeline.cli.report import NO_BREAK, fields
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ridgeline.config import EngineConfig
    from ridgeline.loading import LoadedModel
    from ridgeline.memory import ModelMemory
    from ridgeline.native.lower import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline info MODEL [flags]"
    add_model_argument(parser)
    parser.add_argument("--context", type=int, default=2048, metavar="N",
                        help="tokens of a sequence, for the totals (default 2048)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once, for the totals (default 1)")
    parser.add_argument("--json", action="store_true", help="print one object")
    add_shape_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.context < 1 or options.batch < 1:
        raise ConfigError(f"--context is {options.context} and --batch {options.batch}; both must be at least 1")
    from ridgeline.config import EngineConfig
    from ridgeline.loading import describe, survey
    from ridgeline.memory import as_json, measure

    config = EngineConfig.of(engine_options(options))
    found = describe(options.model, config)
    tokens = options.context * options.batch
    memory = measure(found.model, found.layout, weight_itemsize=found.dtype.itemsize, training_tokens=tokens)
    backend = survey(found, config)
    if not isinstance(backend, str):       # native matrices stay as they are stored, all else is fp32
        memory = replace(memory, weight_bytes=backend.nbytes + 4 * (memory.parameters - backend.parameters))
    kinds = found.checkpoint.bytes_by_kind()
    cache = tokens * memory.kv_bytes_per_token + options.batch * memory.state_bytes_per_sequence
    if options.json:
        print(json.dumps({
            **as_json(memory, found.checkpoint.config, kinds), "path": str(found.path), "format": found.checkpoint.format,
            "dtype": _name(found.dtype), "kv_cache_dtype": _name(found.layout.kv_dtype), "context": options.context,
            "batch": options.batch, "cache_bytes": cache, "inference_bytes": memory.weight_bytes + cache,
            **_backend_json(backend, config), "promise": promise(backend)}, indent=1))
        return 0
    print(fields(_rows(found, memory, kinds, cache, backend, config, options)))
    return 0


def _rows(found: LoadedModel, memory: ModelMemory, kinds: Mapping[str, tuple[int, int]], cache: int,
          backend: Report | str, config: EngineConfig, options: argparse.Namespace) -> list[tuple[str, str]]:
    from ridgeline.memory import layer_summary

    c, dtype = found.model.config, _name(found.dtype)
    stored = ", ".join(f"{kind} {_size(size)} ({count}{NO_BREAK}tensors)" for kind, (count, size) in kinds.items())
    sequences = f"{options.batch:,} {'sequence' if options.batch == 1 else 'sequences'} of {options.context:,} tokens"
    parts = [f"weights {_size(memory.weight_bytes)} ({dtype if isinstance(backend, str) else 'packed'})"]
    if memory.kv_bytes_per_token:
        parts.append(f"KV cache {_size(options.context * options.batch * memory.kv_bytes_per_token)} "
                     f"({_size(memory.kv_bytes_per_token)} a token, {_name(found.layout.kv_dtype)})")
    if memory.state_bytes_per_sequence:
        parts.append(f"recurrent state {_size(options.batch * memory.state_bytes_per_sequence)} "
                     f"({_size(memory.state_bytes_per_sequence)} a sequence)")
    training = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in memory.training.items())
    return [
        ("model", f"{found.path.name} ({found.checkpoint.format})"),
        ("architecture", f"{c.model_type}: {c.num_layers} layers, hidden size {c.hidden_size:,}, {c.num_heads} heads, "
                         f"vocabulary {c.vocab_size:,}, context {c.max_position:,}"),
        ("layers", layer_summary(found.layout)),
        ("parameters", f"{memory.parameters:,}, of which {memory.embedding_parameters:,} are embeddings"),
        ("stored as", stored or "nothing: the weights are made up (load format dummy)"),
        ("inference", f"{_size(memory.weight_bytes + cache)} for {sequences}: {', '.join(parts)}"),
        ("training", f"{_size(sum(memory.training.values()))} for a step over {sequences}: {training} (AdamW in mixed "
                     "precision, no recomputation)"),
        ("backend", _backend(backend, config)),
        ("promise", promise(backend)),
    ]


def _backend(backend: Report | str, config: EngineConfig) -> str:
    from ridgeline.loading import activation_dtype

    if isinstance(backend, str):
        return f"torch: {backend}"
    text = (f"native: {backend.isa} kernels, {backend.threads} {'thread' if backend.threads == 1 else 'threads'}, "
            f"{activation_dtype(config)} activations where weights are quantised")
    text += "".join(f"; {note}" for note in backend.notes)
    if backend.complete:
        return f"{text}; every layer"
    native = len(backend.layers) - len(backend.declined)
    return f"{text}; {native} of {len(backend.layers)} layers, the others with torch: {backend.reasons(most=2)}"


def _backend_json(backend: Report | str, config: EngineConfig) -> dict[str, Any]:
    from ridgeline.loading import activation_dtype

    if isinstance(backend, str):
        return {"backend": "torch", "backend_reason": backend}
    return {"backend": "native", "isa": backend.isa, "threads": backend.threads,
            "activation_dtype": activation_dtype(config), "native_layers": len(backend.layers) - len(backend.declined),
            "declined_layers": {layer.name: layer.reason for layer in backend.declined}, "notes": backend.notes}


def promise(backend: Report | str) -> str:
    """What holds when the same request runs under other circumstances."""
    if not isinstance(backend, str) and backend.complete:
        return ("the same bits: which requests share a batch, how a prompt is cut into chunks, what the prefix cache holds "
                "and how many threads run change no logit")
    return ("results are equal up to rounding: which requests share a batch, how a prompt is cut into chunks and what the "
            "prefix cache holds change logits within the tolerance of the dtype")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.{0 if units[0] == 'bytes' else 1}f}{NO_BREAK}{units[0]}"
