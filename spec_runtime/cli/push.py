"""Implements spec-runtime push: sends a bundle to a Hugging Face hub."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from spec_runtime.cli.terminal import Console, visible


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The bundle")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The hub's repository")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a repository that only its members see")
    ] = False,
) -> None:
    """Send a bundle to a Hugging Face hub, in one commit."""
    from spec_runtime.hub import push

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    Console().print(visible(push.push(folder, repository, private)), soft_wrap=True)
