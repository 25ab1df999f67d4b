"""Hands requests on to replicas of the app, and asks another one when a replica dies.

A greedy request, or one with a seed, determines its tokens; for one without a seed any
answer is as good. A request may therefore be asked again as long as nothing of its answer was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_runtime import QueueFull
from spec_runtime.serve.errors import ApiError, as_api_error, internal_error, timed_out
from spec_runtime.serve.metrics import CarriedMetrics, Metrics, count_carried
from spec_runtime.serve.streams import is_event_stream, unless_gone

MOST_ASKED = 3  # replicas, so that a request that kills them does not kill them all
WAIT_SECONDS = 0.1  # before a request that was accepted tries a full queue again
REPORT = "specsplit.report"  # the type of the message with which a replica says what it did
RETRIES_HEADER = b"x-specsplit-retries"
CARRIED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")

log = logging.getLogger("spec_runtime")

Messages = AsyncGenerator[Sequence[Message], None]


class ReplicaDied(Exception):
    """The replica that was answering has died, or cannot be reached any more."""


class Relay:
    """An ASGI app whose requests are answered by replicas.

    `ask(scope, body)` yields the messages of one replica's answer, see `answers_of`, some at a
    time. It raises ReplicaDied, or QueueFull where too many requests wait. A request of which the
    client has got nothing is then asked again, of up to three replicas; once it was accepted, a
    full queue does not refuse it any more. What is no stream is sent when it is complete.
    `timeout` are the seconds of a request, its waiting included. `metrics` gets what replicas
    count. Raises ApiError for whatever goes wrong, also in the midst of a stream, and ClientGone;
    `guards.Guards` tells the client.
    """

    def __init__(
        self, ask: Callable[[Scope, bytes], Messages], timeout: float, metrics: Metrics
    ) -> None:
        self._ask = ask
        self._timeout = timeout
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await receive()  # has the whole body, see guards.Guards
        reply = _Reply(scope, send, self._metrics)
        body = first.get("body", b"")
        await unless_gone(receive, self._answer(carried_scope(scope), body, reply))

    async def _answer(self, scope: Scope, body: bytes, reply: _Reply) -> None:
        """Asks replicas until one has answered. Raises ApiError if none does."""
        try:
            async with asyncio.timeout(self._timeout):
                while not await self._is_answered(scope, body, reply):
                    pass
                await reply.finish()
        except TimeoutError:
            raise timed_out(self._timeout) from None
        except Exception as error:
            raise as_api_error(error) from error
        if not reply.is_complete:
            log.error("a replica's answer ended early: %s %s", scope["method"], scope["path"])
            raise internal_error()

    async def _is_answered(self, scope: Scope, body: bytes, reply: _Reply) -> bool:
        """Asks one replica; says whether that gave an answer."""
        try:
            async with aclosing(self._ask(scope, body)) as answer:
                async for messages in answer:
                    await reply.take(messages)
            return True
        except QueueFull:
            if not reply.num_deaths:
                raise
            await asyncio.sleep(WAIT_SECONDS)
        except ReplicaDied as error:
            if reply.is_whole:
                return True
            reply.forget()
            log.warning("a replica died while it answered %s: %s", scope["path"], error)
            if reply.is_begun or reply.num_deaths == MOST_ASKED:
                message = "The replica that was answering has died; send the request again."
                raise ApiError(503, message, kind="server_error", code="replica_died") from error
        return False


class _Reply:
    """Sends one client its reply: events of a stream as they come, everything else once it is
    whole."""

    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self.is_begun = self.is_complete = False  # as the client sees it
        self.is_whole = False  # as replicas have sent it
        self.num_deaths = 0
        self._is_stream = False
        self._log = scope["log"]
        self._metrics = metrics
        self._send = send
        self._held: list[Message] = []

    async def take(self, messages: Sequence[Message]) -> None:
        """Takes messages of a replica, and sends those that may go out."""
        for message in messages:
            if message["type"] == REPORT:
                self._log |= message["log"]
                count_carried(self._metrics, message["counts"])
            else:
                await self._take(message)

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *self._retries()]}
            self._is_stream = is_event_stream(message)
            self._held.append(message)
            return
        self._held.append(message)
        self.is_whole = not message.get("more_body", False)
        if self._is_stream and not self.is_whole:
            await self._send_held()

    async def finish(self) -> None:
        """Sends the rest, if nothing of it is missing."""
        if self.is_whole:
            await self._send_held()
            self.is_complete = True

    async def _send_held(self) -> None:
        self.is_begun = True
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    def forget(self) -> None:
        """Counts a death, and drops what the dead replica gave."""
        self.num_deaths += 1
        self._log["replicas_died"] = self.num_deaths
        self._held = []

    def _retries(self) -> list[tuple[bytes, bytes]]:
        return [(RETRIES_HEADER, b"%d" % self.num_deaths)] if self.num_deaths else []


def carried_scope(scope: Scope) -> dict[str, Any]:
    """Returns what a replica has to know of a request; it can be pickled."""
    carried = {name: scope[name] for name in CARRIED if name in scope}
    client = scope.get("client")
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return {**carried, "root_path": "", "headers": headers, "client": client and tuple(client)}


async def answers_of(app: ASGIApp, scope: Scope, body: bytes, metrics: CarriedMetrics) -> Messages:
    """Yields the messages with which an app answers a request, as they come, and then one of the
    type REPORT, with its part of the access log's line and with counts. Closing the generator ends
    the work, as a client does that goes away.

    A mistake of ours leaves a traceback in the log, and perhaps an answer that is not complete.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {**scope, "log": {}}

    async def receive() -> Message:
        return bodies.pop() if bodies else await asyncio.Future()  # nobody leaves: see above

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        except Exception:
            log.exception("a request failed")
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        is_last = False
        while not is_last:
            found = [await messages.get()]
            while not messages.empty():
                found.append(messages.get_nowait())
            is_last = found[-1] is None
            if ready := [message for message in found if message is not None]:
                yield ready
        yield [{"type": REPORT, "log": scope["log"], "counts": metrics.take()}]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
