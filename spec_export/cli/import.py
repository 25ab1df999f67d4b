"""Defines `spec-export import`, which makes a drafter of ours of one that others have trained."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from spec_export.cli.options import Target
from spec_runtime.errors import UserError

Answer = Literal["yes", "no"]


def _flag(name: str, what: str) -> typer.models.OptionInfo:
    return typer.Option(name, help=what, show_default="as its files say")


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder, GGUF file or hub id of an EAGLE-3, EAGLE, DFlash or Medusa drafter"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the drafter, for build")],
    target: Target = None,
    taps: Annotated[
        str | None,
        typer.Option(
            "--taps",
            metavar="I,J,K",
            help="Target layers whose inputs it reads; the number of layers is the last's output",
            show_default="as its files say",
        ),
    ] = None,
    norm_output: Annotated[
        Answer | None, _flag("--norm-output", "Whether the next row reads the normed output")
    ] = None,
    norm_before_residual: Annotated[
        Answer | None,
        _flag("--norm-before-residual", "Whether the first layer adds to the normed state"),
    ] = None,
    alignment: Annotated[
        Literal["anchor", "fill-in"] | None,
        _flag("--alignment", "Whether row 0 of a DFlash block, its root, gives a guess"),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Measure on answers of the target whether it was read rightly")
    ] = True,
) -> None:
    """Import a drafter that another library has trained, for `build --drafter-checkpoint`.

    Says what it read and what the files leave open, and measures it; a poor one is measured in
    other readings, too.
    """
    from spec_export.cli.report import TerminalReport
    from spec_export.imports.drafters.importer import Overrides, run

    ids = None
    if taps is not None:
        try:
            ids = tuple(int(part) for part in taps.split(","))
        except ValueError:
            raise UserError(f"got --taps {taps!r:.80}, expected layers such as 2,18,33") from None
    output, residual = (
        None if each is None else each == "yes" for each in (norm_output, norm_before_residual)
    )
    overrides = Overrides(ids, output, residual, alignment)
    print(run(source, target, out, overrides, measure, TerminalReport()))
