"""`ridgeline quantize`."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.options import add_model_argument, read_text
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.loading import LoadedModel
    from ridgeline.quant.folder import Written

WINDOW = 512              # tokens of a calibration sequence
FEW_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ridgeline quantize MODEL OUT [--quantization int4|int8] [flags]"
    add_model_argument(parser)
    parser.add_argument("out", metavar="OUT", help="the folder to write; new or empty")
    add = parser.add_argument
    add("--quantization", default="int4", metavar="TYPE", help="int4 (default) or int8, of linear layers")
    add("--group-size", type=int, default=32, metavar="N", help="columns that share a scale: 32 (default), 64 or 128")
    add("--method", default="calibrated", metavar="NAME",
        help="how int4 codes are chosen: calibrated (on a text, default), search (least squared error) or nearest")
    add("--calibration", metavar="FILE", help="the text to calibrate on (default: a short one of many kinds)")
    add("--keep-embeddings", action="store_true", help="leave embeddings and head in floating point (default: 8 bits)")
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    add("--tokenizer", metavar="PATH", help="folder or file of another tokenizer for the calibration text")


def run(options: argparse.Namespace) -> int:
    bits = {"int4": 4, "int8": 8}.get(options.quantization)
    if bits is None:
        raise ConfigError(f"quantization is {options.quantization!r}; valid: int4, int8")
    from ridgeline.cli.progress import bar
    from ridgeline.config import EngineConfig
    from ridgeline.loading import describe, load
    from ridgeline.quant.folder import Recipe, check_source, check_target, quantise_folder

    recipe, out = Recipe(bits, options.group_size, options.method, options.keep_embeddings), Path(options.out).expanduser()
    calibrated = recipe.bits == 4 and recipe.method == "calibrated"
    if options.calibration is not None and not calibrated:
        raise ConfigError("--calibration is for --quantization int4 --method calibrated")
    check_target(out)
    config = EngineConfig(dtype="float32", backend="torch", revision=options.revision, tokenizer=options.tokenizer)
    found = describe(options.model, config)
    check_source(found.model, found.checkpoint)
    sequences = _sequences(found, config, options.calibration) if calibrated else []
    with bar(f"Loading {options.model}", unit="bytes") as advance:
        load(found, config, lambda name, done, total: advance(done, total, ""))
    with bar("Quantising", unit="layers") as advance:
        written = quantise_folder(found.model, found.checkpoint, out, recipe, sequences,
                                  lambda done, total: advance(done, total, ""))
    print(_table(written))
    print(f"\nwritten to {out}")
    return 0


def _sequences(found: LoadedModel, config: object, file: str | None) -> list[list[int]]:
    """Token ids in windows, each behind the token that begins a text. raises ConfigError for a text without enough of them."""
    from importlib.resources import files

    from ridgeline.config import EngineConfig
    from ridgeline.llm import find_tokenizer

    assert isinstance(config, EngineConfig)
    tokenizer = find_tokenizer(found, config)
    if tokenizer is None:
        raise ConfigError(f"{found.name} has no tokenizer to calibrate with; name one with --tokenizer, or use --method search")
    text = files("ridgeline.quant").joinpath("calibration.txt").read_text("utf-8") if file is None else read_text(
        file, "calibration")
    ids = tokenizer.encode(text)
    begin = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    step = min(WINDOW, found.model.config.max_model_len) - len(begin)
    body = ids[len(begin):]
    if len(body) < FEW_TOKENS and file is not None:
        raise ConfigError(f"the calibration file {file!r} has {len(body)} tokens; at least {FEW_TOKENS} are needed")
    return [[*begin, *body[at:at + step]] for at in range(0, len(body), step)]


def _table(lines: list[Written]) -> str:
    """One line a kind of tensor, and the sum."""
    rows = [(line.what, line.tensors, line.values, line.before, line.after) for line in lines]
    rows.append(("all", sum(line.tensors for line in lines), sum(line.values for line in lines),
                 sum(line.before for line in lines), sum(line.after for line in lines)))
    out = [f"{'':30}{'tensors':>8}{'before, MB':>12}{'after, MB':>12}{'bits a value':>14}"]
    out += [f"{what:30}{tensors:>8}{before / 1e6:>12.1f}{after / 1e6:>12.1f}{8 * after / max(1, values):>14.2f}"
            for what, tensors, values, before, after in rows]
    return "\n".join(out)
