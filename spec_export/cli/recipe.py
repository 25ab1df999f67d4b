"""Defines `spec-export recipe`, which writes a recipe for a model and says what it takes."""

from pathlib import Path
from typing import Annotated

import typer

from spec_export.cli.options import Base, Model
from spec_runtime.cli import next_command
from spec_runtime.cli.terminal import Console, visible


def command(
    model: Model = None,
    base: Base = None,
    drafter: Annotated[
        str, typer.Option("--drafter", help="Name of the drafter to train")
    ] = "parallelspec",
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            help="JSON Lines of the target's answers; repeatable",
            show_default="answers.jsonl, still to be distilled",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=1,
            help="Tokens that there will be, without --data",
            show_default="5 million, for GPUs 140 million",
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=0, help="GPUs to train on; 0 is this processor")
    ] = 0,
    out: Annotated[Path, typer.Option("--out", help="File of the recipe")] = Path("recipe.toml"),
    list_: Annotated[
        bool, typer.Option("--list", help="List the shipped recipes, which train takes by name")
    ] = False,
) -> None:
    """Write a complete recipe for a model, and say what it takes before anything runs.

    Reads no weights. Hours, memory and disk are estimates, each with its arithmetic.
    """
    from spec_export.training import recipe

    console = Console()
    if list_:
        for name, file in recipe.shipped().items():
            head = file.read_text(encoding="utf-8").splitlines()[0]
            console.print(f"{name:38} {head.removeprefix('# ')}", soft_wrap=True)
        return

    from spec_export.training import inputs

    inputs.require_new(drafter, out, data or ())  # before torch is imported

    from spec_export.training import new_recipe

    _, notes, found = new_recipe.write(out, drafter, model, base, data or (), gpus, tokens)
    for note in notes:
        console.print(visible(note), soft_wrap=True)
    console.print("\nestimates, nothing has run yet:")
    for what, value, arithmetic in found:
        console.print(f"{what:36} {value:>20}  = {arithmetic}", soft_wrap=True)
    if data:
        next_command.say("recipe", out)
    else:
        next_command.say("prompts", out.parent / "answers.jsonl", model, base, made=out)
