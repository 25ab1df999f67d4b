"""Implements spec-runtime serve: OpenAI's and Anthropic's APIs and a page, over HTTP."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_runtime.cli import options
from spec_runtime.cli.flags import Flags, with_flags
from spec_runtime.errors import UnknownDrafterError, UserError
from spec_runtime.serve.settings import LOOPBACK, ServerLimits, Settings, key_from, plain_host

if TYPE_CHECKING:
    from spec_runtime.serve.processes import ServedBundle

BundleArgument = Annotated[
    Path | None,
    typer.Argument(help="Bundle folder, as --bundle", show_default="the newest under ./bundles"),
]
Bundles = Annotated[
    list[str] | None,
    typer.Option(
        "--bundle",
        metavar="[NAME=]FOLDER",
        help="Bundle folder, perhaps with the model's id; repeatable: several bundles are opened "
        "when they are first asked for",
        show_default="the newest under ./bundles",
    ),
]
MostOpen = Annotated[
    int | None,
    typer.Option(
        "--max-loaded",
        min=1,
        help="Bundles that are open at a time; the one used least recently makes room, once no "
        "request uses it",
        show_default="all",
    ),
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
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        "--model-alias",
        metavar="ALIAS[=NAME]",
        help="A further id of the model, or of the one that is called NAME; * stands for every "
        "other id; repeatable",
        show_default="none",
    ),
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
DefaultTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--default-template-kwargs",
        metavar="JSON",
        help='Variables of chat templates where a request sets none, such as {"enable_thinking": '
        "false}",
        show_default="none",
    ),
]


@with_flags(limits=Flags(ServerLimits), loading=options.loading("strict", kept_mb=None))
def command(
    limits: dict[str, Any],
    loading: dict[str, Any],
    folder: BundleArgument = None,
    bundle: Bundles = None,
    most_open: MostOpen = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    workers: NumWorkers = 1,
    name: Name = None,
    model_alias: Aliases = None,
    api_key_env: ApiKeyEnv = None,
    allow_host: AllowHost = None,
    cors_origin: CorsOrigin = None,
    default_template_kwargs: DefaultTemplateKwargs = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs, and a page to look at."""
    from spec_runtime.files.machine import default_threads
    from spec_runtime.serve import processes

    is_loopback = plain_host(host) in LOOPBACK
    hosts = (*(LOOPBACK if is_loopback else ()), *(allow_host or ()))
    if loading["threads"] is None and workers > 1:
        loading["threads"] = max(1, default_threads() // workers)
    given: list[tuple[str | None, Path]] = [] if folder is None else [(None, folder)]
    given += [_named_folder(each) for each in bundle or ()]
    found = _served(given, name, loading)
    _add_aliases(found, model_alias or ())
    settings = Settings(
        name=found[0].name,
        api_key=None if api_key_env is None else key_from(api_key_env),
        hosts=hosts or None,
        cors_origins=tuple(cors_origin or ()),
        template_kwargs=_template_kwargs(default_template_kwargs),
        **limits,
    )
    served = processes.ServedBundles(found, settings, most_open)
    with processes.bind(host, port) as bound:
        what = f"{', '.join(each.name for each in found)} on {processes.url(bound)}"
        if not is_loopback and settings.api_key is None:
            what += ", for everybody who reaches it: no --api-key-env was given"
        what += f", {options.counted_threads(loading['threads'])}"
        if workers > 1:
            what += " each"
        if len(found) > 1:
            what += " for each model that is asked for"

        def say(how: str) -> None:
            print(f"{how} {what}{served.lanes}", file=sys.stderr, flush=True)

        if workers == 1:
            processes.serve(served, bound, lambda: say("serving"))
        else:
            say(f"starting {workers} processes that serve")
            processes.serve_by_workers(served, bound, workers)


def _named_folder(given: str) -> tuple[str | None, Path]:
    """Returns the name and the folder of a --bundle; a folder may have "=" in its own name."""
    name, equals, folder = given.partition("=")
    if not equals or Path(given).exists():
        return None, Path(given)
    return name, Path(folder)


def _served(
    given: Sequence[tuple[str | None, Path]], name: str | None, loading: dict[str, Any]
) -> "list[ServedBundle]":
    """Returns what is served of these bundles, the newest under ./bundles if none is given. Raises
    UserError for names that do not tell bundles apart, and for what a bundle has not."""
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.load import drafter_names
    from spec_runtime.serve.processes import ServedBundle

    if name is not None and len(given) > 1:
        raise UserError(
            f"got --name {name} with {len(given)} bundles, expected one; name each of them as in "
            "--bundle NAME=FOLDER"
        )
    found: list[ServedBundle] = []
    for own, folder in given or [(None, bundles.find())]:
        manifest = bundles.read(folder).manifest
        names, drafter = drafter_names(manifest), loading["drafter"]
        if drafter is not None and drafter not in names:
            raise UnknownDrafterError(drafter, names)
        found.append(
            ServedBundle(
                own or name or manifest.name,
                # verify False: it was, above
                {"path": str(folder), "verify": False, **loading},
                min(manifest.target.max_length, loading["context"] or manifest.target.max_length),
                names,
            )
        )
    known = [each.name for each in found]
    for each in known:
        if known.count(each) > 1:
            raise UserError(
                f"got {known.count(each)} bundles with the name {each}, expected one; name them as "
                "in --bundle NAME=FOLDER"
            )
    return found


def _template_kwargs(text: str | None) -> dict[str, Any]:
    """Returns the variables that a JSON object names. Raises UserError for another text."""
    found = options.template_kwargs(text) if text is not None else {}
    if not isinstance(found, dict):
        raise UserError(f"got --default-template-kwargs {text!r:.80}, expected a JSON object")
    return found


def _add_aliases(bundles: "Sequence[ServedBundle]", aliases: Sequence[str]) -> None:
    """Gives bundles their aliases. Raises UserError for one that names no bundle, or two."""
    by_name = {each.name: each for each in bundles}
    taken = set(by_name)
    for given in aliases:
        alias, equals, name = given.partition("=")
        if not equals and len(bundles) == 1:
            name = bundles[0].name
        if name not in by_name or not alias or alias in taken:
            raise UserError(
                f"got --model-alias {given}, expected ALIAS=NAME with a new alias and the name of "
                f"a model: {', '.join(by_name)}"
            )
        taken.add(alias)
        by_name[name].aliases += (alias,)
