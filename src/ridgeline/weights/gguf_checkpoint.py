"""A GGUF file (or the parts of a split one) as a Checkpoint: converted back to Hugging Face names and values."""
from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ridgeline.errors import CorruptFile, ModelNotFound, UnsupportedModel
from ridgeline.weights.checkpoint import Checkpoint, Packed
from ridgeline.weights.gguf_config import generation_config, hugging_face_config
from ridgeline.weights.gguf_file import GGUFFile, GGUFTensor
from ridgeline.weights.gguf_names import Layout, layouts

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Blocks are dequantised some rows at a time: 256 Ki values are 1 MiB of fp32, which an L2 holds; measured at twice
# the speed of 1 Mi values.
_CHUNK = 1 << 18
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = _one_file(path)
        self.format = "gguf"
        self._file_of: dict[str, GGUFFile] = {}  # stored name -> the part that holds it
        first = GGUFFile(self.path)
        for part in [first, *_other_parts(first)]:
            self._file_of.update(dict.fromkeys(part.tensors, part))
        self.metadata = first.metadata
        shapes = {name: part.tensors[name].shape for name, part in self._file_of.items()}
        self.config = hugging_face_config(first, shapes)
        self.generation_config = generation_config(first)
        self._layouts = layouts(self.path, self.metadata["general.architecture"], shapes, self.config)

    def names(self) -> list[str]:
        return list(self._layouts)

    def shape(self, name: str) -> tuple[int, ...]:
        layout = self._layouts[name]
        shape = self._stored(layout).shape
        if layout.transpose:
            return shape[::-1]
        return (shape[0], 1, shape[1]) if layout.middle_axis else shape

    def kind(self, name: str) -> str:
        return self._stored(self._layouts[name]).type.name

    def nbytes(self, name: str) -> int:
        return self._stored(self._layouts[name]).nbytes

    def read(
        self,
        name: str,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        *,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        layout = self._layouts[name]
        stored = self._stored(layout)
        raw = self._file_of[layout.stored].raw(layout.stored)  # (rows, row_bytes)
        row_wise = len(stored.shape) == 2 and not layout.transpose
        if row_wise:
            raw = _take(raw, layout.rows, rows)
        exact = layout.subtract_one or layout.log_of_negative  # arithmetic to undo, best done before rounding
        values = self._values(name, stored, raw, torch.float32 if exact else dtype)
        values = values.reshape(-1, *stored.shape[1:])  # (rows, ...)
        if not row_wise and layout.rows is not None:
            values = values[torch.from_numpy(layout.rows)]
        if layout.columns is not None:
            values = values[:, torch.from_numpy(layout.columns)]
        if layout.transpose:
            values = values.T.contiguous()  # (columns, rows)
        if layout.subtract_one:
            values = values - 1
        if layout.log_of_negative:
            values = torch.log(-values)
        if layout.middle_axis:
            values = values.unsqueeze(1)  # (channels, 1, kernel)
        if rows is not None and not row_wise:
            values = values[rows[0] : rows[1]]
        return values.to(device=device, dtype=dtype)

    def release(self, name: str) -> None:
        stored = self._layouts[name].stored
        self._file_of[stored].release(stored)

    def packed(self, name: str, *, transpose: bool = False) -> Packed | None:
        layout = self._layouts[name]
        stored = self._stored(layout)
        changed = layout.subtract_one or layout.log_of_negative or layout.middle_axis
        if len(stored.shape) != 2 or changed or layout.transpose != transpose:
            return None
        raw = _take(self._file_of[layout.stored].raw(layout.stored), layout.rows, None)
        if layout.columns is not None:
            block, size = GGML_QUANT_SIZES[stored.type]
            columns = layout.columns.reshape(-1, block) if len(layout.columns) % block == 0 else None
            if columns is None or (columns != columns[:, :1] + np.arange(block)).any() or (columns[:, 0] % block).any():
                return None  # a block would be torn apart
            raw = raw.reshape(len(raw), -1, size)[:, columns[:, 0] // block].reshape(raw.shape)
        return Packed(stored.type, stored.shape, raw)

    def _values(self, name: str, stored: GGUFTensor, raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise rows of blocks, (rows, row_bytes) -> (rows, columns), and give the read pages back."""
        file = self._file_of[stored.name]
        if (plain := _PLAIN.get(stored.type)) is not None:
            values = torch.from_numpy(raw).view(plain)  # (rows, columns)
            converted = values.to(dtype)
            if converted is not values:
                file.release(stored.name)
            return converted
        columns = stored.shape[-1]
        out = torch.empty(len(raw), columns, dtype=dtype)
        step = max(1, _CHUNK // columns)
        for start in range(0, len(raw), step):
            block = raw[start : start + step]
            try:
                # Blocks are independent: as one long row the package handles them in one call, not 16 rows a call.
                values = torch.from_numpy(dequantize(block.reshape(1, -1), stored.type))
            except NotImplementedError:
                raise UnsupportedModel(
                    f"{file.path}: tensor {stored.name!r} ({name}) has type {stored.type.name}, which cannot be "
                    "dequantised"
                ) from None
            out[start : start + step] = values.reshape(len(block), columns)
        file.release(stored.name)
        return out

    def _stored(self, layout: Layout) -> GGUFTensor:
        return self._file_of[layout.stored].tensors[layout.stored]


def _take(raw: np.ndarray, order: np.ndarray | None, rows: tuple[int, int] | None) -> np.ndarray:
    """Stored rows -> rows of the tensor: a view where nothing is reordered."""
    low, high = rows or (0, len(raw))
    taken: np.ndarray = raw[low:high] if order is None else raw[order[low:high]]
    return taken


def _one_file(path: Path) -> Path:
    if path.is_file():
        match = _PART.fullmatch(path.name)  # any part of a split model opens the whole
        return path if match is None else path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
    files = sorted(path.glob("*.gguf"))
    first_parts = [f for f in files if (m := _PART.fullmatch(f.name)) is None or int(m[2]) == 1]
    if len(first_parts) == 1:
        return first_parts[0]
    if not first_parts:
        raise ModelNotFound(f"{path}: no *.gguf in this folder")
    raise ModelNotFound(f"{path}: holds {len(first_parts)} GGUF models; name one: "
                        f"{', '.join(f.name for f in first_parts)}")


def _other_parts(first: GGUFFile) -> list[GGUFFile]:
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return []
    match = _PART.fullmatch(first.path.name)
    if match is None or int(match[3]) != count:
        raise CorruptFile(f"{first.path}: is one of {count} parts but not named NAME-00001-of-{count:05d}.gguf")
    paths = [first.path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    for path in paths:
        if not path.is_file():
            raise CorruptFile(f"{first.path}: is one of {count} parts, of which {path.name} is missing")
    return [GGUFFile(path) for path in paths]
