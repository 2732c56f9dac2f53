"""`ridgeline info`."""
from __future__ import annotations

import argparse
import json

from ridgeline.cli.options import add_engine_arguments, engine_options
from ridgeline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens a sequence, for the totals (2048)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once, for the totals (1)")
    parser.add_argument("--json", action="store_true", help="print one object")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.context < 1 or options.batch < 1:
        raise ConfigError("--context and --batch must be at least 1")
    from ridgeline.config import EngineConfig
    from ridgeline.loading import describe
    from ridgeline.memory import as_json, layer_summary, measure

    config = EngineConfig.of(engine_options(options))
    found = describe(options.model, config)
    tokens = options.context * options.batch
    memory = measure(found.model, found.layout, weight_itemsize=found.dtype.itemsize, training_tokens=tokens)
    kinds = found.checkpoint.bytes_by_kind()
    cache = tokens * memory.kv_bytes_per_token + options.batch * memory.state_bytes_per_sequence
    if options.json:
        print(json.dumps({**as_json(memory, found.checkpoint.config, kinds), "path": str(found.path),
                          "format": found.checkpoint.format, "dtype": str(found.dtype).removeprefix("torch."),
                          "cache_bytes": cache, "inference_bytes": memory.weight_bytes + cache,
                          "promise": PROMISE}, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    raw = found.model.config
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = [
        ("model", f"{found.path.name} ({found.checkpoint.format})"),
        ("architecture", f"{raw.model_type}: {raw.num_layers} layers, hidden {raw.hidden_size}, {raw.num_heads} heads, "
                         f"vocabulary {raw.vocab_size:,}, context {raw.max_position:,}"),
        ("layers", layer_summary(found.layout)),
        ("parameters", f"{memory.parameters:,} ({memory.embedding_parameters:,} of them embeddings)"),
        ("in the file", "; ".join(f"{kind}: {count} tensors, {_size(size)}" for kind, (count, size) in kinds.items())),
        ("weights in memory", f"{_size(memory.weight_bytes)} as {str(found.dtype).removeprefix('torch.')}"),
        ("KV cache", f"{_size(memory.kv_bytes_per_token)} a token as {str(found.layout.kv_dtype).removeprefix('torch.')}"),
        ("recurrent state", f"{_size(memory.state_bytes_per_sequence)} a sequence"),
        ("inference", f"{_size(memory.weight_bytes + cache)}: weights, and the cache of {options.batch} x "
                      f"{options.context} tokens ({_size(cache)})"),
        ("training", f"{_size(sum(memory.training.values()))} for a step over the same tokens: "
         + ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in memory.training.items())
         + " (mixed-precision AdamW, no recomputation)"),
        ("promise", PROMISE),
    ]
    for row in rows:
        table.add_row(*row)
    Console(width=None, soft_wrap=False).print(table)
    return 0


PROMISE = ("the torch backend gives equal tokens up to rounding: batch, chunking and prefix hits change logits within "
           "the dtype's tolerance, not their meaning")


def _size(count: int) -> str:
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
