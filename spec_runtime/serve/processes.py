"""Runs a server: one process, or several behind one listening socket, until SIGTERM or Ctrl-C.

A stop is graceful: no connection is accepted any more, requests that were accepted are answered in
full, and answers still running after `grace` seconds are cut off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, TextIO

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from spec_runtime import Engine
from spec_runtime.errors import UserError
from spec_runtime.load import load
from spec_runtime.serve.accepting import Worker
from spec_runtime.serve.connections import LimitedConnection
from spec_runtime.serve.settings import Settings

if TYPE_CHECKING:
    from spec_runtime.serve.metrics import Metrics
    from spec_runtime.serve.responses.store import ResponseStore
    from spec_runtime.serve.service import Service

HEALTH_SECONDS = 30  # in which a worker answers its parent: a large bundle may keep it busy
SWITCH_SECONDS = 0.001  # until the event loop has its turn beside threads that compute in Python
STOP_SECONDS = 10.0  # that what was cut off at a stop has to end
# An idle connection is ended by LimitedConnection, earlier than by this limit of uvicorn's. By
# uvicorn's default it would end after 5 s, just as long as clients keep theirs and may send on it.
KEEP_SECONDS = 60
STALL_SECONDS = 60  # after which a connection is dropped whose client takes nothing of its answer
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

log = logging.getLogger("spec_runtime")


@dataclass
class ServedBundle:
    """Holds the names of a bundle to serve, and what is known of it before it is open.

    `arguments` are those of `spec_runtime.load`.
    """

    name: str
    arguments: dict[str, Any]
    max_length: int
    drafters: list[str]
    aliases: tuple[str, ...] = ()


@dataclass
class ServedBundles:
    """Opens bundles and makes their app, in this process or, after pickling, in a worker.

    One bundle is opened at once; of several each is when it is first asked for, at most `most_open`
    at a time. `lanes` says, once one is open here, how many answers are decoded together.
    """

    bundles: list[ServedBundle]
    settings: Settings = field(repr=False)  # which has the API key
    most_open: int | None = None
    lanes: str = field(default="", init=False)

    def open(self) -> ASGIApp:
        # here: they import prometheus_client
        from spec_runtime.serve.app import make_app
        from spec_runtime.serve.metrics import Metrics
        from spec_runtime.serve.models import Model, Models
        from spec_runtime.serve.responses.store import ResponseStore

        sys.setswitchinterval(SWITCH_SECONDS)
        metrics, kept = Metrics(), ResponseStore()
        opens = [partial(self._open_one, each, metrics, kept) for each in self.bundles]
        models = Models(
            [
                Model(each.name, open, each.max_length, each.drafters, each.aliases)
                for each, open in zip(self.bundles, opens, strict=True)
            ],
            metrics,
            kept,
            self.most_open,
            self.settings.timeout,
        )
        if len(opens) == 1:
            models.add_open(opens[0]())
        set_up_logs()
        return EndingApp(make_app(models, self.settings))

    def _open_one(self, bundle: ServedBundle, metrics: Metrics, kept: ResponseStore) -> Service:
        from spec_runtime.serve.service import Service

        engine = load(**bundle.arguments)
        open_compiler(engine)
        parallel = self.settings.parallel or engine.most_parallel
        if parallel > 1:
            megabytes = engine.lanes.bytes(engine.drafter) / 1e6
            self.lanes = f", {parallel} answers together of {megabytes:.0f} MB each"
        settings = replace(self.settings, name=bundle.name, parallel=parallel)
        return Service(engine, settings, metrics, kept)

    def __call__(self) -> ASGIApp:
        """Returns the app of a worker process; ends the process in one line if there is none."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which uvicorn handles by now
        try:
            return self.open()
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(STARTUP_FAILURE) from None


def open_compiler(engine: Engine) -> None:
    """Opens what compiles grammars, so that the first request with one need not wait for that. Goes
    on meanwhile; where it fails, such a request says why."""

    def run() -> None:
        with suppress(UserError):
            engine.tokenizer.open_compiler(engine.target.vocab_size)

    threading.Thread(target=run, daemon=True).start()


