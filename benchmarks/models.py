"""Models with made-up weights: speed depends on shapes only."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# 15.7 million parameters, 63 MB in fp32: more than the caches hold, so that a step reads its weights from memory as the
# steps of real models do, and small enough for a minute.
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

# One layer of next to nothing: what is left is the engine.
NEGLIGIBLE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write(config: dict[str, Any], folder: Path) -> str:
    """A folder to load with load_format="dummy"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
