"""A folder with config.json and one or more safetensors files.

Tensors alias the mapped files where the data type already fits. Matrices that a `quantization_config` says are kept as codes,
scales and zeros appear under the name of their weight. With `model.safetensors.index.json` the shards are
those that its `weight_map` names; without it every *.safetensors file of the folder is read.
"""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ridgeline.errors import CorruptFile, ModelNotFound, UnsupportedModel
from ridgeline.weights.checkpoint import Checkpoint, Packed
from ridgeline.weights.hf_config import read_config, read_generation_config, read_json
from ridgeline.weights.quantised import Codes, Form, Found, Header, find_quantised

_INDEX = "model.safetensors.index.json"
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I64": 64, "I32": 32, "I16": 16,
    "I8": 8, "U8": 8, "U16": 16, "U32": 32, "U64": 64, "BOOL": 8,
}
# Where multimodal wrappers of different ages keep the language model.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_BARE = {"embed_tokens", "layers", "norm"}  # first components of a model saved without its head
_BARE_GPT2 = {"wte", "wpe", "h", "ln_f"}


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, folder: Path) -> None:
        folder = folder.parent if folder.is_file() else folder
        self.path = folder
        self.format = "safetensors"
        self.config = read_config(folder)
        self.generation_config = read_generation_config(folder)
        self.metadata = {}
        self._where: dict[str, tuple[Any, str, Path]] = {}  # our name -> open shard, name in it, its path
        for path, wanted in _shards(folder).items():
            shard = _open_shard(path)
            present = list(shard.keys())
            for missing in sorted(wanted - set(present))[:1]:
                raise CorruptFile(f"{path}: tensor {missing!r} is missing, though {_INDEX} says it is here")
            for name in present:
                self._where[normalised_name(name, self.config["model_type"])] = (shard, name, path)
        self._quantised = Found()
        if config := self.config.get("quantization_config"):
            headers = {name: Header(self.shape(name), self.kind(name)) for name in self._where}
            self._quantised = find_quantised(str(folder), headers, config, self._stored)
            if self._quantised.matrices and self.config["model_type"] == "gpt2":
                raise UnsupportedModel(f"{folder}: quantised gpt2 is not supported; its matrices are stored transposed")
        self.notes = self._quantised.notes

    def names(self) -> list[str]:
        hidden = self._quantised.hidden
        return [*(name for name in self._where if name not in hidden), *self._quantised.matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        if (matrix := self._quantised.matrices.get(name)) is not None:
            return matrix.shape
        shard, stored, _ = self._where[name]
        return tuple(shard.get_slice(stored).get_shape())

    def kind(self, name: str) -> str:
        if (matrix := self._quantised.matrices.get(name)) is not None:
            return f"INT{matrix.form.bits}"
        shard, stored, _ = self._where[name]
        return str(shard.get_slice(stored).get_dtype())

    def nbytes(self, name: str) -> int:
        if (matrix := self._quantised.matrices.get(name)) is not None:
            return sum(self._stored_bytes(part) for part in matrix.parts.values())
        return self._stored_bytes(name)

    def _stored_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * _BITS.get(self.kind(name), 8) // 8

    def read(
        self,
        name: str,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        *,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        if (codes := self.codes(name, rows=rows)) is not None:
            tensor = codes.values()
        else:
            tensor = self._stored(name)
            if rows is not None:
                tensor = tensor[rows[0] : rows[1]]  # (rows, ...)
        return tensor.to(device=device, dtype=dtype)

    def _stored(self, name: str) -> torch.Tensor:
        shard, stored, path = self._where[name]
        try:
            tensor: torch.Tensor = shard.get_tensor(stored)
        except SafetensorError as error:
            raise CorruptFile(f"{path}: tensor {stored!r} cannot be read: {error}") from error
        return tensor

    def form(self, name: str) -> Form | None:
        matrix = self._quantised.matrices.get(name)
        return None if matrix is None else matrix.resolved(self._stored)

    def codes(self, name: str, *, rows: tuple[int, int] | None = None) -> Codes | None:
        matrix = self._quantised.matrices.get(name)
        if matrix is None:
            return None
        low, high = rows or (0, matrix.shape[0])
        start = low // 8 * 8                           # words hold up to 8 rows
        codes = matrix.decode(self._stored, start, high)
        return codes if start == low else codes.rows(low - start)

    def packed(self, name: str, *, transpose: bool = False) -> Packed | None:
        return None


def normalised_name(name: str, model_type: str) -> str:
    """The name as `...ForCausalLM` would save it, from checkpoints of a bare model or a multimodal wrapper."""
    for prefix, replacement in _PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    first = name.partition(".")[0]
    if model_type == "gpt2":
        return f"transformer.{name}" if first in _BARE_GPT2 else name
    return f"model.{name}" if first in _BARE else name


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The files to open, each with the names that must be in it."""
    index = folder / _INDEX
    if not index.is_file():
        files = {path: set[str]() for path in sorted(folder.glob("*.safetensors"))}
        if not files:
            raise ModelNotFound(f"{folder}: no *.safetensors in this folder")
        single = folder / "model.safetensors"
        return {single: set()} if single in files else files  # others may be adapters or copies in other formats
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(f"{index}: weight_map is {type(weight_map).__name__}; expected tensor names -> files")
    wanted: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptFile(f"{index}: tensor {name!r} is in {file!r}; expected the name of a file in the folder")
        wanted.setdefault(folder / file, set()).add(name)
    for path, tensors in wanted.items():
        if not path.is_file():
            raise CorruptFile(f"{index}: names the shard {path.name} ({len(tensors)} tensors), which is missing")
    return wanted


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"{path}: not a whole safetensors file ({path.stat().st_size} bytes): {error}") from error
