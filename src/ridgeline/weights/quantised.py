"""Matrices that a safetensors checkpoint holds as integer codes with scales and zeros: what AWQ, GPTQ and compressed-tensors
have in common. Which tensors make up such a matrix is the business of one module a format.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from ridgeline.errors import CorruptFile, UnsupportedModel

Read = Callable[[str], Tensor]           # a stored tensor by its name


@dataclass(frozen=True)
class Header:
    """Of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str                           # as safetensors names it: "F16", "I32", ...


@dataclass(frozen=True)
class Codes:
    """Rows of a matrix: w[r, c] = scales[r, g] * (codes[r, c] - zeros[r, g]) with g = c // group, or g = order[c].

    codes: (rows, cols) uint8, 0 to 2^bits - 1; scales: (rows, groups) fp32; zeros: (rows, groups) int16, on the codes' side.
    """

    bits: int
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None = None          # (cols,) int64

    def rows(self, low: int) -> Codes:
        """From row `low` on."""
        return replace(self, codes=self.codes[low:], scales=self.scales[low:], zeros=self.zeros[low:])

    def values(self) -> Tensor:
        """(rows, cols) fp32: one multiplication by an exact difference."""
        cols = self.codes.shape[1]
        at = torch.arange(cols) // self.group if self.order is None else self.order
        return self.scales[:, at] * (self.codes.to(torch.int16) - self.zeros[:, at]).float()


@dataclass(frozen=True)
class Form:
    """What the headers tell of a matrix of codes. group: columns that share a scale (of a whole row: its length).

    plain: symmetric with fp16 scales, as the blocks of GGUF types are; order: the stored tensor that names the group of each
    column, None where groups are consecutive.
    """

    bits: int
    group: int
    plain: bool = False
    order: str | None = None


class Decode(Protocol):
    def __call__(self, read: Read, low: int, high: int) -> Codes:
        """Rows low to high, a multiple of 8 (or the last row)."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """shape: (out, in); parts: the stored tensors it is made of, {role: name}."""

    shape: tuple[int, int]
    form: Form
    parts: Mapping[str, str]
    decode: Decode

    def resolved(self, read: Read) -> Form:
        """The form, with `order` only where it is more than consecutive groups."""
        if self.form.order is None:
            return self.form
        consecutive = torch.arange(self.shape[1]) // self.form.group
        return replace(self.form, order=None) if torch.equal(read(self.form.order).long(), consecutive) else self.form


@dataclass
class Found:
    """matrices by the name of the weight that they are; hidden: stored tensors that are no weights of their own; notes: what a
    user should know of how the checkpoint is read."""

    matrices: dict[str, QuantisedMatrix] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, matrix: QuantisedMatrix) -> None:
        self.matrices[name] = matrix
        self.hidden |= set(matrix.parts.values())


@dataclass(frozen=True)
class Context:
    """source: the folder, for messages; headers: of all stored tensors; config: the quantization_config; read: for small
    tensors that belong to the headers."""

    source: str
    headers: Mapping[str, Header]
    config: Mapping[str, Any]
    read: Read

    def refuse(self, where: str, value: object, allowed: str) -> NoReturn:
        raise UnsupportedModel(f"{self.source}: quantization_config.{where} is {value!r}; supported: {allowed}")

    def one_of(self, where: str, value: object, allowed: tuple[object, ...]) -> Any:
        if value not in allowed or isinstance(value, bool) != any(isinstance(a, bool) for a in allowed if a == value):
            self.refuse(where, value, " and ".join(repr(a) for a in allowed))
        return value

    def group_size(self, where: str, value: object) -> int:
        """-1 or a positive number."""
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise CorruptFile(f"{self.source}: quantization_config.{where} is {value!r}; it must be a number of columns or -1")
        return value

    def part(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
        """A stored tensor that must be there in this shape and one of these types. raises CorruptFile naming it."""
        found = self.headers.get(name)
        if found is None:
            raise CorruptFile(f"{self.source}: tensor {name!r} is missing; expected {list(shape)} {' or '.join(dtypes)}")
        if found.shape != shape or found.dtype not in dtypes:
            raise CorruptFile(f"{self.source}: tensor {name!r} is {list(found.shape)} {found.dtype}; expected {list(shape)} "
                              f"{' or '.join(dtypes)}")
        return name

    def order(self, name: str, count: int, group: int) -> Tensor | None:
        """The group of each column, (cols,) int64; None where groups are consecutive. raises CorruptFile."""
        order = self.read(name).long()
        low, high = int(order.min()), int(order.max())
        if low < 0 or high >= count:
            raise CorruptFile(f"{self.source}: tensor {name!r} names groups {low} to {high}; there are {count}")
        return None if torch.equal(order, torch.arange(len(order)) // group) else order

    def bases(self, suffix: str) -> list[str]:
        """Names before `suffix`. raises CorruptFile where such a tensor is no matrix, or has a plain weight beside it."""
        bases = [name.removesuffix(suffix) for name in self.headers if name.endswith(suffix)]
        for base in bases:
            if len(shape := self.headers[base + suffix].shape) != 2:
                raise CorruptFile(f"{self.source}: tensor {base + suffix!r} has {len(shape)} dimensions; expected 2")
            if f"{base}.weight" in self.headers:
                raise CorruptFile(f"{self.source}: holds both {base + suffix!r} and {base + '.weight'!r}; expected one of them")
        return bases


def groups(cols: int, group: int) -> int:
    return math.ceil(cols / group)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Fields of int32 words, lowest first: (a, b) -> (a, b, 32 / bits) uint8."""
    # A copy, since torch takes a slice of one column for contiguous, yet not for a view as bytes.
    octets = torch.empty(words.shape, dtype=torch.int32).copy_(words).view(torch.uint8)
    octets = octets.view(*words.shape, 4)                                               # (a, b, 4), little-endian
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)                      # (a, b, 8)


def find_quantised(source: str, headers: Mapping[str, Header], config: object, read: Read) -> Found:
    """The quantised matrices of a checkpoint. raises UnsupportedModel naming the field of quantization_config and its value,
    CorruptFile naming the tensor."""
    from ridgeline.weights.quant_awq import find_awq
    from ridgeline.weights.quant_compressed import find_compressed
    from ridgeline.weights.quant_gptq import find_gptq

    methods = {"awq": find_awq, "gptq": find_gptq, "compressed-tensors": find_compressed}
    if not isinstance(config, Mapping):
        raise CorruptFile(f"{source}: quantization_config is {config!r}; it must be an object")
    method = config.get("quant_method")
    if method not in methods:
        raise UnsupportedModel(f"{source}: quantization_config.quant_method is {method!r}; supported: {', '.join(methods)}, "
                               "and plain safetensors (F32, F16, BF16)")
    return methods[method](Context(source, headers, config, read))
