"""Defines `spec-export train`, which trains the drafter that a recipe describes."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from spec_runtime.cli import next_command


def command(
    recipe: Annotated[
        Path,
        typer.Argument(help="A TOML recipe, or a shipped one's name: spec-export recipe --list"),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override one value of the recipe, such as train.lr=3e-4; repeatable",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Checkpoint folder", show_default="runs/ and the recipe"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            help="Folder of cached features, which recipes may share",
            show_default="in --out",
        ),
    ] = None,
    init: Annotated[
        Path | None, typer.Option("--init", help="Start from this drafter's weights")
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track",
            metavar="NAME",
            help="Send the curves to a tracker: tensorboard (events in --out), wandb or mlflow; "
            "repeatable",
        ),
    ] = None,
) -> None:
    """Train a drafter and write its checkpoints, its curves and its accuracy per position."""
    from spec_export.training import inputs

    # before torch is imported
    plan, run = inputs.read(recipe, set_ or [], out, resume, init, track or ())

    from spec_export.cli.report import TerminalReport
    from spec_export.training import run as train

    def drafts(*given: Any) -> float:
        from spec_export.check.drafting import accepted_length  # few runs need the graphs

        return accepted_length(*given)

    report = TerminalReport()
    train.run(recipe, set_ or [], out, resume, cache, init, track or (), report, drafts)
    if not int(os.environ.get("RANK", 0)):
        merged = None if plan.joint is None else str(run / "target")
        next_command.say("train", run, merged or plan.model, None if merged else plan.base)
