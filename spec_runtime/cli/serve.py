"""Implements spec-runtime serve: OpenAI's API and a page, over HTTP."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from spec_runtime.cli import options


def command(
    bundle: Annotated[
        Path | None,
        typer.Argument(help="Bundle folder", show_default="the newest under ./bundles"),
    ] = None,
    drafter: options.Drafter = None,
    lookup: options.Lookup = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 is any free one")
    ] = 8000,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes behind the port, an engine in each")
    ] = 1,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The model's id", show_default="the bundle's name"),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="NAME",
            help="Environment variable with the key that clients have to send",
            show_default="no key",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A further name by which requests may address the server; repeatable",
            show_default="on loopback its names, elsewhere any",
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, help="Requests that wait; more get 429")
    ] = 32,
    max_streams: Annotated[
        int, typer.Option("--max-streams", min=1, help="Streams open at a time; more get 429")
    ] = 64,
    max_body: Annotated[
        int, typer.Option("--max-body", min=1, help="Bytes of a request; larger ones get 413")
    ] = 1 << 20,
    max_prompt: Annotated[
        int | None,
        typer.Option(
            "--max-prompt", min=1, help="Tokens of a prompt", show_default="the bundle's context"
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds of a request, its wait included")
    ] = 300.0,
    grace: Annotated[
        float,
        typer.Option("--grace", min=0, help="Seconds to finish running answers at a stop"),
    ] = 60.0,
    threads: options.Threads = None,
    backend: options.Backend = "onnxruntime",
    fused: options.Fused = None,
    cuda_graphs: options.CudaGraphs = True,
    profile: options.Profile = True,
) -> None:
    """Serve OpenAI's API, and a page to look at."""
    from spec_runtime import bundle as bundles
    from spec_runtime.backends.threads import default_threads
    from spec_runtime.serving import processes
    from spec_runtime.serving.settings import LOOPBACK, Settings

    folder = bundle or bundles.find()
    manifest = bundles.read(folder).manifest
    hosts = (*LOOPBACK, *(allow_host or ())) if host in LOOPBACK else tuple(allow_host or ())
    settings = Settings(
        name=name or manifest.name,
        family=manifest.target.family,
        max_waiting=max_waiting,
        max_streams=max_streams,
        max_body=max_body,
        max_prompt=max_prompt,
        timeout=timeout,
        api_key=None if api_key_env is None else _key(api_key_env),
        hosts=hosts or None,
    )
    if threads is None and workers > 1:
        threads = max(1, default_threads() // workers)
    arguments = {
        "path": str(folder),
        "drafter": drafter,
        "threads": threads,
        "verify": False,  # it was, above
        "lookup": lookup,
        "profile": profile,
        "backend": backend,
        "fused": fused,
        "cuda_graphs": cuda_graphs,
    }
    served = processes.ServedBundle(arguments, settings)
    with processes.bind(host, port) as bound:
        line = f"serving {settings.name} on {processes.url(bound)}"
        if host not in LOOPBACK and settings.api_key is None:
            line += ", for everybody who reaches it: no --api-key-env was given"
        if workers == 1:
            processes.serve(served, bound, grace, lambda: print(line, file=sys.stderr, flush=True))
        else:
            print(f"{line}, by {workers} processes", file=sys.stderr, flush=True)
            processes.serve_by_workers(served, bound, grace, workers)


def _key(variable: str) -> str:
    """Returns the API key in an environment variable. Raises ValueError if there is none."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"got --api-key-env {variable}, expected an environment variable with a key; set it"
        )
    return key
