from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_families as mf
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """family name -> (transformers model, folder of its checkpoint), each made once a session."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(name: str) -> tuple[Any, Path]:
        if name not in made:
            family, folder = mf.FAMILIES[name], tmp_path_factory.mktemp(name)
            model = mf.reference(family)
            mf.save(model, folder, family.model_type)
            made[name] = model, folder
        return made[name]

    return make
