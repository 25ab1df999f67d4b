"""Stands in front of the app: who may ask, how much they may send, what they hear when the server
stops, and a line of log for each.

All four are plain ASGI wrappers, so that the app behind them sees a client's disconnect.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_runtime.serving.answering import is_event_stream, last_event
from spec_runtime.serving.errors import GONE, ApiError, ClientGone, response, stopped
from spec_runtime.serving.metrics import Metrics
from spec_runtime.serving.settings import Settings, plain_host

OPEN_PATHS = ("/", "/health", "/ready")  # need no key: the page has no data, probes have no key
BODY_SECONDS = 30.0  # in which a client has to send its body
NOTICE_SECONDS = 1.0  # in which a client has to take the notice that the server is stopping
MOST_DISCARDED = 32 << 20  # bytes that are read of a body too large, so that the client hears why
MAX_ID = 100  # characters of an id that clients may have chosen
NAMED_PATHS = (*OPEN_PATHS, "/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics")

access = logging.getLogger("spec_runtime.access")
log = logging.getLogger("spec_runtime")


def guarded(app: ASGIApp, settings: Settings, metrics: Metrics, has_ids: bool = False) -> ASGIApp:
    """Returns the app with the guards of this file in front of it.

    Where `has_ids`, a further server is in front, see AccessLog. A request that it cancels has lost
    its client, so that nobody is there to hear of a stop.
    """
    admitted = Admission(BodyLimit(app, settings.max_body), settings)
    return AccessLog(admitted if has_ids else StopNotice(admitted), metrics, has_ids)


class AccessLog:
    """Logs each request as one JSON line, without any of its text, and counts it.

    Handlers may add to the line by `scope["log"]`. Mistakes of ours leave a traceback in the log.
    Where `has_ids`, requests come with an id in the header X-Request-Id, which the server in front
    of this app gave them and tells their clients.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, has_ids: bool = False) -> None:
        self._app = app
        self._metrics = metrics
        self._has_ids = has_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        request_id = f"req_{uuid.uuid4().hex}"
        if self._has_ids:
            request_id = Headers(scope=scope).get("x-request-id", "")[:MAX_ID]
        more: dict[str, object] = {}
        scope["log"] = more
        status, is_complete = GONE, False

        async def send_and_note(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                if not self._has_ids:
                    header = (b"x-request-id", request_id.encode())
                    message = {**message, "headers": [*message.get("headers", ()), header]}
            is_complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            log.exception("a request failed")
            if not is_complete:
                raise  # which breaks the connection, so that the client sees an error
        finally:
            seconds = time.perf_counter() - begun
            path = scope["path"] if scope["path"] in NAMED_PATHS else "other"
            self._metrics.requests.labels(path, status).inc()
            self._metrics.request_seconds.observe(seconds)
            self._write(scope, request_id, status, seconds, more)

    def _write(
        self, scope: Scope, request_id: str, status: int, seconds: float, more: dict[str, object]
    ) -> None:
        client = scope.get("client")
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **more,
        }
        access.info("%s", json.dumps(line))


class StopNotice:
    """Tells clients whose answers a stop cuts off that the server is stopping.

    uvicorn cancels their requests then. It cancels no others: the request of a client that leaves
    ends by ClientGone.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        is_complete = False

        async def send_and_note(message: Message) -> None:
            nonlocal start, is_complete
            await send(message)
            if message["type"] == "http.response.start":
                start = message
            is_complete = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if is_complete:
                return
            error = stopped()
            scope["log"]["error"] = error.code
            with suppress(TimeoutError, asyncio.CancelledError):  # of a client that reads nothing
                async with asyncio.timeout(NOTICE_SECONDS):
                    if start is None:
                        await response(error)(scope, receive, send)
                    elif is_event_stream(start):
                        await send(last_event(error))


class Admission:
    """Refuses requests that address the server by an unknown name, or lack the API key.

    The name is checked because a web page may make its own name point to this machine (DNS
    rebinding): its scripts could then ask a server that listens on loopback only.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            scope["log"]["error"] = error.code
            await response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and plain_host(_host(headers)) not in self._hosts:
            message = "The server is not known by this name; --allow-host adds one."
            return ApiError(403, message, code="unknown_host")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        is_bearer = kind.lower() == "bearer"
        # Digests have one length, and comparing them takes the same time wherever they differ.
        # Headers come as Latin-1, whatever the client meant.
        if hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key) and is_bearer:
            return None
        message = "Incorrect API key provided." if key else "You didn't provide an API key."
        return ApiError(
            401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host(headers: Headers) -> str:
    """Returns the name in the header Host without its port: "[::1]:80" -> "::1"."""
    host = headers.get("host", "")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


class BodyLimit:
    """Reads a request's whole body before the app does, up to a number of bytes and of seconds."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(scope, receive)
        except TimeoutError:
            message = f"The request's body was not complete after {BODY_SECONDS:g} s."
            await response(ApiError(408, message, code="request_timeout"))(scope, receive, send)
            return
        except ApiError as error:
            scope["log"]["error"] = error.code
            await response(error)(scope, receive, send)
            return
        except ClientGone:
            return
        messages: list[MutableMapping[str, Any]] = [
            {"type": "http.request", "body": body, "more_body": False}
        ]

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the body. Raises ApiError if it is too large, ClientGone if it ends early."""
        parts: list[bytes] = []
        size = 0
        declared = Headers(scope=scope).get("content-length", "0")
        with suppress(ValueError):
            if int(declared) > max(self._most, MOST_DISCARDED):
                raise self._too_large()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message.get("body", b""))
            if size <= self._most:
                parts.append(message.get("body", b""))
            elif size > MOST_DISCARDED:
                raise self._too_large()
            if not message.get("more_body", False):
                break
        if size > self._most:
            raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        message = f"The request's body is larger than {self._most} bytes, the most allowed here."
        return ApiError(413, message, code="request_too_large")
