"""Stands in front of the app: who may ask, how much they may send, what they hear when the server
stops, and a line of log for each request.

All of it is one plain ASGI wrapper, so that the app sees a client's disconnect. Starlette's
TrustedHostMiddleware and RequestBodyLimitMiddleware do less: they answer in plain text, do not take
"localhost." for "localhost", and limit no body's time, nor read on so that its sender hears why.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
import uuid
import zlib
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_runtime.files.mapping import brief
from spec_runtime.serve.errors import (
    GONE,
    INPUT_TOKENS,
    MESSAGES,
    RESPONSES,
    ApiError,
    ClientGone,
    is_anthropics,
    response,
    stopped,
)
from spec_runtime.serve.ignored import HEADER
from spec_runtime.serve.metrics import Metrics
from spec_runtime.serve.settings import Settings, plain_host
from spec_runtime.serve.streams import is_event_stream, last_event

OPEN_PATHS = ("/", "/health", "/ready")  # need no key: the page has no data, probes have no key
BODY_SECONDS = 30.0  # in which a client has to send its body
NOTICE_SECONDS = 1.0  # in which a client has to take the notice that the server is stopping
MOST_DISCARDED = 32 << 20  # bytes that are read of a body too large, so that the client hears why
AUTHORITY = "specsplit.authority"  # the key of a scope: the server's name in a request's target
# How bodies may be compressed, with zlib's number for it; zstd is in no library that we depend on.
ENCODINGS = {"gzip": zlib.MAX_WBITS + 16, "x-gzip": zlib.MAX_WBITS + 16, "deflate": zlib.MAX_WBITS}
NAMED_PATHS = (
    *OPEN_PATHS,
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/metrics",
    *(MESSAGES, f"{MESSAGES}/count_tokens", RESPONSES, INPUT_TOKENS),
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
)

access = logging.getLogger("spec_runtime.access")
log = logging.getLogger("spec_runtime")


def guarded(app: ASGIApp, settings: Settings, metrics: Metrics) -> ASGIApp:
    """Returns an app behind Guards. Scripts of the sites in `settings.cors_origins` may ask it from
    browsers, and read its answers and errors; no cookies go with that."""
    inner = Guards(app, settings, metrics)
    if not settings.cors_origins:
        return inner
    return CORSMiddleware(
        inner,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("X-Request-Id", "Retry-After", HEADER),
    )


class Guards:
    """Admits requests to an app, reads their bodies, and logs and counts each.

    The log has one JSON line a request, without any of its text. Handlers may add to the line by
    `scope["log"]`. Mistakes of ours leave a traceback. An ApiError that the app raises is answered,
    in the midst of a stream as its last event.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())
        self._max_body = settings.max_body
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        request_id = f"req_{uuid.uuid4().hex}"
        scope["log"] = {}
        reply = _Reply(scope, receive, send, request_id)
        try:
            await self._answer(scope, receive, reply)
        except Exception:
            log.exception("a request failed")
            if not reply.is_complete:
                raise  # which breaks the connection, so that the client sees an error
        finally:
            seconds = time.perf_counter() - begun
            path = scope["path"] if scope["path"] in NAMED_PATHS else "other"
            self._metrics.requests.labels(path, reply.status).inc()
            self._metrics.request_seconds.observe(seconds)
            _write_line(scope, request_id, reply.status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        try:
            self._require_admission(scope)
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                receive = _replaying(await self._read_body(scope, receive), receive)
            await self._app(scope, receive, reply)
        except ApiError as error:
            await reply.end_with(error)
        except ClientGone:
            scope["log"]["gone"] = True
        except asyncio.CancelledError:  # uvicorn does so only when it stops
            if not reply.is_complete:
                with suppress(
                    TimeoutError, asyncio.CancelledError
                ):  # of a client that reads nothing
                    async with asyncio.timeout(NOTICE_SECONDS):
                        await reply.end_with(stopped())

    def _require_admission(self, scope: Scope) -> None:
        """Raises ApiError for an unknown name of the server, or a wrong key.

        The name is checked because a web page may make its own name point to this machine (DNS
        rebinding): its scripts could then ask a server that listens on loopback only.
        """
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        targets = [scope[AUTHORITY]] if AUTHORITY in scope else []
        names = {plain_host(name) for name in (*hosts, *targets)}
        if self._hosts is not None and (len(hosts) != 1 or not names.issubset(self._hosts)):
            message = "The server is not known by this name; --allow-host adds one."
            raise ApiError(403, message, code="unknown_host")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        keys = [key if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
        # Digests have one length, and comparing them takes the same time wherever they differ.
        # Headers come as Latin-1, whatever the client meant.
        digests = [_digest(each.strip().encode("latin-1")) for each in keys]
        are_right = [hmac.compare_digest(each, self._key) for each in digests]
        if not any(are_right):
            has_key = bool(key or keys[1])
            message = "Incorrect API key provided." if has_key else "You didn't provide an API key."
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the body, unpacked. Raises ApiError if it is too large, packed or not, or does
        not come in time, and ClientGone if it ends early."""
        message = (
            f"The request's body is larger than {self._max_body} bytes, the most allowed here."
        )
        too_large = ApiError(413, message, code="request_too_large")
        body = bytearray()
        size = 0
        most_read = max(self._max_body, MOST_DISCARDED)
        with suppress(ValueError):
            if int(Headers(scope=scope).get("content-length", "0")) > most_read:
                raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                has_more = True
                while has_more and size <= most_read:
                    received = await receive()
                    if received["type"] == "http.disconnect":
                        raise ClientGone
                    part = received.get("body", b"")
                    size += len(part)
                    if size <= self._max_body:
                        body += part
                    has_more = received.get("more_body", False)
        except TimeoutError:
            message = f"The request's body was not complete after {BODY_SECONDS:g} s."
            raise ApiError(408, message, code="request_timeout") from None
        found = bytes(body)
        encodings = Headers(scope=scope).getlist("content-encoding")
        encoding = ", ".join(encodings).strip().lower()
        if encoding not in ("", "identity") and 0 < size <= self._max_body:
            found = await asyncio.to_thread(_decoded, found, encoding, self._max_body + 1)
            size = len(found)
        if size > self._max_body:
            raise too_large
        return found


def _decoded(body: bytes, encoding: str, most: int) -> bytes:
    """Returns the first `most` bytes of a compressed body, however much it holds; raises ApiError
    for a damaged one, and for an encoding that is none of `ENCODINGS`."""
    if encoding not in ENCODINGS:
        known = ", ".join(ENCODINGS)
        message = f"got Content-Encoding {brief(encoding, 80)!r}, expected {known}, or none."
        headers = {"Accept-Encoding": known}
        raise ApiError(415, message, code="unsupported_encoding", headers=headers)
    is_bare = encoding == "deflate" and body[0] & 15 != zlib.DEFLATED  # as some clients send it
    reader = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else ENCODINGS[encoding])
    try:
        decoded = reader.decompress(body, most)
    except zlib.error as error:
        raise ApiError(400, f"The body is not {encoding}: {error}.") from None
    if len(decoded) < most and (not reader.eof or reader.unused_data):
        raise ApiError(400, f"The body is not one whole {encoding} stream.")
    return decoded


class _Reply:
    """Passes a response on, and knows how far it has come. `request_id` is told to the client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.status = GONE
        self.is_complete = False
        self._scope, self._receive, self._send = scope, receive, send
        self._request_id = request_id
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start:
            value = self._request_id.encode()
            headers = [*message.get("headers", ()), (b"x-request-id", value)]
            if is_anthropics(self._scope["path"]):
                headers.append((b"request-id", value))
            message = {**message, "headers": headers}
        await self._send(message)
        if is_start:
            self.status = message["status"]
            self._is_stream = is_event_stream(message)
        self.is_complete = not is_start and not message.get("more_body")

    async def end_with(self, error: ApiError) -> None:
        """Sends the error as the response, or as the last event of a stream that has begun."""
        self._scope["log"]["error"] = error.code
        if self.status == GONE:
            await response(error, self._scope["path"])(self._scope, self._receive, self)
        elif self._is_stream:
            await self(last_event(error, self._scope["path"]))


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Returns a function that gives a body that was read, and then what else comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _write_line(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    client = scope.get("client")
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": request_id,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        **scope["log"],
    }
    access.info("%s", json.dumps(line))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
