"""Serves a bundle on a Ray cluster: replicas with an engine each, behind Ray's own HTTP proxy.

Each replica answers with the whole app of the HTTP server, guards and all. Ray places replicas,
routes requests, queues what waits, and checks, replaces and scales replicas.
"""

# Annotations are not postponed here: Ray reads the one of `build` to make its argument.

import os
from pathlib import Path
from typing import Annotated, Any, Self

from spec_runtime.errors import UserError
from spec_runtime.files.installed import install

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that begins here
try:
    from ray import serve
except ModuleNotFoundError as error:
    message = f"Ray Serve is not installed: {install('ray')}"
    raise ModuleNotFoundError(message, name="ray") from error

from pydantic import ConfigDict, Field, create_model, model_validator
from starlette.types import ASGIApp

from spec_runtime import load
from spec_runtime.bundle import manifest as bundles
from spec_runtime.load import LoadOptions
from spec_runtime.options import declared
from spec_runtime.serve.app import make_app
from spec_runtime.serve.models import models_of
from spec_runtime.serve.processes import open_compiler, set_up_logs
from spec_runtime.serve.service import Service
from spec_runtime.serve.settings import ServerLimits, Settings, key_from

FEW_STARTS = 3  # of a replica that cannot start, before the deployment has failed

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

    A replica has up to `max_ongoing_requests`, of which it answers `parallel` together; up to
    `max_queued_requests` wait at Ray's proxy for a place, and Ray answers further ones with 503. A
    replica that is stopped has `grace` seconds to finish its requests. `api_key_env` names an
    environment variable of the replicas; `aliases`, `hosts` and `cors_origins` are those of
    Settings.
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
        """Returns the arguments of `spec_runtime.load`."""
        return {name: getattr(self, name) for name in LOADED} | {"threads": self.num_cpus}

    @property
    def limits(self) -> dict[str, Any]:
        """Returns the fields of ServerLimits."""
        return {name: getattr(self, name) for name in LIMITS}


class EngineReplica:
    """Answers HTTP requests with one engine, in a process of its own."""

    def __init__(self, arguments: Arguments) -> None:
        bundle = Path(arguments.bundle)
        most = arguments.max_ongoing_requests  # Ray sends no more; what waits, waits at the proxy
        variable = arguments.api_key_env
        self._settings = Settings(
            arguments.name or bundles.read(bundle, verify=False).manifest.name,
            aliases=arguments.aliases,
            api_key=None if variable is None else key_from(variable),
            hosts=arguments.hosts,
            cors_origins=arguments.cors_origins,
            max_waiting=most,
            max_streams=most,
            **arguments.limits,
        )
        engine = load(bundle, **arguments.load_options)
        set_up_logs()
        open_compiler(engine)
        self._service = Service(engine, self._settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the app; Ray calls this by its name."""
        return make_app(models_of(self._service), self._settings, has_ids=True)

    def check_health(self) -> None:
        """Raises RuntimeError where the engine is closed, or has hung: no step, and no preparation
        of a request, may take longer than a whole request. Ray then starts another replica in place
        of this one."""
        assert self._service.engine.target is not None, "it raises if the engine is closed"
        queue = self._service.queue
        seconds = max(queue.seconds_in_step, queue.seconds_in_preparation)
        if seconds > self._settings.timeout:
            raise RuntimeError(f"the engine has been in one step for {seconds:.0f} s")


def build(args: Arguments) -> serve.Application:
    """Returns the application for `serve run`, a Serve config, or `ray.serve.run`."""
    bundle = str(Path(args.bundle).absolute())  # replicas begin in a folder of Ray's
    arguments = args.model_copy(update={"bundle": bundle})
    replicas = serve.deployment(
        **args.scale,
        graceful_shutdown_timeout_s=args.grace,
        max_ongoing_requests=args.max_ongoing_requests,
        max_queued_requests=args.max_queued_requests,
        health_check_period_s=args.health_check_seconds,
        max_constructor_retry_count=FEW_STARTS,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
    )(serve.ingress()(EngineReplica))
    return replicas.bind(arguments)
