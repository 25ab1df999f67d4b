"""Serves a bundle on a Ray cluster: replicas with an engine each, behind a thin front.

The front has the guards of the HTTP server and hands requests to replicas; those that a replica
took with it when it died are asked again. Ray places replicas, checks, replaces and scales them.
"""

# Annotations are not postponed here: Ray reads the one of `build` to make its argument.

import asyncio
import logging
import math
import os
import time
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Self

from spec_runtime.errors import UserError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that begins here
try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
except ModuleNotFoundError as error:
    message = "Ray Serve is not installed: pip install 'specsplit[ray]'"
    raise ModuleNotFoundError(message, name="ray") from error

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ConfigDict, Field, create_model, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Scope

from spec_runtime import QueueFull, load
from spec_runtime.bundle import manifest as bundles
from spec_runtime.load import LoadOptions
from spec_runtime.options import declared
from spec_runtime.serve.app import make_unguarded_app
from spec_runtime.serve.errors import ApiError, Json
from spec_runtime.serve.guards import guarded
from spec_runtime.serve.metrics import CarriedMetrics, Metrics
from spec_runtime.serve.models import models_of
from spec_runtime.serve.processes import open_compiler, set_up_logs
from spec_runtime.serve.relay import Messages, Relay, ReplicaDied, answers_of
from spec_runtime.serve.service import Service
from spec_runtime.serve.settings import ServerLimits, Settings, key_from

MOST_AT_FRONT = 10_000  # requests; it is the replicas' queue that is limited
LOOK_SECONDS = 1.0  # between two looks at what Ray says of the application
DRAIN_SECONDS = 0.5  # between two looks whether a replica that stops has finished
FEW_STARTS = 3  # of a replica that cannot start, before the deployment has failed

log = logging.getLogger("spec_runtime")

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


# Options that replicas have no use for, or by another name: num_cpus for threads, and the numbers
# of requests for max_waiting and max_streams.
NOT_SERVED = ("threads", "verify", "strict", "max_waiting", "max_streams")


def declared_fields(declaration: type) -> dict[str, Any]:
    """Returns pydantic's fields of arguments for the options of a declaration."""
    return {
        name: (option.annotation, option.default)
        for name, option in declared(declaration).items()
        if name not in NOT_SERVED
    }


LOADED = declared_fields(LoadOptions)
LOADED["map_weights"] = (bool | None, None)  # None: where replicas may be neighbours
LIMITS = declared_fields(ServerLimits)
Declared: Any = create_model(
    "Declared", __config__=ConfigDict(extra="forbid"), __module__=__name__, **LOADED, **LIMITS
)


class Arguments(Declared):  # type: ignore[misc]
    """Says what is served, by how many replicas, and with which limits.

    `serve run` makes it of `key=value`, and a Serve config of `args`. The options of
    `spec_runtime.load` and the limits of a server are among them. Each replica opens the bundle by
    this path, on whichever node it runs. `num_cpus` are the threads of a replica and, with
    `num_gpus`, what Ray reserves for it. `autoscaling_config` is Ray's own, and takes the place of
    `num_replicas`.

    A replica has up to `max_ongoing_requests`, of which it answers one at a time; up to
    `max_queued_requests` wait in the front for a place, and further ones get 429. A replica that is
    stopped has `grace` seconds to finish its requests. `api_key_env` names an environment variable
    of the front's process; `aliases`, `hosts` and `cors_origins` are those of Settings.
    """

    bundle: str
    name: str | None = None
    aliases: tuple[str, ...] = ()

    num_replicas: Count = 1
    autoscaling_config: dict[str, Any] | None = None
    num_cpus: Count = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    max_ongoing_requests: Count = 4
    max_queued_requests: Count = 32
    health_check_seconds: Seconds = 5.0

    api_key_env: str | None = None
    hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.autoscaling_config is not None and "num_replicas" in self.model_fields_set:
            raise UserError("num_replicas and autoscaling_config exclude each other")
        return self

    @property
    def scale(self) -> dict[str, Any]:
        """Returns Ray's options for the number of replicas."""
        if self.autoscaling_config is not None:
            return {"autoscaling_config": self.autoscaling_config}
        return {"num_replicas": self.num_replicas}

    @property
    def load_options(self) -> dict[str, Any]:
        """Returns the arguments of `spec_runtime.load`. Replicas that may be neighbours on a node
        share weights, as the workers of one server do."""
        options = {name: getattr(self, name) for name in LOADED}
        options["threads"] = self.num_cpus
        if options["map_weights"] is None:
            has_neighbours = self.autoscaling_config is not None or self.num_replicas > 1
            options["map_weights"] = has_neighbours and options["backend"] == "onnxruntime"
        return options

    @property
    def limits(self) -> dict[str, Any]:
        """Returns the fields of ServerLimits."""
        return {name: getattr(self, name) for name in LIMITS}


