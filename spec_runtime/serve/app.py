"""Makes the app: its addresses, and the guards in front of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from spec_runtime.serve import tokens
from spec_runtime.serve.anthropic.requests import CountRequest, MessagesRequest
from spec_runtime.serve.errors import (
    INPUT_TOKENS,
    MESSAGES,
    RESPONSES,
    ApiError,
    Json,
    add_handlers,
    parsed,
)
from spec_runtime.serve.guards import guarded
from spec_runtime.serve.ignored import noted
from spec_runtime.serve.models import LendingApp, Models
from spec_runtime.serve.openai.schemas import ChatRequest, CompletionRequest
from spec_runtime.serve.page import PAGE_HEADERS, PageRequest, answer, page_html
from spec_runtime.serve.responses.requests import ResponsesRequest
from spec_runtime.serve.service import Service
from spec_runtime.serve.settings import Settings
from spec_runtime.serve.streams import unless_gone
from spec_runtime.serve.threads import SMALL
from spec_runtime.serve.tokens import DetokenizeRequest, TokenizeRequest


class BodyRequest(Request):
    """A request whose body becomes an object of `kind`, in a thread if it is long."""

    def __init__(self, kind: type[BaseModel], request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def json(self) -> BaseModel:
        body = await self.body()
        if len(body) <= SMALL:
            return parsed(self._kind, body)
        work = partial(parsed, self._kind, body)
        return await unless_gone(self.receive, _models(self).reading.run(work))


class BodyRoute(APIRoute):
    """Gives FastAPI bodies that are read already, for it would read them in the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle
        kind = cast(type[BaseModel], field.field_info.annotation)

        async def read(request: Request) -> Response:
            return await handle(BodyRequest(kind, request))

        return read


router = APIRouter(route_class=BodyRoute)


def make_app(models: Models, settings: Settings) -> ASGIApp:
    """Returns the ASGI app that serves these models."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with suppress(asyncio.CancelledError):  # by a stop that waits for nothing
            yield
        await models.close()

    app = FastAPI(title="specsplit", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.models = models
    app.include_router(router)
    app.add_middleware(LendingApp)
    add_handlers(app)
    return guarded(app, settings, models.metrics)


def _models(request: Request) -> Models:
    return cast(Models, request.app.state.models)


async def _service(request: Request, model: str | None, drafter: str | None = None) -> Service:
    """Returns the service of the model that a request asks for, which has the drafter."""
    return await _models(request).lend(model, request, drafter)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    service = await _service(request, body.model, body.drafter)
    return noted(await service.chat(body, request), body)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    service = await _service(request, body.model, body.drafter)
    return noted(await service.completion(body, request), body)


@router.post(RESPONSES)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    service = await _service(request, body.model, body.drafter)
    return noted(await service.responses(body, request), body)


@router.post(INPUT_TOKENS)
async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
    service = await _service(request, body.model)
    return noted(await service.input_tokens(body, request), body)


@router.get(f"{RESPONSES}/{{name}}")
async def response(name: str, request: Request, stream: bool = False) -> Response:
    """Returns a response that is kept."""
    if stream:
        message = "got stream true, expected false: responses are kept whole; read it without"
        raise ApiError(400, message, param="stream", code="invalid_value")
    kept = _models(request).kept.response(name, "response_id")
    return Response(kept, media_type=Json.media_type)


@router.delete(f"{RESPONSES}/{{name}}")
async def delete_response(name: str, request: Request) -> Response:
    _models(request).kept.remove(name, "response_id")
    return Json({"id": name, "object": "response", "deleted": True})


@router.post(MESSAGES)
async def messages(body: MessagesRequest, request: Request) -> Response:
    service = await _service(request, body.model, body.drafter)
    return noted(await service.messages(body, request), body)


@router.post(f"{MESSAGES}/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    service = await _service(request, body.model)
    return noted(await service.count_tokens(body, request), body)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    return await tokens.tokenize(await _service(request, body.model), body, request)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    return await tokens.detokenize(await _service(request, body.model), body, request)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    return tokens.tokenizer_info(await _service(request, model))


@router.get("/v1/models")
async def models(request: Request) -> Response:
    found = _models(request).described()
    if not _is_anthropics(request):
        return Json({"object": "list", "data": found})
    listed = [_in_anthropics_form(each) for each in found]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
    return Json({"data": listed, "has_more": False, **ends})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    found = _models(request).description(name)
    return Json(_in_anthropics_form(found) if _is_anthropics(request) else found)


def _is_anthropics(request: Request) -> bool:
    """Says whether a client of Anthropic's asks, which names the version of its API."""
    return "anthropic-version" in request.headers


def _in_anthropics_form(model: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    told = {"type": "model", "id": model["id"], "display_name": model["id"]}
    return {**told, "created_at": created}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Response:
    """Says that the process answers."""
    return Json({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Says that a request would be taken now: 503 where all places are taken, or the engine is
    stuck."""
    if not _models(request).is_ready:
        return Json({"status": "busy"}, 503, {"Retry-After": "1"})
    return Json({"status": "ready"})


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_models(request).metrics.scrape(), media_type=CONTENT_TYPE_LATEST)


@router.head("/", include_in_schema=False)
@router.get("/")
async def page() -> Response:
    return HTMLResponse(page_html(), headers=PAGE_HEADERS)


@router.post("/page/answer")
async def page_answer(body: PageRequest, request: Request) -> Response:
    return await answer(await _service(request, body.model), body, request)
