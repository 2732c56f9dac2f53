"""/v1/embeddings: pooled final hidden states of the model, of length 1."""
from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Sequence
from typing import Any

from ridgeline.sampling_params import SamplingParams
from ridgeline.server.completions import prompts_of
from ridgeline.server.errors import ApiError
from ridgeline.server.schemas.openai import EmbeddingRequest
from ridgeline.server.service import Context, Service
from ridgeline.server.usage import Usage

# Nothing is generated and no text is wanted back.
_PARAMS = SamplingParams(max_tokens=0, echo=True, detokenize=False)


async def create(service: Service, request: EmbeddingRequest, context: Context) -> dict[str, Any]:
    model = service.check_model(request.model)
    if request.dimensions is not None:
        raise ApiError(400, "dimensions is not supported: the hidden states of this model cannot be shortened",
                       param="dimensions", code="unsupported_parameter")
    prompts = prompts_of(service, request.input, "input", request.add_special_tokens)
    answers = await service.start(prompts, _PARAMS, context, strategy=f"embed_{service.config.pooling_type}")
    outputs = await answers.results()
    data = []
    for index, output in enumerate(outputs):
        assert output.embedding is not None, "the strategy commits an embedding"
        vector = normalised(output.embedding)
        data.append({"object": "embedding", "index": index,
                     "embedding": packed(vector) if request.encoding_format == "base64" else vector})
    usage = Usage.of(outputs)
    return {"object": "list", "data": data, "model": model,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}}


def normalised(vector: Sequence[float]) -> list[float]:
    """Of Euclidean length 1."""
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)


def packed(vector: Sequence[float]) -> str:
    """Base64 of little-endian 32-bit floats."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
