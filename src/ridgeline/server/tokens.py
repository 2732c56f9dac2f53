"""/tokenize, /detokenize and /tokenizer_info."""
from __future__ import annotations

from functools import partial
from typing import Any

from ridgeline.async_llm import LONG_PROMPT
from ridgeline.server.errors import ApiError
from ridgeline.server.schemas.openai import DetokenizeRequest, TokenizeRequest
from ridgeline.server.service import Context, Service
from ridgeline.text.tokenizer import Tokenizer


async def tokenize(service: Service, request: TokenizeRequest, context: Context) -> dict[str, Any]:
    service.check_model(request.model)
    tokenizer = _tokenizer(service)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt", code="invalid_value")
    if request.prompt is None:
        prompt: Any = await service.conversation(request, {} if request.tools is None else {"tools": request.tools})
        ids = prompt["prompt_token_ids"]
    else:
        encode = partial(tokenizer.encode, request.prompt, add_special_tokens=request.add_special_tokens)
        ids = await service.llm.off_loop(encode, long=len(request.prompt) > LONG_PROMPT)
    strings = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": strings}


async def detokenize(service: Service, request: DetokenizeRequest, context: Context) -> dict[str, Any]:
    service.check_model(request.model)
    size = service.llm.llm.engine.vocab_size
    wrong = next((token for token in request.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise ApiError(400, f"tokens: got the id {wrong}; allowed: 0 to {size - 1}", param="tokens", code="invalid_value")
    decode = partial(_tokenizer(service).decode, request.tokens, skip_special_tokens=False)
    return {"prompt": await service.llm.off_loop(decode, long=len(request.tokens) > LONG_PROMPT)}


def info(service: Service) -> dict[str, Any]:
    """What evaluation harnesses ask before they use /tokenize; names as in a tokenizer_config.json."""
    tokenizer = _tokenizer(service)
    eos = tokenizer.eos_token_ids
    return {"tokenizer_class": type(tokenizer).__name__, "model_max_length": service.max_model_len,
            "bos_token": None if tokenizer.bos_token_id is None else tokenizer.token_text(tokenizer.bos_token_id),
            "eos_token": tokenizer.token_text(eos[0]) if eos else None,
            "chat_template": service.llm.llm.frontend.chat_template or tokenizer.chat_template}


def _tokenizer(service: Service) -> Tokenizer:
    if service.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; prompts are token ids", code="no_tokenizer")
    return service.tokenizer