class EndingApp:
    """Ends the process some seconds after its app was told to stop, whatever still runs then: a
    thread that never returns would keep the process from ending."""

    def __init__(self, app: ASGIApp, seconds: float = STOP_SECONDS) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await self._app(scope, receive, send)

        async def receive_stop() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._end_later()
            return message

        try:
            await self._app(scope, receive_stop, send)
        except asyncio.CancelledError:  # by a second signal
            self._end_later()
            raise

    def _end_later(self) -> None:
        timer = threading.Timer(self._seconds, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        log.error("the server is ended %g s after its stop: a request did not end", self._seconds)
        os._exit(1)


class _AccessHandler(logging.StreamHandler[TextIO]):
    """Writes the access log. If its reader has gone away, the server goes on without a word."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), BrokenPipeError):
            super().handleError(record)


def set_up_logs() -> None:
    """Sends the access log to standard output as JSON lines, and all else to standard error."""
    access = logging.getLogger("spec_runtime.access")
    access.handlers = [_AccessHandler(sys.stdout)]
    access.setLevel(logging.INFO)
    access.propagate = False
    others = logging.StreamHandler(sys.stderr)
    others.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    for name in ("spec_runtime", "uvicorn.error"):
        logging.getLogger(name).handlers = [others]


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound, but does not listen yet. Raises UserError if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_SECONDS * 1000)
        bound.bind(address)
    except UnicodeError:  # of getaddrinfo
        raise UserError(
            f"got --host {host}, expected an address or a name; choose another --host"
        ) from None
    except OSError as error:
        raise UserError(
            f"got --host {host} --port {port}, expected an address that is free here: "
            f"{error.strerror}; choose another --port, or 0 for any"
        ) from None
    return bound


def url(bound: socket.socket) -> str:
    """Returns the address of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(bundles: ServedBundles, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Serves in this process until it is told to stop; calls `ready` once it listens."""
    server = uvicorn.Server(make_config(bundles.open(), bundles.settings.grace))
    with _signals_handled(server.handle_exit):
        bound.listen(server.config.backlog)
        ready()
        server.run([bound])


def serve_by_workers(bundles: ServedBundles, bound: socket.socket, workers: int) -> None:
    """Serves by several processes, and replaces one that dies. Raises UserError if they cannot
    start."""
    set_up_logs()
    with tempfile.TemporaryDirectory(prefix="specsplit-metrics-") as folder, _signals_handled():
        os.environ[SHARED_FOLDER] = folder
        try:
            config = make_config(bundles, bundles.settings.grace, factory=True, workers=workers)
            pool = Workers(config, [bound])
            pool.run()
        finally:
            del os.environ[SHARED_FOLDER]
    if any(process.exitcode == STARTUP_FAILURE for process in pool.processes):
        raise UserError("a worker process could not start, see above; serve with --workers 1")


def make_config(app: Any, grace: float, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=LimitedConnection,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=KEEP_SECONDS,
        timeout_graceful_shutdown=max(1, round(grace)),
        timeout_worker_healthcheck=HEALTH_SECONDS,
        **more,
    )


class Workers(Multiprocess):
    """Runs uvicorn's worker processes; adds what has to happen when one or all of them end."""

    def init_processes(self) -> None:
        """Starts all. Blocks Ctrl-C in them until ServedBundles makes the app, because it would end
        their imports with tracebacks."""
        resource_tracker.ensure_running()  # which unblocks signals when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.processes = [self._begun() for _ in range(self.processes_num)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _begun(self) -> Worker:
        """Starts a worker. Closes its end of the pipe on which it says that it is well: otherwise
        the wait for its word would go on after its death."""
        worker = Worker(self.config, self.sockets)
        worker.start()
        worker.child_conn.close()
        return worker

    def terminate_all(self) -> None:
        """Stops all; closes the socket first, so that no client waits in its queue in vain."""
        for each in self.sockets:
            each.close()
        super().terminate_all()

    def keep_subprocess_alive(self) -> None:
        """Replaces dead workers, says so, and no longer counts their gauges."""
        for number, process in enumerate(self.processes):
            if self.should_exit.is_set() or process.is_alive(HEALTH_SECONDS):
                continue
            process.kill()  # one that hangs
            process.join()
            if process.exitcode == STARTUP_FAILURE:  # others in its place would fail as well
                self.should_exit.set()
            elif not self.should_exit.is_set():
                self._replace(number)

    def _replace(self, number: int) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        dead, self.processes[number] = self.processes[number], self._begun()
        mark_process_dead(dead.pid)
        log.warning(
            "worker process %d has ended with exit code %d, and its answers with it; "
            "another one takes its place",
            dead.pid,
            dead.exitcode,
        )


@contextmanager
def _signals_handled(handler: Callable[..., None] = lambda *_: None) -> Iterator[None]:
    """Lets a graceful stop end with exit code 0.

    uvicorn handles SIGTERM and SIGINT itself, and sends those that it got once more at its end, to
    the handlers from before. Here that is `handler`, which also gets those that come too early.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
