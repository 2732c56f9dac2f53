"""One interface to every kind of checkpoint: Hugging Face names, Hugging Face values, whatever the file holds."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ridgeline.errors import ConfigError, ModelError, ModelNotFound

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    from ridgeline.weights.quantised import Codes, Form

Format = Literal["safetensors", "gguf", "dummy"]


@dataclass(frozen=True)
class Packed:
    """A matrix still in the blocks of its file: `raw` is (rows, row_bytes) uint8, `shape` is (rows, columns)."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: np.ndarray


class Checkpoint(ABC):
    """Named tensors and the configuration they belong to.

    path               the folder or file it was opened from
    format             "safetensors", "gguf" or "dummy"
    config             as in config.json, with `model_type`; of a multimodal model, its text part
    generation_config  as in generation_config.json, {} if there is none
    metadata           the GGUF metadata, {} for other formats
    notes              what a user should know of how the tensors are read

    Names are those of the `...ForCausalLM` class in transformers: `model.layers.0.self_attn.q_proj.weight`,
    `lm_head.weight`, `transformer.h.0.attn.c_attn.weight`. Asking for a name that is not in names() is a KeyError.
    """

    path: Path
    format: Format
    config: dict[str, Any]
    generation_config: dict[str, Any]
    metadata: dict[str, Any]
    notes: Sequence[str] = ()

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, in file order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def kind(self, name: str) -> str:
        """How the file stores it: "F32", "F16", "BF16", "Q4_K", ..., "INT4" and "INT8" for codes with scales and zeros."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Bytes in the file."""

    @abstractmethod
    def read(
        self,
        name: str,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        *,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The values of a tensor (or of a half-open range of its rows), dequantised.

        On the CPU the result may alias the mapped file when nothing had to be converted. The mapping is private:
        writing to it copies the page and leaves the file alone.
        """

    @abstractmethod
    def packed(self, name: str, *, transpose: bool = False) -> Packed | None:
        """The stored blocks of a matrix, or of its transpose; None where the file has no such row-wise form."""

    def form(self, name: str) -> Form | None:
        """What the headers tell of a matrix kept as codes with scales and zeros; None of other tensors."""
        return None

    def codes(self, name: str, *, rows: tuple[int, int] | None = None) -> Codes | None:
        """The codes of such a matrix, or of some of its rows. raises CorruptFile for what the headers do not show."""
        return None

    def release(self, name: str) -> None:
        """Give the memory behind a tensor that has been read back to the system, where it is a mapped file's."""
        return None

    def bytes_by_kind(self) -> dict[str, tuple[int, int]]:
        """{kind: (number of tensors, bytes in the file)}, most bytes first."""
        totals: dict[str, tuple[int, int]] = {}
        for name in self.names():
            count, size = totals.get(self.kind(name), (0, 0))
            totals[self.kind(name)] = (count + 1, size + self.nbytes(name))
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def open_checkpoint(path: Path, *, load_format: str = "auto") -> Checkpoint:
    """Open a model folder or a GGUF file; headers are read and checked, tensor data is only mapped.

    load_format: "auto" takes safetensors if the folder has them, then GGUF; "dummy" needs only config.json.
    Raises ConfigError (unknown load_format), ModelNotFound, CorruptFile, UnsupportedModel.
    """
    opener = _OPENERS.get(load_format)
    if opener is None:
        raise ConfigError(f"load_format is {load_format!r}; valid: {', '.join(_OPENERS)}")
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or folder")
    return opener(path)


def _open_auto(path: Path) -> Checkpoint:
    if path.is_file():
        return _open_safetensors(path) if path.suffix in (".safetensors", ".json") else _open_gguf(path)
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return _open_safetensors(path)
    if any(path.glob("*.gguf")):
        return _open_gguf(path)
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ModelError(f"{path}: holds only pickled weights; save the model as safetensors or convert it to GGUF")
    raise ModelNotFound(
        f"{path}: no *.safetensors and no *.gguf in this folder (load_format dummy needs only config.json)"
    )


def _open_safetensors(path: Path) -> Checkpoint:
    from ridgeline.weights.safetensors_file import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def _open_gguf(path: Path) -> Checkpoint:
    from ridgeline.weights.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _open_dummy(path: Path) -> Checkpoint:
    from ridgeline.weights.dummy import DummyCheckpoint

    return DummyCheckpoint(path)


_OPENERS: dict[str, Callable[[Path], Checkpoint]] = {
    "auto": _open_auto,
    "safetensors": _open_safetensors,
    "gguf": _open_gguf,
    "dummy": _open_dummy,
}
