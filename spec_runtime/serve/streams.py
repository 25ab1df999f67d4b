"""Sends server-sent events, and ends the work for clients that have gone away."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from spec_runtime.serve.errors import MESSAGES, RESPONSES, ApiError, ClientGone, body_of, dumped

LOOK_SECONDS = 0.25  # until the headers of a stream go out before its first event
PING_SECONDS = 10.0
PING = ": ping\n\n"  # a comment, which clients skip

Work = TypeVar("Work")


class EventStream(Response):
    """Sends server-sent events, and ends with the client.

    Headers go out with the first event, or before it once `is_accepted` says that the request was
    found right; a ping then follows from time to time, so that neither client nor proxy gives up
    while a long prompt is read. What fails before the headers becomes an ordinary error response,
    and what fails later the stream's last event, so that no stream ends early in silence. `close`
    is called in any case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        close: Callable[[], None],
        is_accepted: Callable[[], bool],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._is_accepted = is_accepted
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ClientGone:
            scope["log"]["gone"] = True
        finally:
            await self._events.aclose()
            self._close()  # also where the client left before the first event

    async def _send_all(self, scope: Scope, send: Send) -> None:
        try:
            await self._send(send, await self._first_event(scope["path"], send))
            async for event in self._events:
                await self._send(send, event)
        except ApiError as error:
            if not self._has_started:
                raise
            scope["log"]["error"] = error.code
            await send(last_event(error, scope["path"]))
        else:
            await send(_body("", more=False))

    async def _first_event(self, path: str, send: Send) -> str:
        """Returns the first event; sends pings until it is there."""
        first = asyncio.ensure_future(anext(self._events))
        seconds = LOOK_SECONDS
        try:
            while not (await asyncio.wait((first,), timeout=seconds))[0]:
                if self._is_accepted():
                    seconds = PING_SECONDS
                    is_typed = path == MESSAGES
                    await self._send(send, typed_event_of({"type": "ping"}) if is_typed else PING)
            return first.result()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _send(self, send: Send, event: str) -> None:
        if not self._has_started:
            self._has_started = True
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": self.raw_headers})
        await send(_body(event))


def _body(text: str, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def is_event_stream(start: Message) -> bool:
    """Says whether the response that begins with this message is a stream of events."""
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return kind.startswith("text/event-stream")


def last_event(error: ApiError, path: str) -> Message:
    """Returns the message that ends a stream of events, asked for at `path`, with an error."""
    body = body_of(error, path)
    if path == RESPONSES:  # clients look for the error's fields, or for `error`
        body = {**body["error"], **body, "type": "error"}
    write = typed_event_of if "type" in body else event_of
    return _body(write(body), more=False)


def event_of(content: object) -> str:
    """Returns a server-sent event with JSON."""
    return f"data: {dumped(content)}\n\n"


def typed_event_of(content: Mapping[str, Any]) -> str:
    """Returns a server-sent event with JSON, which its `type` names."""
    return f"event: {content['type']}\n{event_of(content)}"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Work]) -> Work:
    """Returns what `work` returns; cancels it and raises ClientGone once the client disconnects.

    `receive` is ASGI's, and the request's body has to be read already.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
