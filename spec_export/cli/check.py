"""Defines `spec-export check`, which compares exported graphs with the Hugging Face model."""

from pathlib import Path
from typing import Annotated

import typer

from spec_export.cli.options import Model, Precision
from spec_runtime.cli.options import Out


def command(
    model: Model = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Bundle to check", show_default="a fresh export")
    ] = None,
    precision: Annotated[
        list[Precision] | None,
        typer.Option(
            "--precision", help="Precision of the fresh export; repeatable", show_default="fp32"
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Check an export against the model it was made from; exits with 1 if a bound is missed."""
    from spec_export import check

    precisions = [each.value for each in precision or [Precision.fp32]]
    rows = check.run(model, bundle, precisions, out)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)
