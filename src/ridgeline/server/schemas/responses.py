"""Requests of /v1/responses."""
from __future__ import annotations

from typing import Any

from pydantic import Field

from ridgeline.server.schemas.sampling import SamplingFields


class ResponsesRequest(SamplingFields):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    store: bool | None = True
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    # Read by `features`.
    text: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Any = None
