"""The configuration of the service: typed, frozen, checked once. The engine's own is EngineConfig."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.errors import ConfigError
from ridgeline.server.parsers import check_parsers
from ridgeline.server.tracing import check_endpoint

GENERATION_CONFIGS = ("auto", "none")
POOLING_TYPES = ("last", "mean")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `ridgeline serve` accepts besides the engine's flags. raises ConfigError."""

    model: str
    served_model_name: Sequence[str] = ()    # names that requests may use; the first is shown; none = the model's
    api_key: Sequence[str] = ()              # none = no key is needed
    max_queue: int = 1024                    # samples that may wait for a seat; beyond it requests get 429
    max_request_bytes: int = 32 << 20        # of a body; beyond it 413
    shutdown_timeout: float = 30.0           # seconds that running requests get after SIGTERM or SIGINT
    allowed_origins: Sequence[str] = ()      # CORS; none = no header is sent
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False
    access_log: str | None = "-"             # a file, "-" for standard output, None for none
    generation_config: str = "auto"          # auto: the model's sampling defaults; none: OpenAI's
    pooling_type: str = "last"               # of embeddings: last | mean
    tool_call_parser: str | None = None      # the model's format of tool calls; None = tools are refused, unless forced
    reasoning_parser: str | None = None      # the model's format of reasoning; None = all is content
    response_store_size: int = 1000          # responses kept for previous_response_id
    otlp_traces_endpoint: str | None = None  # where spans of requests are sent; None = nowhere

    def __post_init__(self) -> None:
        for name, least in (("max_queue", 0), ("max_request_bytes", 1), ("response_store_size", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout!r}; it must be a number of seconds, at least 0")
        for name, valid in (("generation_config", GENERATION_CONFIGS), ("pooling_type", POOLING_TYPES)):
            if getattr(self, name) not in valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; valid: {', '.join(valid)}")
        for name in ("served_model_name", "api_key", "allowed_origins", "allowed_methods", "allowed_headers"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
                raise ConfigError(f"{name} is {value!r}; it must be a list of strings that are not empty")
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials goes with origins that are named, not with '*'")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.served_model_name) or (self.model,)
