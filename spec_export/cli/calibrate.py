"""Defines `spec-export calibrate`, which measures how well a bundle's drafters guess."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spec_runtime.cli import next_command, options
from spec_runtime.cli.flags import with_flags
from spec_runtime.cli.terminal import Console


@with_flags(
    loading=options.loading(only=("threads",)),
    length=options.sampling(only=("max_new_tokens",), max_new_tokens=128),
)
def command(
    loading: dict[str, Any],
    length: dict[str, Any],
    bundle: options.Bundle = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="JSON Lines of prompts, as spec-runtime bench reads them",
            show_default="the sixteen shipped ones",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", help="Name of the bundle's drafter to measure", show_default="all of them"
        ),
    ] = None,
) -> None:
    """Measure how often a drafter's guesses are right, and store it in the bundle's manifest.

    The accuracies by depth and rank shape the trees that the runtime grows and tunes.
    """
    from spec_export.check import calibrate
    from spec_export.cli.report import TerminalReport
    from spec_runtime.bundle.manifest import find

    folder = bundle or find()
    calibrate.run(
        folder,
        prompts,
        drafter,
        length["max_new_tokens"],
        loading["threads"],
        TerminalReport(),
        lambda *found: Console().print(_accuracy_table(*found), _length_table(found[1])),
    )
    next_command.say("calibrate", folder)


def _accuracy_table(name: str, calibration: dict[str, Any]) -> Table:
    """Returns a table of how often the target's token is among the best guesses, by depth."""
    table = Table(
        title=f"{name}: target's token among the guesses, {calibration['positions']} positions of "
        f"{calibration['prompts']} answers"
    )
    rows = calibration["accuracy"]
    tops = sorted({min(top, len(rows[0])) for top in (1, 3, 5, len(rows[0]))})
    for head in ("depth", *(f"top {top}" for top in tops)):
        table.add_column(head, justify="right")
    for depth, row in enumerate(rows, 1):
        table.add_row(str(depth), *(f"{sum(row[:top]):.3f}" for top in tops))
    return table


def _length_table(calibration: dict[str, Any]) -> Table:
    """Returns a table of the accepted length by the number of a tree's nodes."""
    from spec_runtime.trees.templates import expected_accepted_length, searched

    accuracy = calibration["accuracy"]
    table = Table(title="accepted length by nodes of a tree, root included")
    for head in ("nodes", "grown by path probability", "static, searched (expected)"):
        table.add_column(head, justify="right")
    for nodes, length in calibration["accepted_length"].items():
        expected = expected_accepted_length(searched(accuracy, int(nodes)), accuracy)
        table.add_row(nodes, f"{length:.2f}", f"{expected:.2f}")
    return table
