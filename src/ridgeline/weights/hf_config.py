"""config.json and generation_config.json of a model folder, reduced to the language model's part."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.errors import CorruptFile, ModelNotFound

# A multimodal config keeps the language model in text_config, which in older files lacks its own model_type.
_TEXT_PARTS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}


def read_config(folder: Path) -> dict[str, Any]:
    """The language model's config. Raises ModelNotFound (no config.json) or CorruptFile."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{path}: missing; a model folder needs a config.json")
    config = read_json(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CorruptFile(f"{path}: model_type is {kind!r}; expected a string such as \"llama\"")
    text = config.get("text_config")
    if kind not in _TEXT_PARTS or not isinstance(text, dict):
        return config
    kept = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
    outer = {key: config[key] for key in kept if key in config}
    return {**outer, **text, "model_type": text.get("model_type", _TEXT_PARTS[kind])}


def read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is a CorruptFile naming the file and the place."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path}: not valid JSON: {error}") from error
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value
