"""Defines `spec-export export`, which writes a drafter of ours as other libraries read it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from spec_export.cli.options import Target


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Folder of an eagle3, peagle, dflash or medusa drafter, or a shipped one's name"
        ),
    ],
    form: Annotated[
        Literal["speculators", "native", "vllm-medusa"],
        typer.Option(
            "--format",
            help="speculators (vLLM) for eagle3, peagle and dflash, vllm-medusa for medusa, native "
            "(their authors) for eagle3 and medusa",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="A new folder")],
    target: Target = None,
) -> None:
    """Write a drafter in a form that other libraries read.

    What the form cannot say is an error that names it.
    """
    from spec_export.cli.report import TerminalReport
    from spec_export.imports.drafters.exporter import run

    print(run(checkpoint, form, target, out, TerminalReport()))
