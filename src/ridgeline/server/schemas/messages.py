"""Requests of /v1/messages and /v1/messages/count_tokens."""
from __future__ import annotations

from typing import Any

from pydantic import Field

from ridgeline.server.schemas.sampling import Request


class CountRequest(Request):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Read by `features`.
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None
