"""spec-export check: compares the exported graphs with the Hugging Face model."""

from pathlib import Path
from typing import Annotated

import typer

from spec_export.cli.options import Model, Precision


def command(
    model: Model = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Check this one", show_default="a fresh export")
    ] = None,
    precision: Annotated[
        list[Precision] | None,
        typer.Option("--precision", help="May be repeated", show_default="fp32"),
    ] = None,
) -> None:
    """Check an export against the model it came from; exit code 1 where a bound is missed."""
    from spec_export import check

    rows = check.run(model, bundle, [each.value for each in precision or [Precision.fp32]])
    if not all(row.passed for row in rows):
        raise typer.Exit(1)
