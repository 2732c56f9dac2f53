"""compressed-tensors (vLLM, llm-compressor): formats pack-quantized and int-quantized, weights of 4 or 8 bits.

Activations that the file asks to be quantised (W8A8) are not: only the weights are read, and a note says so.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import CorruptFile
from ridgeline.weights.quantised import Codes, Context, Decode, Form, Found, Header, QuantisedMatrix, Read, groups, unpack

_FORMATS = ("pack-quantized", "int-quantized")
_FLOATS = ("F16", "BF16", "F32")
# Of activations and of the cache, which are computed at run time or left alone.
_OTHERS = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale")
_CLASSES = {"embed_tokens": "Embedding", "wte": "Embedding", "wpe": "Embedding"}       # all others are Linear


@dataclass(frozen=True)
class _Scheme:
    name: str
    targets: tuple[str, ...]
    format: str
    bits: int
    symmetric: bool
    strategy: str
    group: int | None            # columns; None: a whole row


def find_compressed(context: Context) -> Found:
    """weight_packed or an int8 weight, weight_scale, weight_zero_point, weight_shape, weight_g_idx; schemes by target."""
    found = Found()
    found.hidden = {name for name in context.headers if name.endswith(_OTHERS)}
    if context.config.get("format") == "dense":
        return found                                  # quantised in values only: the weights are plain
    schemes = _schemes(context, found)
    sparsity = context.config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        context.refuse("sparsity_config.format", sparsity.get("format"), "'dense'")
    ignore = tuple(context.config.get("ignore") or ())
    scaled = [name.removesuffix(".weight_scale") for name in context.headers if name.endswith(".weight_scale")]
    for base in dict.fromkeys([*context.bases(".weight_packed"), *scaled]):
        packed = f"{base}.weight_packed" in context.headers
        scheme = None if _matches(ignore, base) else _scheme_of(schemes, base)
        if scheme is None:
            raise CorruptFile(f"{context.source}: tensor {base + '.weight_scale'!r} is there, but no config_group has the "
                              f"target {base!r}, or it is in ignore")
        if packed != (scheme.format == "pack-quantized"):
            raise CorruptFile(f"{context.source}: {base!r} has {'a' if packed else 'no'} weight_packed, and its format is "
                              f"{scheme.format!r}")
        found.add(f"{base}.weight", _matrix(context, base, scheme))
    return found


def _schemes(context: Context, found: Found) -> list[_Scheme]:
    groups_ = context.config.get("config_groups")
    if not isinstance(groups_, Mapping) or not groups_:
        raise CorruptFile(f"{context.source}: quantization_config.config_groups is {groups_!r}; it must be an object with "
                          "groups")
    schemes = []
    for name, entry in groups_.items():
        at = f"config_groups.{name}"
        weights = entry.get("weights") if isinstance(entry, Mapping) else None
        if not isinstance(weights, Mapping):
            raise CorruptFile(f"{context.source}: quantization_config.{at}.weights is {weights!r}; it must be an object")
        layout = entry.get("format") or context.config.get("format")
        layout = context.one_of(f"{at}.format" if entry.get("format") else "format", layout, _FORMATS)
        context.one_of(f"{at}.weights.type", weights.get("type", "int"), ("int",))
        bits = context.one_of(f"{at}.weights.num_bits", weights.get("num_bits"), (4, 8))
        size = weights.get("group_size")
        strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
        context.one_of(f"{at}.weights.strategy", strategy, ("group", "channel", "tensor"))
        group = context.group_size(f"{at}.weights.group_size", size) if strategy == "group" else -1
        if strategy == "group" and group == -1:
            strategy = "channel"
        symmetric = context.one_of(f"{at}.weights.symmetric", weights.get("symmetric", True), (True, False))
        if entry.get("input_activations"):
            found.notes.append(f"{at} asks for quantised activations; only its weights are read as the file has them")
        targets = tuple(str(target) for target in entry.get("targets") or ())
        schemes.append(_Scheme(name, targets, layout, bits, symmetric, strategy, None if group == -1 else group))
    return schemes


def _matches(targets: tuple[Any, ...], base: str) -> bool:
    return any(_match(str(target), base) for target in targets)


def _match(target: str, base: str) -> bool:
    """A name, a pattern "re:...", or the class of the layer."""
    if target.startswith("re:"):
        return re.match(target[3:], base) is not None
    return target in (base, _CLASSES.get(base.rpartition(".")[2], "Linear"))


def _scheme_of(schemes: list[_Scheme], base: str) -> _Scheme | None:
    """By name before by pattern before by class."""
    kind = _CLASSES.get(base.rpartition(".")[2], "Linear")

    def rank(target: str) -> int:
        return 0 if target == base else 1 if target.startswith("re:") else 2 if target == kind else 3

    fits = [(rank(t), scheme) for scheme in schemes for t in scheme.targets if _match(t, base)]
    return min(fits, key=lambda pair: pair[0])[1] if fits else None


def _matrix(context: Context, base: str, scheme: _Scheme) -> QuantisedMatrix:
    per_word, packed = 32 // scheme.bits, scheme.format == "pack-quantized"
    parts: dict[str, str] = {}
    if packed:
        parts["shape"] = context.part(f"{base}.weight_shape", (2,), ("I64", "I32"))
        rows, cols = (int(n) for n in context.read(parts["shape"]))
        words = context.headers[f"{base}.weight_packed"].shape[1]
        if rows < 1 or groups(cols, per_word) != words:
            raise CorruptFile(f"{context.source}: tensor {parts['shape']!r} says {rows} x {cols}, which {words} words a row of "
                              f"{scheme.bits}-bit codes do not hold")
        parts["codes"] = context.part(f"{base}.weight_packed", (rows, words), ("I32",))
    else:
        found = context.headers.get(f"{base}.weight")
        rows, cols = (0, 0) if found is None or len(found.shape) != 2 else found.shape
        parts["codes"] = context.part(f"{base}.weight", (rows, cols), ("I8",))
    group = cols if scheme.group is None else scheme.group
    count = groups(cols, group)
    name = f"{base}.weight_scale"
    expected: tuple[int, ...] = (rows, count)
    if scheme.strategy == "tensor":
        expected = () if context.headers.get(name) == Header((), context.headers[name].dtype) else (1,)
    parts["scales"] = context.part(name, expected, _FLOATS)
    plain = scheme.symmetric and context.headers[name].dtype == "F16"
    if not scheme.symmetric:
        zero = f"{base}.weight_zero_point"
        narrow = packed and context.headers.get(zero, Header((), "I32")).dtype == "I32"
        across: tuple[int, ...] = (groups(rows, per_word), count) if narrow else (rows, count)
        if scheme.strategy == "tensor":
            narrow, across = False, expected
        parts["zeros"] = context.part(zero, across, ("I32",) if narrow else ("I8",))
    order = None
    if f"{base}.weight_g_idx" in context.headers:
        order = parts["order"] = context.part(f"{base}.weight_g_idx", (cols,), ("I32", "I64"))
    return QuantisedMatrix((rows, cols), Form(scheme.bits, group, plain, order), parts,
                           _decoder(context, parts, scheme, (rows, cols), group, packed))


def _decoder(context: Context, parts: dict[str, str], scheme: _Scheme, shape: tuple[int, int], group: int,
             packed: bool) -> Decode:
    bits, middle, cols = scheme.bits, 1 << scheme.bits - 1, shape[1]
    per_word, count = 32 // bits, groups(cols, group)

    def spread(values: Tensor, low: int, high: int) -> Tensor:
        """Of rows low to high: (rows, groups)."""
        return values.reshape(1, 1).expand(high - low, count) if values.numel() == 1 else values[low:high]

    def decode(read: Read, low: int, high: int) -> Codes:
        if packed:
            codes = unpack(read(parts["codes"])[low:high], bits).flatten(1)[:, :cols].contiguous()     # (rows, cols)
        else:
            codes = (read(parts["codes"])[low:high].short() + middle).to(torch.uint8)                  # (rows, cols)
            if bits == 4 and int(codes.max()) > 15:
                raise CorruptFile(f"{context.source}: tensor {parts['codes']!r} holds values that are no {bits}-bit integers")
        scales = spread(read(parts["scales"]).float(), low, high).contiguous()                         # (rows, groups)
        zeros = torch.full(scales.shape, middle, dtype=torch.int16)
        if "zeros" in parts:
            stored = read(parts["zeros"])
            if stored.dtype == torch.int32:
                words = stored[low // per_word : -(-high // per_word)]                                 # (words, groups)
                zeros = unpack(words.T, bits).flatten(1).T[: high - low].short().contiguous()          # (rows, groups)
            else:
                zeros = (spread(stored, low, high).short() + middle).contiguous()
        order = None
        if "order" in parts:
            order = context.order(parts["order"], count, group)
        return Codes(bits, group, codes, scales, zeros, order)

    return decode
