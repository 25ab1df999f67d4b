"""Makes the app: its addresses, and the guards in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from spec_runtime import Engine
from spec_runtime.serving import tokens
from spec_runtime.serving.anthropic.requests import CountRequest, MessagesRequest
from spec_runtime.serving.errors import MESSAGES, RESPONSES, Json, add_handlers
from spec_runtime.serving.guards import guarded
from spec_runtime.serving.page import PAGE_HEADERS, PageRequest, answer, page_html
from spec_runtime.serving.responses.requests import ResponsesRequest
from spec_runtime.serving.schemas import ChatRequest, CompletionRequest
from spec_runtime.serving.service import Service
from spec_runtime.serving.settings import Settings
from spec_runtime.serving.tokens import DetokenizeRequest, TokenizeRequest

router = APIRouter()


def make_app(engine: Engine, settings: Settings) -> ASGIApp:
    """Returns the ASGI app that serves `engine`, which other code must not close while it runs."""
    service = Service(engine, settings)
    return guarded(make_unguarded_app(service), settings, service.metrics)


def make_unguarded_app(service: Service) -> FastAPI:
    """Returns the app without what has to stand in front of it, see guards.guarded."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with suppress(asyncio.CancelledError):  # by a stop that waits for nothing
            yield
        await service.close()

    app = FastAPI(title="specsplit", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.include_router(router)
    add_handlers(app)
    return app


def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    return await _service(request).chat(body, request)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    return await _service(request).completion(body, request)


@router.post(RESPONSES)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    return await _service(request).responses(body, request)


@router.get(f"{RESPONSES}/{{name}}")
async def response(name: str, request: Request) -> Response:
    """Returns a response that is kept."""
    return Json(_service(request).kept.get(name, "response_id").response)


@router.delete(f"{RESPONSES}/{{name}}")
async def delete_response(name: str, request: Request) -> Response:
    _service(request).kept.remove(name, "response_id")
    return Json({"id": name, "object": "response", "deleted": True})


@router.post(MESSAGES)
async def messages(body: MessagesRequest, request: Request) -> Response:
    return await _service(request).messages(body, request)


@router.post(f"{MESSAGES}/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    return await _service(request).count_tokens(body, request)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    return await tokens.tokenize(_service(request), body, request)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    return await tokens.detokenize(_service(request), body, request)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    return tokens.tokenizer_info(_service(request))


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return Json({"object": "list", "data": [_model(request)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    _service(request).require_model(name)
    return Json(_model(request))


def _model(request: Request) -> dict[str, Any]:
    service = _service(request)
    return {
        "id": service.settings.name,
        "object": "model",
        "created": service.started,
        "owned_by": "specsplit",
        "max_model_len": service.engine.target.max_length,
    }


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Response:
    """Says that the process answers."""
    return Json({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Says that a request would be taken now: 503 where all places are taken, or the engine is
    stuck."""
    if not _service(request).is_ready:
        return Json({"status": "busy"}, 503, {"Retry-After": "1"})
    return Json({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_service(request).metrics.scrape(), media_type=CONTENT_TYPE_LATEST)


@router.get("/")
async def page() -> Response:
    return HTMLResponse(page_html(), headers=PAGE_HEADERS)


@router.post("/page/answer")
async def page_answer(body: PageRequest, request: Request) -> Response:
    return await answer(_service(request), body, request)
