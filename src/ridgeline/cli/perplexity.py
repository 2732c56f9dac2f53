"""`ridgeline perplexity`."""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ridgeline.cli.options import add_engine_arguments, add_model_argument, engine_options, read_text
from ridgeline.cli.report import fields

if TYPE_CHECKING:
    from ridgeline.quality import Quality


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline perplexity MODEL --file FILE [--reference MODEL] [flags]"
    add_model_argument(parser)
    parser.add_argument("--file", required=True, metavar="FILE", help="the text to score")
    parser.add_argument("--reference", metavar="MODEL",
                        help="another model, or the same one in another dtype: compare the distributions")
    parser.add_argument("--reference-dtype", default="float32", metavar="DTYPE",
                        help="dtype of the reference (default float32)")
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
        own = {k: v for k, v in flags.items() if k != "revision" or options.reference == options.model}
        reference = load_llm(options.reference, **{**own, "dtype": options.reference_dtype, "kv_cache_dtype": "auto"})
    with bar("Scoring", unit="tokens") as advance:
        quality = measure(llm, text, reference=reference, context=options.context, stride=options.stride,
                          on_progress=lambda done, total: advance(done, total, ""))
    if options.json:
        print(json.dumps({k: v for k, v in asdict(quality).items() if v is not None}))
        return 0
    print(fields(_rows(quality, options.reference)))
    return 0


def _rows(quality: Quality, reference: str | None) -> list[tuple[str, str]]:
    rows = [("tokens", f"{quality.tokens:<11,} scored once each, all but the first of the text"),
            ("perplexity", f"{quality.perplexity:<11.4f} exp(mean of -ln p)")]
    if reference is not None:
        rows += [("reference", f"{quality.reference_perplexity:<11.4f} perplexity of {reference}"),
                 ("mean KL", f"{quality.mean_kl:<11.3g} KL(reference || model) a token, in nats"),
                 ("p99 KL", f"{quality.p99_kl:<11.3g} its 99th percentile over the tokens"),
                 ("top-1", f"{quality.top1_agreement:<11.4f} share of tokens where both find the same token most likely")]
    return rows
