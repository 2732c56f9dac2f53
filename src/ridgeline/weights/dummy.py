"""Weights that do not exist: only shapes matter, so load_weights makes them up from each parameter's name."""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NoReturn

import torch

from ridgeline.weights.checkpoint import Checkpoint, Packed
from ridgeline.weights.hf_config import read_config, read_generation_config

_STANDARD_DEVIATION = 0.02  # `initializer_range` of nearly every published configuration


class DummyCheckpoint(Checkpoint):
    """A config.json without weights; it holds no tensors, so names() is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path.parent if path.is_file() else path
        self.format = "dummy"
        self.config = read_config(self.path)
        self.generation_config = read_generation_config(self.path)
        self.metadata = {}

    def names(self) -> list[str]:
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        self._refuse(name)

    def kind(self, name: str) -> str:
        self._refuse(name)

    def nbytes(self, name: str) -> int:
        self._refuse(name)

    def read(
        self,
        name: str,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        *,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        self._refuse(name)

    def packed(self, name: str, *, transpose: bool = False) -> Packed | None:
        return None

    def _refuse(self, name: str) -> NoReturn:
        raise KeyError(f"a dummy checkpoint holds no tensors, {name!r} neither")


def dummy_tensor(
    name: str, shape: torch.Size, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Normal(0, 0.02), one for the weight of a norm, zero for integers; the same for a name on every run."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    parts = name.split(".")
    if len(shape) == 1 and parts[-1] == "weight" and len(parts) > 1 and ("norm" in parts[-2] or "ln" in parts[-2]):
        return torch.ones(shape, dtype=dtype, device=device)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
