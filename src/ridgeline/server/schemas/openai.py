"""Requests of /v1/completions, /v1/chat/completions, /v1/embeddings, /tokenize and /detokenize."""
from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ridgeline.server.schemas.sampling import Request, SamplingFields

Prompts = str | list[int] | list[str] | list[list[int]]


class CompletionRequest(SamplingFields):
    prompt: Prompts
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatFields(Request):
    """A conversation and how it becomes a prompt."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None


class ChatRequest(ChatFields, SamplingFields):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0)
    # Read by `features`.
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None
    include_reasoning: bool | None = None


class EmbeddingRequest(Request):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool = True


class TokenizeRequest(Request):
    """A prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None


class DetokenizeRequest(Request):
    tokens: list[int]
