"""Speaks HTTP on one connection, and ends it if its client does not complete a request in time."""

import asyncio
import math
import re
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spec_runtime.serve import guards

HEAD_SECONDS = 10.0  # in which a client has to send the header of its first or next request
LAG_SECONDS = 1.0  # by which a timer is late only where this process is held up
LATE_SECONDS = 5.0  # after guards.BODY_SECONDS: the client has heard of its error by then
MAX_HEAD = 64 << 10  # bytes of a header, of trailers, or of a chunk's size
MAX_CONNECTIONS = 512  # of a process; often it may have no more than 1024 open files
MAX_PIPELINED = 16  # requests that wait for the answer to an earlier one of their connection


class LimitedConnection(HttpToolsProtocol):
    """Adds the limits that uvicorn leaves to its protocol's parser, which has none.

    uvicorn's other parser, h11, limits headers but needs a second for 64 KB of tiny chunks. A timer
    runs at all times but while a complete request waits for its answer, for which the app has
    limits of its own.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # bytes since the last header, part of a body, or end of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer. If there are too many connections, closes the one that has waited
        longest for its client to complete a request: an honest client needs milliseconds."""
        super().connection_made(transport)
        self._limit(HEAD_SECONDS)
        if len(self.connections) > MAX_CONNECTIONS:
            connections = cast(set[LimitedConnection], self.connections)
            oldest = min(connections, key=lambda each: (each.deadline, each is self))
            oldest.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_unread += len(data)
        super().data_received(data)
        if self._num_unread > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The request's header is larger than {MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._limit(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        """Begins to answer. Raises ValueError for too many requests, which the parser passes on."""
        self._num_unread = 0
        self._limit(guards.BODY_SECONDS + LATE_SECONDS)
        if not self.url.startswith((b"/", b"*")):  # "http://name/path", or CONNECT's "name:port"
            authority = re.sub(rb".*?://", b"", self.url, count=1)
            scope = cast(dict[str, Any], self.scope)
            scope[guards.AUTHORITY] = re.split(b"[/?#]", authority)[0].decode("latin-1")
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError(f"got more than {MAX_PIPELINED} requests before the first's answer")

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread = 0
        self._stop_timer()
        super().on_message_complete()
        self._await_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_next()

    @property
    def deadline(self) -> float:
        """Returns when the connection will be closed, infinity while a request is answered."""
        if self._timer is None or self._is_answering or self.transport.is_closing():
            return math.inf
        return self._timer.when()

    @property
    def _is_answering(self) -> bool:
        cycle = self.cycle
        has_whole = cycle is not None and not (cycle.more_body or cycle.response_complete)
        return bool(self.pipeline) or has_whole

    def _await_next(self) -> None:
        """Starts the timer if the last request is complete and answered."""
        if self._timer is None and self.cycle.response_complete:
            self._limit(HEAD_SECONDS)

    def _limit(self, seconds: float) -> None:
        self._stop_timer()
        until = self.loop.time() + seconds + LAG_SECONDS
        self._timer = self.loop.call_later(seconds, self._end, seconds, until)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, seconds: float, until: float) -> None:
        """Closes the connection, unless an earlier request of it still waits for its answer. After
        `until` the client gets more time: this process was held up, and may not have read yet what
        the client has sent."""
        if self._is_answering or self.loop.time() > until:
            self._limit(seconds)
        else:
            self.transport.close()
