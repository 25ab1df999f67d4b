"""Defines `spec-export add`, which adds a drafter to a bundle that is there."""

from pathlib import Path
from typing import Annotated

import typer

from spec_export.cli.options import Base, Model
from spec_runtime.cli import next_command


def command(
    bundle: Annotated[Path, typer.Option("--bundle", help="Folder of the bundle")],
    drafter_checkpoint: Annotated[
        Path,
        typer.Option(
            "--drafter-checkpoint",
            help="Folder of a training run or drafter, also another library's",
        ),
    ],
    model: Model = None,
    base: Base = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the new bundle", show_default="in its place"),
    ] = None,
) -> None:
    """Add a drafter to a bundle without exporting or quantising its target again.

    The drafter has to read states that the bundle's target gives already.
    """
    from spec_export.training import folders
    from spec_runtime.bundle import manifest as bundles

    bundles.read(bundle, verify=False)  # before torch is imported
    folders.require_drafter(drafter_checkpoint)

    from spec_export.build.add import add
    from spec_export.cli.report import TerminalReport

    folder = add(bundle, drafter_checkpoint, model, base, out, TerminalReport())
    print(folder)
    next_command.say("build", folder)
