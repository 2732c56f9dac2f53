"""`ridgeline quantize`: a float checkpoint becomes a folder in the format compressed-tensors (pack-quantized)."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.errors import ConfigError, ModelError, UnsupportedModel
from ridgeline.models.base import CausalLM
from ridgeline.quant.calibrate import Shared, calibrate
from ridgeline.quant.compensate import Encoded, compensate, encode
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.hf_config import read_json
from ridgeline.weights.mapping import From

METHODS = ("calibrated", "search", "nearest")
GROUP_SIZES = (32, 64, 128)
END_GROUP = 32                       # of embeddings and head, in 8 bits
_FLOATS = ("F64", "F32", "F16", "BF16")
_ENDS = ("model.embed_tokens", "lm_head")
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".md"}


@dataclass(frozen=True)
class Recipe:
    """bits: 4 or 8, of linear layers; group: columns that share a scale; method: how int4 codes are chosen; keep_ends:
    embeddings and head stay as they are, else they get 8 bits."""

    bits: int
    group: int = 32
    method: str = "calibrated"
    keep_ends: bool = False

    def __post_init__(self) -> None:
        for name, value, valid in (("bits", self.bits, (4, 8)), ("group_size", self.group, GROUP_SIZES),
                                   ("method", self.method, METHODS)):
            if value not in valid:
                raise ConfigError(f"{name} is {value!r}; valid: {', '.join(map(str, valid))}")


@dataclass
class Written:
    """Of one kind of tensor: how many, their values and their bytes before and after."""

    what: str
    tensors: int = 0
    values: int = 0
    before: int = 0
    after: int = 0


@dataclass
class _Pieces:
    """Quantised matrices of a checkpoint: source name -> (first row, rows as codes), the whole of it in the end."""

    codes: dict[str, list[tuple[int, Encoded]]] = field(default_factory=dict)

    def add(self, source: From, encoded: Encoded) -> None:
        self.codes.setdefault(source.name, []).append((0 if source.rows is None else source.rows[0], encoded))


def check_target(out: Path) -> None:
    """raises ConfigError where something would be overwritten."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; name a new one")


def check_source(model: CausalLM, checkpoint: Checkpoint) -> None:
    """raises UnsupportedModel for what cannot be quantised or not be written, before any weight is read."""
    if checkpoint.format != "safetensors":
        raise UnsupportedModel(f"{checkpoint.path}: holds {checkpoint.format} weights; quantize reads a folder of safetensors")
    quantised = [name for name in checkpoint.names() if checkpoint.form(name) is not None]
    if quantised:
        raise UnsupportedModel(f"{checkpoint.path}: {quantised[0]!r} and {len(quantised) - 1} more are quantised already; "
                               f"quantize needs {', '.join(_FLOATS[1:])} weights")
    turned = [source.name for source in model.sources().values() if source.transpose]
    if turned:
        raise UnsupportedModel(f"{checkpoint.path}: {turned[0]!r} is stored transposed, which the format does not know")


@torch.inference_mode()
def quantise_folder(model: CausalLM, checkpoint: Checkpoint, out: Path, recipe: Recipe, sequences: Sequence[Sequence[int]] = (),
                    on_layer: Callable[[int, int], None] | None = None) -> list[Written]:
    """Quantise a model that is loaded in fp32 (its weights change) and write it.

    sequences: token ids that the calibrated method runs. raises ConfigError where `out` is not empty, UnsupportedModel, and
    ModelError where the model computes values that are not finite.
    """
    check_target(out)
    check_source(model, checkpoint)
    pieces, sources = _Pieces(), model.sources()

    def quantise(name: str, layer: nn.Module, inputs: list[Shared]) -> None:
        modules = dict(layer.named_modules())
        for shared in inputs:
            parts: list[Tensor] = [modules[leaf].weight for leaf in shared.names]
            weight = torch.cat(parts)                                                   # (rows of all, cols)
            if weight.shape[1] % recipe.group:
                continue
            if recipe.method == "calibrated" and recipe.bits == 4:
                if not shared.gram.isfinite().all():
                    raise ModelError(f"{checkpoint.path}: what {name}.{shared.names[0]} reads of the calibration text is not "
                                     "finite")
                encoded = compensate(weight, shared.gram, recipe.bits, recipe.group)
            else:
                encoded = encode(weight, recipe.bits, recipe.group, search=recipe.bits == 4 and recipe.method != "nearest")
            at = 0
            for leaf, part in zip(shared.names, parts):
                own = encoded.rows(at, at + len(part))
                part.copy_(own.values())
                parameter = f"{name}.{leaf}.weight"
                pieces.add(sources.get(parameter, From(parameter)), own)
                at += len(part)

    if recipe.method == "calibrated" and recipe.bits == 4:
        calibrate(model, sequences, quantise, on_layer)
    else:
        layers = model.model.layers
        for index, layer in enumerate(layers):
            linear = [n for n, module in layer.named_modules() if isinstance(module, nn.Linear)]
            quantise(f"model.layers.{index}", layer, [Shared([n], torch.empty(0)) for n in linear])
            if on_layer is not None:
                on_layer(index + 1, len(layers))
    if not recipe.keep_ends:
        for name in _ENDS:
            weight = model.get_parameter(f"{name}.weight")
            if f"{name}.weight" in checkpoint.names() and weight.shape[1] % END_GROUP == 0:
                pieces.add(From(f"{name}.weight"), encode(weight, 8, END_GROUP, search=False))
    return _write(checkpoint, out, recipe, pieces)


