"""The GGUF container (versions 2 and 3, little endian), memory-mapped.

    magic "GGUF" | u32 version | u64 tensor count | u64 metadata count
    metadata:  string key | u32 value type | value                            (count times)
    tensors:   string name | u32 dims | u64 dim[dims] | u32 type | u64 offset (count times)
    padding to `general.alignment` (32 unless the metadata says otherwise), then the tensor data

A string is a u64 length and that many bytes of UTF-8. Dimensions are stored fastest first; `GGUFTensor.shape`
has them in row-major (torch) order. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The file may come from anywhere: every count, length and offset is checked against the file before it is used.
"""
from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ridgeline.errors import CorruptFile, ModelNotFound

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NESTING = 4
_DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), _BOOL: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous, and quantised in blocks
    type: GGMLQuantizationType
    offset: int             # bytes from the start of the file
    nbytes: int

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size


class GGUFFile:
    """A parsed and mapped GGUF file.

    `metadata` maps keys to values: numbers, bools, strings as Python objects, arrays of strings as lists of
    str, arrays of numbers as numpy arrays. Bytes that are not UTF-8 (token pieces may hold any) decode with
    `surrogateescape`, so that `s.encode("utf-8", "surrogateescape")` gives the exact bytes back.
    `tensors` maps names to GGUFTensor, in file order.

    Raises ModelNotFound if there is no such file and CorruptFile, naming the file and the field or tensor,
    for everything that does not follow the format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:  # mmap's word for a file of length zero
            raise CorruptFile(f"{self.path}: the file is empty; expected a GGUF file") from None
        except OSError as error:
            raise ModelNotFound(f"{self.path}: cannot open the GGUF file: {error.strerror}") from error
        self.size = len(self._map)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        reader = _Reader(self.path, self._map)
        self.version, tensor_count, metadata_count = _read_header(reader)
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = reader.string("a metadata key")
            if key in self.metadata:
                reader.fail(f"metadata key {key!r} appears twice")
            self.metadata[key] = reader.value(reader.u32(f"the type of {key!r}"), key)
        table = [_read_tensor_info(reader) for _ in range(tensor_count)]
        alignment = self._alignment()
        self.data_offset = -(-reader.position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, relative in table:
            if name in self.tensors:
                reader.fail(f"tensor {name!r} appears twice")
            self.tensors[name] = self._place(name, shape, kind, relative, alignment)
        self._check_overlap()

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor: a uint8 view of the mapped file, (rows, row_bytes).

        The mapping is private: writing to the view copies the page and leaves the file alone.
        """
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.nbytes]
        return data.reshape(-1, tensor.row_bytes)  # (rows, row_bytes)

    def release(self, name: str) -> None:
        """Give the memory behind a tensor back to the system; reading it again reads the file again."""
        tensor = self.tensors[name]
        page = mmap.PAGESIZE
        start = -(-tensor.offset // page) * page  # only pages that hold nothing of a neighbour
        end = (tensor.offset + tensor.nbytes) // page * page
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CorruptFile(f"{self.path}: general.alignment is {alignment!r}; expected a power of two")
        return alignment

    def _place(
        self, name: str, shape: tuple[int, ...], kind: int, relative: int, alignment: int
    ) -> GGUFTensor:
        where = f"{self.path}: tensor {name!r}"
        try:
            quant = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[quant]
        except (ValueError, KeyError):
            known = ", ".join(f"{t.value}={t.name}" for t in GGML_QUANT_SIZES)
            raise CorruptFile(f"{where} has unknown type {kind}; known types: {known}") from None
        if shape[-1] % block:
            raise CorruptFile(f"{where} has rows of {shape[-1]}; {quant.name} needs a multiple of {block}")
        if relative % alignment:
            raise CorruptFile(f"{where} starts at offset {relative}; expected a multiple of {alignment}")
        nbytes = math.prod(shape) // block * size
        offset = self.data_offset + relative
        if offset + nbytes > self.size:
            raise CorruptFile(
                f"{where} {list(shape)} {quant.name} needs bytes {offset} to {offset + nbytes}, but the file "
                f"ends at {self.size}: truncated download?"
            )
        return GGUFTensor(name, shape, quant, offset, nbytes)

    def _check_overlap(self) -> None:
        ordered = sorted(self.tensors.values(), key=lambda t: t.offset)
        for before, after in itertools.pairwise(ordered):
            end = before.offset + before.nbytes
            if end > after.offset:
                raise CorruptFile(
                    f"{self.path}: tensor {before.name!r} ends at byte {end}, inside tensor {after.name!r} "
                    f"which starts at {after.offset}"
                )


class _Reader:
    """A cursor over the mapped file; every read is checked against the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.position = path, data, len(data), 0

    def fail(self, what: str) -> NoReturn:
        raise CorruptFile(f"{self.path}: {what} (near byte {self.position})")

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > self.size:
            self.fail(f"the file ends at byte {self.size} inside {what}, which needs {count} more bytes")
        chunk = self.data[self.position : end]
        self.position = end
        return chunk

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, smallest: int) -> int:
        """A u64 count of items of at least `smallest` bytes; refused when the file cannot hold so many."""
        count = self.u64(what)
        if count * smallest > self.size - self.position:
            self.fail(f"{what} is {count}, more than the rest of the file can hold")
        return count

    def string(self, what: str) -> str:
        return self.take(self.u64(f"the length of {what}"), what).decode("utf-8", "surrogateescape")

    def strings(self, count: int, what: str) -> list[str]:
        # A vocabulary is one such array of 262 thousand strings: 0.1 s with locals, 0.5 s through string().
        data, size, position = self.data, self.size, self.position
        unpack = struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    break
                out.append(data[start:position].decode("utf-8", "surrogateescape"))
        except struct.error:
            pass
        if len(out) != count:
            self.fail(f"the file ends at byte {size} inside string {len(out)} of {count} of {what}")
        self.position = position
        return out

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        what = f"the value of {key!r}"
        if (dtype := _SCALARS.get(kind)) is not None:
            return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            self.fail(f"{what} has unknown type {kind}; known types: 0 to 12")
        if depth >= _MAX_NESTING:
            self.fail(f"{what} nests arrays more than {_MAX_NESTING} deep")
        inner = self.u32(f"the element type of {key!r}")
        if (dtype := _SCALARS.get(inner)) is not None:
            count = self.count(f"the length of {key!r}", dtype.itemsize)
            return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        count = self.count(f"the length of {key!r}", 8)
        if inner == _STRING:
            return self.strings(count, repr(key))
        return [self.value(inner, key, depth + 1) for _ in range(count)]


def _read_header(reader: _Reader) -> tuple[int, int, int]:
    magic = reader.take(4, "the magic number")
    if magic != _MAGIC:
        reader.fail(f"not a GGUF file: it starts with {magic!r}, expected {_MAGIC!r}")
    version = reader.u32("the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = f"{swapped} (big endian)" if swapped in _VERSIONS else str(version)
        reader.fail(f"GGUF version {found} is not supported; supported: 2 and 3, little endian")
    tensors = reader.count("the tensor count", 8 + 4 + 8 + 4 + 8)
    metadata = reader.count("the metadata count", 8 + 4 + 1)
    return version, tensors, metadata


def _read_tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string("a tensor name")
    dims = reader.u32(f"the number of dimensions of {name!r}")
    if not 1 <= dims <= _MAX_DIMS:
        reader.fail(f"tensor {name!r} has {dims} dimensions; expected 1 to {_MAX_DIMS}")
    fastest_first = [reader.u64(f"the dimensions of {name!r}") for _ in range(dims)]
    if min(fastest_first) < 1:
        reader.fail(f"tensor {name!r} has the dimensions {fastest_first[::-1]}; each must be at least 1")
    kind = reader.u32(f"the type of {name!r}")
    return name, tuple(fastest_first[::-1]), kind, reader.u64(f"the offset of {name!r}")
