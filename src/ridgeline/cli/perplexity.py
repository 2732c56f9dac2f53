"""`ridgeline perplexity`."""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ridgeline.cli.options import add_engine_arguments, engine_options, read_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--file", required=True, metavar="FILE", help="the text to score")
    parser.add_argument("--reference", metavar="MODEL",
                        help="another model, or the same one: compare every distribution with its")
    parser.add_argument("--reference-dtype", default="float32", metavar="DTYPE", help="its dtype (default float32)")
    parser.add_argument("--context", type=int, metavar="N", help="window in tokens (default: the model's, at most 2048)")
    parser.add_argument("--stride", type=int, metavar="N", help="how far windows advance (default: half the window)")
    parser.add_argument("--json", action="store_true", help="print one object")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    text = read_text(options.file, "text")
    from ridgeline.cli.progress import bar, load_llm
    from ridgeline.quality import measure

    flags = engine_options(options)
    flags["max_num_seqs"] = 1
    llm = load_llm(options.model, **flags)
    reference = None
    if options.reference is not None:
        reference = load_llm(options.reference, **{**flags, "dtype": options.reference_dtype, "kv_cache_dtype": "auto"})
    with bar("Scoring", unit="tokens") as advance:
        quality = measure(llm, text, reference=reference, context=options.context, stride=options.stride,
                          on_progress=lambda done, total: advance(done, total, ""))
    if options.json:
        print(json.dumps({k: v for k, v in asdict(quality).items() if v is not None}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value", "how it is counted", box=None, pad_edge=False)
    table.add_row("tokens", f"{quality.tokens}", "scored once each, all but the first")
    table.add_row("perplexity", f"{quality.perplexity:.4f}", "exp(mean -ln p)")
    if quality.mean_kl is not None:
        table.add_row("reference", f"{quality.reference_perplexity:.4f}", f"perplexity of {options.reference}")
        table.add_row("mean KL", f"{quality.mean_kl:.3g}", "KL(reference || model) a token, nats")
        table.add_row("p99 KL", f"{quality.p99_kl:.3g}", "99th percentile over tokens")
        table.add_row("top-1", f"{quality.top1_agreement:.4f}", "share of tokens with the same most likely token")
    Console().print(table)
    return 0