def _write(checkpoint: Checkpoint, out: Path, recipe: Recipe, pieces: _Pieces) -> list[Written]:
    tensors: dict[str, Tensor] = {}
    report = {what: Written(what) for what in ("linear layers", "embeddings and head", "other tensors, as they were")}
    kept = []
    for name in checkpoint.names():
        encoded = _whole(pieces.codes.get(name, []), checkpoint.shape(name))
        base = name.removesuffix(".weight")
        if encoded is None:
            found = {name: checkpoint.read(name, _DTYPES.get(checkpoint.kind(name), torch.float32)).clone()}
            if len(checkpoint.shape(name)) == 2:
                kept.append(base)
        else:
            found = _packed(base, encoded)
        line = report["other tensors, as they were" if encoded is None else
                      "embeddings and head" if base in _ENDS else "linear layers"]
        line.tensors, line.values = line.tensors + 1, line.values + checkpoint.read(name, torch.float32).numel()
        line.before, line.after = line.before + checkpoint.nbytes(name), line.after + sum(t.nbytes for t in found.values())
        tensors.update(found)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    _copy_others(checkpoint.path, out)
    config = read_json(checkpoint.path / "config.json")
    config["quantization_config"] = quantization_config(recipe, kept)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [line for line in report.values() if line.tensors]


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
           "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def _whole(parts: list[tuple[int, Encoded]], shape: tuple[int, ...]) -> Encoded | None:
    """The parts of a fused matrix in order, if they make up all of it."""
    ordered = [encoded for _, encoded in sorted(parts, key=lambda part: part[0])]
    if not ordered or sum(len(e.codes) for e in ordered) != shape[0]:
        return None
    first = ordered[0]
    return Encoded(first.bits, first.group, *(torch.cat([getattr(e, name) for e in ordered])
                                              for name in ("codes", "scales")))


def _packed(base: str, encoded: Encoded) -> dict[str, Tensor]:
    """weight_packed (rows, cols * bits / 32) int32, weight_scale (rows, groups) fp16, weight_shape (2) int64."""
    return {f"{base}.weight_packed": pack(encoded.codes, encoded.bits), f"{base}.weight_scale": encoded.scales.half(),
            f"{base}.weight_shape": torch.tensor(encoded.codes.shape)}


def pack(codes: Tensor, bits: int) -> Tensor:
    """(rows, cols) uint8, cols a multiple of 8 -> (rows, cols * bits / 32) int32, the first code lowest."""
    octets = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return octets.contiguous().view(torch.int32)


def _copy_others(source: Path, out: Path) -> None:
    """The tokenizer's files, templates and generation_config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _NOT_COPIED and not path.name.startswith(".") and path.name not in (
                "config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, out / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, out / path.name)


def quantization_config(recipe: Recipe, kept: list[str]) -> dict[str, Any]:
    """kept: matrices that stay in floating point."""
    def group(targets: list[str], bits: int, size: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size,
                   "dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None}
        return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}

    groups = {"group_0": group(["Linear"], recipe.bits, recipe.group)}
    if not recipe.keep_ends:
        groups["group_1"] = group([r"re:.*embed_tokens$", r"re:.*lm_head$"], 8, END_GROUP)
    # A head that shares the embeddings' matrix has no tensor of its own, and must not be taken for a quantised layer.
    ignore = [*kept, *(["lm_head"] if recipe.keep_ends and "lm_head" not in kept else [])]
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": groups, "ignore": ignore, "kv_cache_scheme": None}
