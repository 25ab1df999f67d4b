"""Completes command lines in bash, zsh and fish, with the scripts and the protocol of typer.

A shell's script calls the command again, with the line typed so far in the environment.
"""

from collections.abc import Mapping
from typing import Any, Literal

import typer
import typer.completion

Shell = Literal["bash", "zsh", "fish"]


def script(program: str, shell: Shell) -> str:
    """Returns the script that a shell has to read to complete the command lines of `program`."""
    return str(
        typer.completion.get_completion_script(
            prog_name=program, complete_var=_variable(program), shell=shell
        )
    )


def typed_words(program: str, environment: Mapping[str, str]) -> list[str] | None:
    """Returns the words after `program` that a shell wants completed; None if no shell asks."""
    if _variable(program) not in environment:
        return None
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS", "")
    return line.split()[1:]


def complete(command: Any, program: str) -> None:
    """Prints what completes the typed words, as the shell's script reads it, and exits."""
    typer.completion.get_completion_inspect_parameters()  # this makes typer know the shells
    command.main(args=[], prog_name=program, complete_var=_variable(program))


def _variable(program: str) -> str:
    """Returns the name of the variable by which a script asks: "_SPEC_RUNTIME_COMPLETE"."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE"
