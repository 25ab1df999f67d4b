"""Implements spec-runtime serve: OpenAI's and Anthropic's APIs and a page, over HTTP."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spec_runtime.cli import options
from spec_runtime.cli.flags import Flags, with_flags
from spec_runtime.load import LoadOptions
from spec_runtime.options import declared
from spec_runtime.serving.settings import (
    LOOPBACK,
    ServerLimits,
    Settings,
    key_from,
    plain_host,
)

BundleArgument = Annotated[
    Path | None, typer.Argument(help="Bundle folder", show_default="the newest under ./bundles")
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on")]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 is any free one")
]
NumWorkers = Annotated[
    int, typer.Option("--workers", min=1, help="Processes behind the port, an engine in each")
]
Name = Annotated[
    str | None, typer.Option("--name", help="The model's id", show_default="the bundle's name")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        metavar="NAME",
        help="Environment variable with the key that clients have to send",
        show_default="no key",
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="A further name by which requests may address the server; repeatable",
        show_default="on loopback its names, elsewhere any",
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        help="A site whose scripts may ask from browsers, such as https://chat.example; repeatable",
        show_default="none",
    ),
]
MapWeights = Annotated[
    bool | None,
    typer.Option(
        "--map-weights/--no-map-weights",
        help=declared(LoadOptions)["map_weights"].option.help,
        show_default="with several workers on the CPU",
    ),
]


@with_flags(limits=Flags(ServerLimits), loading=options.loading("strict", "memory", "map_weights"))
def command(
    limits: dict[str, Any],
    loading: dict[str, Any],
    bundle: BundleArgument = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    workers: NumWorkers = 1,
    name: Name = None,
    api_key_env: ApiKeyEnv = None,
    allow_host: AllowHost = None,
    cors_origin: CorsOrigin = None,
    map_weights: MapWeights = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs, and a page to look at."""
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.machine import default_threads
    from spec_runtime.serving import processes

    folder = bundle or bundles.find()
    manifest = bundles.read(folder).manifest
    is_loopback = plain_host(host) in LOOPBACK
    hosts = (*(LOOPBACK if is_loopback else ()), *(allow_host or ()))
    settings = Settings(
        name=name or manifest.name,
        api_key=None if api_key_env is None else key_from(api_key_env),
        hosts=hosts or None,
        cors_origins=tuple(cors_origin or ()),
        **limits,
    )
    if loading["threads"] is None and workers > 1:
        loading["threads"] = max(1, default_threads() // workers)
    if map_weights is None:
        map_weights = workers > 1 and loading["backend"] == "onnxruntime"
    # verify False: it was, above
    arguments = {"path": str(folder), "verify": False, "map_weights": map_weights, **loading}
    served = processes.ServedBundle(arguments, settings)
    with processes.bind(host, port) as bound:
        what = f"{settings.name} on {processes.url(bound)}"
        if not is_loopback and settings.api_key is None:
            what += ", for everybody who reaches it: no --api-key-env was given"

        def say(how: str) -> None:
            print(f"{how} {what}{served.lanes}", file=sys.stderr, flush=True)

        if workers == 1:
            processes.serve(served, bound, lambda: say("serving"))
        else:
            say(f"starting {workers} processes that serve")
            processes.serve_by_workers(served, bound, workers)
