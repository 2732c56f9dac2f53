"""Routes: a table of paths, request models and handlers, and the few that only tell how the server is."""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from ridgeline import __version__
from ridgeline.errors import RidgelineError
from ridgeline.server import chat, completions, embeddings, messages, responses, tokens
from ridgeline.server.edge import AccessLog, Edge
from ridgeline.server.errors import ApiError, api_error, http_error, validation_error
from ridgeline.server.metrics import CONTENT_TYPE
from ridgeline.server.reply import Json, Reply, respond
from ridgeline.server.schemas import openai
from ridgeline.server.schemas.messages import CountRequest, MessagesRequest
from ridgeline.server.schemas.responses import ResponsesRequest
from ridgeline.server.service import Context, Service

Handler = Callable[[Service, Any, Context], Awaitable[Reply]]

# Also what `ridgeline run-batch` answers, without HTTP.
ENDPOINTS: dict[str, tuple[type[Any], Handler]] = {
    "/v1/completions": (openai.CompletionRequest, completions.create),
    "/v1/chat/completions": (openai.ChatRequest, chat.create),
    "/v1/responses": (ResponsesRequest, responses.create),
    "/v1/messages": (MessagesRequest, messages.create),
    "/v1/messages/count_tokens": (CountRequest, messages.count_tokens),
    "/v1/embeddings": (openai.EmbeddingRequest, embeddings.create),
    "/tokenize": (openai.TokenizeRequest, tokens.tokenize),
    "/detokenize": (openai.DetokenizeRequest, tokens.detokenize),
}


def create_app(service: Service, access_log: AccessLog) -> FastAPI:
    """The application of one service. Its caller starts and ends the engine."""
    app = FastAPI(title="ridgeline", version=__version__, docs_url=None, redoc_url=None)
    config = service.config
    for path, (schema, handler) in ENDPOINTS.items():
        app.post(path, name=path)(_endpoint(service, schema, handler))
    _add_state_routes(app, service)
    for kind in (ApiError, RidgelineError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(config.allowed_origins),
                           allow_methods=list(config.allowed_methods), allow_headers=list(config.allowed_headers),
                           allow_credentials=config.allow_credentials, expose_headers=["X-Request-Id"])
    app.add_middleware(Edge, keys=config.api_key, max_bytes=config.max_request_bytes, access_log=access_log,
                       metrics=service.metrics)
    return app


def _endpoint(service: Service, schema: type[Any], handler: Handler) -> Callable[..., Awaitable[Response]]:
    async def call(body: Any, request: Request) -> Response:
        context: Context = request.state.context
        context.log["model"] = service.config.names[0]
        return await respond(request, handler(service, body, context))

    call.__annotations__ = {"body": schema, "request": Request, "return": Any}
    call.__doc__ = handler.__doc__
    return call


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        found = validation_error(error.errors())
    elif isinstance(error, HTTPException):
        found = http_error(error.status_code, error.detail)
    else:
        found = api_error(error)
    request.state.context.log["error"] = found.message
    return Json(found.body(request.url.path), status_code=found.status, headers=found.headers)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    config = service.config
    page = files("ridgeline.server").joinpath("static", "index.html").read_text("utf-8")

    @app.get("/health")
    async def health() -> Response:
        """Whether the engine is alive."""
        if service.llm.ended is not None:
            raise ApiError(503, str(service.llm.ended), code="engine_ended")
        return Json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether new work should be sent here: after the warm-up, and until the server is told to end."""
        if service.llm.ended is not None or service.draining or not service.ready:
            why = "shutting down" if service.draining else "warming up" if service.llm.ended is None else "engine ended"
            raise ApiError(503, f"not ready: {why}", code="not_ready")
        return Json({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template."""
        return Json(tokens.info(service))

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [_model(service, name) for name in config.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return Json(_model(service, service.check_model(name)))

    @app.get("/v1/responses/{name}")
    async def response(name: str) -> Response:
        return Json(service.responses.get(name)[0])

    @app.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> Response:
        service.responses.drop(name)
        return Json({"id": name, "object": "response", "deleted": True})

    @app.get("/stats")
    async def stats() -> Response:
        """What the page shows beside its own measurements."""
        s = service.llm.llm.engine.stats
        return Json({"model": config.names[0], "chat": service.has_chat, "max_model_len": service.max_model_len,
                     "running": s.running, "waiting": s.waiting, "kv_cache_usage": s.kv_usage,
                     "generation_tokens": s.generation_tokens, "prompt_tokens": s.prompt_tokens,
                     "bottleneck": service.meter.shares() if service.meter is not None else {}})

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'self'; style-src 'unsafe-inline'; "
                                           "script-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"})


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "ridgeline", "root": service.config.model,
            "parent": None, "max_model_len": service.max_model_len}
