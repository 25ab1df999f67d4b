"""Implements the spec-runtime command: finds the verb and imports its module only.

How a command ends is in boundary.py. What a verb does is in the file of its name.
``spec_export.cli`` runs through the same ``run``.
"""

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from spec_runtime.cli import boundary, completion
from spec_runtime.cli.terminal import WordStream, visible

VERBS = ("generate", "chat", "serve", "bench", "audit", "tune", "show", "pull", "push")


def main(argv: Sequence[str] | None = None) -> None:
    """Generate text from a bundle by speculative decoding."""
    run("spec-runtime", __name__, VERBS, main.__doc__, argv)


def run(
    program: str,
    package: str,
    verbs: Sequence[str],
    summary: str | None,
    argv: Sequence[str] | None,
) -> None:
    """Runs one verb of ``package`` and raises SystemExit with the exit code, see boundary.py.

    Imports the verb's own module only; all of them for ``--help`` or an unknown verb.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    boundary.end([program, *arguments], lambda: _run(program, package, verbs, summary, arguments))


def _run(
    program: str, package: str, verbs: Sequence[str], summary: str | None, arguments: list[str]
) -> int:
    """Does what `run` says; returns the exit code."""
    app = typer.Typer(name=program, help=summary, add_completion=False)
    # The callback also keeps typer from dropping the verb when there is only one.
    app.callback()(_own_options(program))
    typed = completion.typed_words(program, os.environ)
    first = (arguments if typed is None else typed)[:1]
    for verb in [verb for verb in verbs if verb in first] or verbs:
        module = importlib.import_module(f"{package}.{verb}")
        app.command(verb)(module.command)
    warnings = logging.StreamHandler(WordStream(is_error=True))
    warnings.setFormatter(_OneLine())
    logging.getLogger("spec_runtime").handlers = [warnings]
    logging.getLogger("spec_runtime").setLevel(logging.INFO)
    # typer's own way to run an app would catch some exceptions and word some errors itself.
    command = typer.main.get_command(app)
    if typed is not None:
        completion.complete(command, program)
    try:
        with command.make_context(program, list(arguments) or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code if arguments else boundary.REFUSED
    return 0


def _own_options(program: str) -> Callable[..., None]:
    """Returns the function whose parameters are the options of the program, before any verb."""

    def show_version(is_asked: bool) -> None:
        if is_asked:
            print(f"{program} {version()}")
            raise typer.Exit

    def show_completion(shell: completion.Shell | None) -> None:
        if shell is not None:
            print(completion.script(program, shell))
            raise typer.Exit

    def own_options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", help="Print the version", callback=show_version, is_eager=True
            ),
        ] = False,
        completion_for: Annotated[
            completion.Shell | None,
            typer.Option(
                "--show-completion",
                help="Print the script that completes command lines in this shell",
                callback=show_completion,
                is_eager=True,
            ),
        ] = None,
    ) -> None:
        pass

    return own_options


def version() -> str:
    """Returns the version of specsplit, as it was installed."""
    try:
        return importlib.metadata.version("specsplit")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from a checkout)"


class _OneLine(logging.Formatter):
    """Makes one line of a warning or note, which begins anew wherever the streamed text stands."""

    def format(self, record: logging.LogRecord) -> str:
        kind = "warning" if record.levelno >= logging.WARNING else "note"
        return f"\n{kind}: {visible(record.getMessage())}"
