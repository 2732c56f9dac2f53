"""A real model under many schemas at once."""
from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from ridgeline import LLM, SamplingParams, hub
from ridgeline.errors import ModelNotFound


def schema_of(i: int) -> dict[str, Any]:
    """Bounded, and different in names and in shape."""
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20}, f"age{i % 10}": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 1 + i % 4},
            "born": {"type": "string", "format": "date"}, "kind": {"enum": ["cat", "d\u00f6g", f"bird {i}"]},
        },
        "required": ["name", f"age{i % 10}", "tags", "kind"][:2 + i % 3], "additionalProperties": False,
    }


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [{}, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "ngram"])
def test_a_hundred_schemas_at_once_are_all_obeyed(speculative: dict[str, Any]) -> None:
    try:
        hub.resolve("gemma3-270m")
    except ModelNotFound as missing:
        pytest.skip(f"needs the packaged model: {missing}")
    llm = LLM("gemma3-270m", max_num_seqs=32, max_model_len=512, kv_cache_memory_bytes=1 << 29, progress=False,
              speculative_config=speculative)
    prompts = [f"Person {i} in one line of JSON with name, age and tags:\n" for i in range(100)]
    wanted = [SamplingParams(temperature=(i % 3) * 0.6, seed=i, max_tokens=250, structured_outputs={"json": schema_of(i)})
              for i in range(100)]
    for i, output in enumerate(llm.generate(prompts, wanted)):
        assert output.error is None
        sample = output.outputs[0]
        assert sample.finish_reason == "stop", sample.text
        jsonschema.validate(json.loads(sample.text), schema_of(i))
    llm.engine.store.check_integrity()