class EngineReplica:
    """Answers requests with one engine, in a process of its own."""

    def __init__(self, arguments: Arguments) -> None:
        bundle = Path(arguments.bundle)
        name = arguments.name or bundles.read(bundle, verify=False).manifest.name
        most = arguments.max_ongoing_requests  # Ray sends no more; what waits, waits in the front
        settings = Settings(
            name,
            aliases=arguments.aliases,
            max_waiting=most,
            max_streams=most,
            **arguments.limits,
        )
        engine = load(bundle, **arguments.load_options)
        set_up_logs()
        open_compiler(engine)
        self._metrics = CarriedMetrics()
        self._service = Service(engine, settings, self._metrics)
        self._app = make_unguarded_app(models_of(self._service))

    async def answer(self, scope: Scope, body: bytes) -> Messages:
        """Yields the messages of an answer, see relay.answers_of; none at first, which says that
        the request has a place here."""
        yield []
        async with aclosing(answers_of(self._app, scope, body, self._metrics)) as answer:
            async for messages in answer:
                yield messages

    def check_health(self) -> None:
        """Raises RuntimeError where the engine is closed, or has hung: no step, and no preparation
        of a request, may take longer than a whole request. Ray then starts another replica in place
        of this one."""
        assert self._service.engine.target is not None, "it raises if the engine is closed"
        queue = self._service.queue
        seconds = max(queue.seconds_in_step, queue.seconds_in_preparation)
        if seconds > self._service.settings.timeout:
            raise RuntimeError(f"the engine has been in one step for {seconds:.0f} s")


class Front:
    """Takes HTTP requests, refuses bad ones, and relays the others to the replicas."""

    def __init__(self, replicas: Any, arguments: Arguments) -> None:
        variable = arguments.api_key_env
        self._settings = Settings(
            "front",
            api_key=None if variable is None else key_from(variable),
            hosts=arguments.hosts,
            cors_origins=arguments.cors_origins,
            **arguments.limits,
        )
        self._replicas = replicas
        self._asked = replicas.options(method_name="answer", stream=True)
        self._metrics = Metrics()
        self._watch = _StatusWatch()
        set_up_logs()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the app; Ray calls this by its name."""
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._scrape),
            Mount("/", Relay(self._ask, self._settings.timeout, self._metrics)),
        ]
        return guarded(Router(routes), self._settings, self._metrics, has_ids=True)

    async def _ask(self, scope: Scope, body: bytes) -> Messages:
        """Yields the messages of one replica's answer. Raises what Relay expects."""
        answer = self._asked.remote(scope, body)
        try:
            await self._wait_for_place(answer)
            async for messages in answer:
                yield messages
        except RayActorError as error:
            raise ReplicaDied(str(error).partition("\n")[0]) from error
        except BackPressureError as error:
            raise QueueFull(f"{error.args[1]} requests are waiting") from error
        except DeploymentUnavailableError as error:
            raise ApiError(503, "No replica could start.", kind="server_error") from error
        except (asyncio.CancelledError, GeneratorExit, ApiError):  # nobody waits for it any more
            answer.cancel()
            raise

    async def _wait_for_place(self, answer: Any) -> None:
        """Waits until a replica has the request. Raises ApiError if none will have it: when the
        application is deleted, Ray stops front and replicas together, and these take no more."""
        first = asyncio.ensure_future(anext(answer))
        try:
            while not (await asyncio.wait([first], timeout=LOOK_SECONDS))[0]:
                self._watch.look()
                if self._watch.is_stopping:
                    message = "The server is stopping."
                    raise ApiError(503, message, kind="server_error", code="stopping")
            await first
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _health(self, request: Request) -> Response:
        """Says that the front answers."""
        return Json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Says how many replicas answer: 503 where none does."""
        status = await asyncio.shield(self._watch.look())  # others wait for it, too
        num_running = 0
        if status is not None:
            replicas = status.deployments[self._replicas.deployment_name]
            num_running = replicas.replica_states.get("RUNNING", 0)
        word, code = ("ready", 200) if num_running else ("busy", 503)
        return Json({"status": word, "replicas": num_running}, code)

    async def _scrape(self, request: Request) -> Response:
        return Response(self._metrics.scrape(), media_type=CONTENT_TYPE_LATEST)


class _StatusWatch:
    """Knows what Ray said last of the application."""

    def __init__(self) -> None:
        self.is_stopping = False
        self._begun = -math.inf
        self._task: asyncio.Task[Any] | None = None

    def look(self) -> asyncio.Task[Any]:
        """Returns a task that ends with the application's status, or None. It is the last one if
        that was begun a moment ago, or is still on its way."""
        now = time.monotonic()
        if self._task is None or (self._task.done() and now - self._begun > LOOK_SECONDS):
            self._begun = now
            self._task = asyncio.create_task(self._ask())
        return self._task

    async def _ask(self) -> Any:
        try:
            status = await asyncio.to_thread(serve.status)
        except Exception:  # Ray's controller is on its way back; answers go on meanwhile
            log.warning("Ray does not say how the application is", exc_info=True)
            return None
        found = status.applications.get(serve.get_replica_context().app_name)
        self.is_stopping = found is None or found.status == "DELETING"
        return found


def build(args: Arguments) -> serve.Application:
    """Returns the application for `serve run`, a Serve config, or `ray.serve.run`."""
    bundle = str(Path(args.bundle).absolute())  # replicas begin in a folder of Ray's
    arguments = args.model_copy(update={"bundle": bundle})
    stop: dict[str, Any] = {
        "graceful_shutdown_timeout_s": args.grace,
        "graceful_shutdown_wait_loop_s": DRAIN_SECONDS,
    }
    replicas = serve.deployment(
        **args.scale,
        **stop,
        max_ongoing_requests=args.max_ongoing_requests,
        max_queued_requests=args.max_queued_requests,
        health_check_period_s=args.health_check_seconds,
        max_constructor_retry_count=FEW_STARTS,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
    )(EngineReplica)
    front = serve.deployment(
        **stop, max_ongoing_requests=MOST_AT_FRONT, ray_actor_options={"num_cpus": 0}
    )(serve.ingress()(Front))
    return front.bind(replicas.bind(arguments), arguments)
