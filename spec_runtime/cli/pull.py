"""Implements spec-runtime pull: fetches a bundle from a Hugging Face hub."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from spec_runtime.cli.terminal import Console, visible


def command(
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The hub's repository")],
    revision: Annotated[
        str | None,
        typer.Option("--revision", help="Branch, tag or commit", show_default="the hub's main"),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FOLDER", help="Where the bundle goes", show_default="bundles/NAME"
        ),
    ] = None,
) -> None:
    """Fetch a bundle from a Hugging Face hub, with every hash checked."""
    from spec_runtime.hub import pull

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    named: set[str] = set()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(visible(repository), total=None)

        def show(state: pull.Progress) -> None:
            file = visible(state.file)
            progress.update(task, description=file, completed=state.done, total=state.total)
            if not console.is_terminal and file not in named:  # one line a file
                named.add(file)
                console.print(file, soft_wrap=True)

        folder = pull.pull(repository, to, revision, show)
    Console().print(visible(folder), soft_wrap=True)
