"""Defines `spec-export check`, which compares exported graphs with the Hugging Face model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from spec_export.cli.options import Base, Model, Precision
from spec_runtime.cli.options import Out, deliver
from spec_runtime.cli.terminal import Console, visible

if TYPE_CHECKING:
    from spec_export.check.check import CheckResult


def command(
    model: Model = None,
    base: Base = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Bundle to check", show_default="a fresh export")
    ] = None,
    precision: Annotated[
        list[Precision] | None,
        typer.Option(
            "--precision", help="Precision of the fresh export; repeatable", show_default="fp32"
        ),
    ] = None,
    drafter_checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            "--drafter-checkpoint",
            help="Folder that a drafter was built from, to compare its fusion of taps; repeatable",
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Check an export against the model it was made from; exits with 1 if a bound is missed."""
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.files.writing import require_writable

    if out is not None:
        require_writable(out)
    if bundle is not None:
        bundles.read(bundle, verify=False)  # before torch is imported

    from spec_export.check import check
    from spec_export.cli.report import TerminalReport

    precisions = [each.value for each in precision or [Precision.fp32]]
    result = check.run(
        model, bundle, precisions, TerminalReport(), base=base, checkpoints=drafter_checkpoint or ()
    )
    deliver(out, result.as_json(), lambda: Console().print(_table(result)))
    result.store_accepted_lengths()
    if not result.passed:
        raise typer.Exit(1)


def _table(result: "CheckResult") -> Table:
    """Returns the rows as a table with a verdict for each."""
    table = Table(
        title=f"{visible(result.model)}: exported graphs against transformers in float32",
        caption="chunks to context: difference of logits over a row's range, of the worst row at "
        "fp32, of the mean row elsewhere",
    )
    for head in ("check", "precision", "value", "bound", "", "note"):
        table.add_column(head, justify="right" if head in ("value", "bound") else "left")
    rows = result.rows
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        verdict = Text("FAILED", "red")
        if row.skipped:
            verdict = Text("skipped", "yellow")
        elif row.passed:
            verdict = Text("" if row.bound is None else "ok", "green")
        table.add_row(
            row.name,
            row.precision,
            "" if row.value is None else f"{row.value:.4g}",
            "" if row.bound is None else f"{row.bound:g}",
            verdict,
            row.note,
            end_section=after is None or after.precision != row.precision,
        )
    return table
