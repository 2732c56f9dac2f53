"""Mistral: Llama with a sliding window on every layer, or on those that layer_types names. arXiv 2310.06825."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ridgeline.models.base import FULL, SLIDING
from ridgeline.models.llama import Llama


class Mistral(Llama):
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        kind = SLIDING if "sliding_window" in values else FULL
        values.setdefault("layer_types", [kind] * values.get("num_hidden_layers", 0))
