"""Holds the bundles behind one port. Opens each when it is first asked for, and closes the one that
was used least recently where too many would be open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from spec_runtime.errors import UnknownDrafterError
from spec_runtime.serve.errors import ApiError, timed_out
from spec_runtime.serve.metrics import Metrics
from spec_runtime.serve.responses.store import ResponseStore
from spec_runtime.serve.service import Service
from spec_runtime.serve.streams import unless_gone
from spec_runtime.serve.threads import Threads

ANY = "*"  # the alias that stands for all other names
LENT = "specsplit.lent"  # the key of a request's scope that holds the services lent to it

NUM_READING, MOST_READING = 2, 64  # threads, and long bodies that wait for them

log = logging.getLogger("spec_runtime")


class OpenModel:
    """A bundle that is open, and how many requests use it."""

    def __init__(self, service: Service, num_users: int = 0) -> None:
        self.service = service
        self._num_users = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.lend(num_users)

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    def lend(self, num_users: int = 1) -> OpenModel:
        """Counts further users; each calls `give_back` when it is done."""
        self._num_users += num_users
        if self._num_users:
            self._idle.clear()
        return self

    def give_back(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._idle.set()

    async def close(self) -> None:
        """Closes the bundle once it has no more users."""
        await self._idle.wait()
        await self.service.close()


@dataclass(eq=False)
class Model:
    """A bundle that requests ask for by `name` or by one of `aliases`.

    `open` opens it in a thread. `max_length` is its context and `drafters` are the names of its
    drafters, which are known before it is open.
    """

    name: str
    open: Callable[[], Service]
    max_length: int
    drafters: Sequence[str]
    aliases: Sequence[str] = ()
    opened: OpenModel | None = field(default=None, init=False)
    last_used: float = field(default=0.0, init=False)
    waiting: list[asyncio.Future[OpenModel]] = field(default_factory=list, init=False)
    opening: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def take_waiting(self) -> list[asyncio.Future[OpenModel]]:
        """Removes all places, and returns those of requests that still wait."""
        places, self.waiting = self.waiting, []
        return [place for place in places if not place.done()]


class Models:
    """Lends services to requests, by the name of the model that they ask for.

    At most `most_open` bundles are open, None is no bound. Another one takes the place of the idle
    one that was used least recently. If none is idle, it waits until one is; requests for that one
    which come meanwhile wait for their turn after it. A request waits at most `timeout` seconds.
    Used by one event loop. The responses that are kept belong to all models together.
    """

    def __init__(
        self,
        models: Iterable[Model],
        metrics: Metrics,
        kept: ResponseStore,
        most_open: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._models = list(models)
        self._by_name = {name: model for model in self._models for name in model.names}
        self.metrics, self.kept = metrics, kept
        self.reading = Threads(NUM_READING, MOST_READING)  # of long bodies
        self.started = int(time.time())
        self._most_open = len(self._models) if most_open is None else most_open
        self._timeout = timeout
        self._turn = asyncio.Lock()  # of the one that is opened

    @property
    def is_ready(self) -> bool:
        """Says whether each open bundle would take a request now."""
        return all(each.service.is_ready for _, each in self._open_ones())

    def find(self, name: str | None) -> Model:
        """Returns the model of this name, None for the first, and for an unknown name the one that
        has the alias `*`. Raises ApiError if there is none."""
        if name is None:
            return self._models[0]
        name = name if name in self._by_name or ANY not in self._by_name else ANY
        if name not in self._by_name:
            known = ", ".join(f"`{each}`" for each in self._by_name)
            message = f"The model `{name:.200}` does not exist; this server has {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._by_name[name]

    def described(self) -> list[dict[str, Any]]:
        """Returns what /v1/models says of each name, aliases after the names that they stand
        for."""
        return [self.description(name) for name in self._by_name if name != ANY]

    def description(self, name: str) -> dict[str, Any]:
        """Returns what /v1/models says of a name. Raises ApiError for one that is not known."""
        model = self.find(name)
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "specsplit",
            "root": model.name,
            "max_model_len": model.max_length,
            "drafters": list(model.drafters),
            "is_open": model.opened is not None,
        }

    async def lend(self, name: str | None, request: Request, drafter: str | None = None) -> Service:
        """Returns the service that answers for a model, opened if it is not; LendingApp takes it
        back once the request is answered. Raises ApiError for an unknown model, for one that
        cannot be opened, and after the timeout; UnknownDrafterError for a drafter that the model
        has not; ClientGone if the client leaves."""
        model = self.find(name)
        if drafter is not None and drafter not in model.drafters:
            raise UnknownDrafterError(drafter, model.drafters)
        if len(self._models) > 1:
            request.scope["log"]["model"] = model.name
        model.last_used = time.monotonic()
        if model.opened is not None:
            opened = model.opened.lend()
        else:
            opened = await unless_gone(request.receive, self._opened(model))
        request.scope[LENT].append(opened)
        return opened.service

    async def _opened(self, model: Model) -> OpenModel:
        """Waits until the model is open and lends it."""
        place = asyncio.get_running_loop().create_future()
        model.waiting.append(place)
        if model.opening is None:
            model.opening = asyncio.create_task(self._open(model))
        opened: OpenModel | None = None
        try:
            async with asyncio.timeout(self._timeout):
                opened = await place
        except TimeoutError:
            raise timed_out(self._timeout) from None
        finally:
            is_lent = place.done() and not place.cancelled() and place.exception() is None
            if is_lent and opened is None:  # the request ended in that moment
                place.result().give_back()
        assert opened is not None, "a place is given or refused"
        return opened

    async def _open(self, model: Model) -> None:
        """Opens a model in its turn, and lends it to all who wait for it."""
        async with self._turn:
            try:
                while len(self._open_ones()) >= self._most_open:
                    await self._close_one()
                begun = time.monotonic()
                service = await asyncio.to_thread(model.open)
            except Exception:
                log.exception("the bundle of model %s could not be opened", model.name)
                for place in model.take_waiting():
                    place.set_exception(not_opened(model.name))
            else:
                self.metrics.count_opening(model.name, time.monotonic() - begun)
                places = model.take_waiting()
                model.opened = OpenModel(service, len(places))
                for place in places:
                    place.set_result(model.opened)
            finally:
                model.opening = None
                self._note()

    async def _close_one(self) -> None:
        """Closes the idle bundle that was used least recently, or waits for one to be idle."""
        model, opened = min(
            self._open_ones(), key=lambda each: (not each[1].is_idle, each[0].last_used)
        )
        model.opened = None  # so that requests for it wait
        self._note()
        await opened.close()

    def add_open(self, service: Service) -> None:
        """Takes the open bundle of the first model."""
        self._models[0].opened = OpenModel(service)
        self._note()

    def _open_ones(self) -> list[tuple[Model, OpenModel]]:
        return [(each, each.opened) for each in self._models if each.opened is not None]

    def _note(self) -> None:
        self.metrics.open_models.set(len(self._open_ones()))

    async def close(self) -> None:
        """Ends all requests, and closes all bundles."""
        for model in self._models:
            if model.opening is not None:
                model.opening.cancel()
        for _, opened in self._open_ones():
            await opened.service.close()
        await self.reading.close()


def not_opened(name: str) -> ApiError:
    message = f"The model `{name}` could not be opened; the server's log says why."
    return ApiError(503, message, kind="server_error", param="model", code="model_not_opened")


class LendingApp:
    """Takes services back that were lent to a request, once it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lent = scope[LENT] = []
        try:
            await self._app(scope, receive, send)
        finally:
            for each in lent:
                each.give_back()
