"""Declares the options that verbs share, opens the engine they name and delivers their results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from spec_runtime.cli.flags import Flags, whole
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json
from spec_runtime.files.writing import write_atomically
from spec_runtime.load import LoadOptions
from spec_runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult


def drafter_names(bundle: Path | None) -> list[str]:
    """Returns the drafters of a bundle, or of the newest under ./bundles; the built-in ones last.

    Leaves the bundle's own out if it cannot be read.
    """
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.load import drafter_names as names_in
    from spec_runtime.proposers import BUILT_IN

    try:
        return names_in(bundles.read(bundle or bundles.find(), verify=False).manifest)
    except (OSError, ValueError):  # who opens it will say what is wrong with it
        return [*BUILT_IN]


def _complete_drafter(context: typer.Context) -> list[str]:
    bundle = context.params.get("bundle")
    return drafter_names(Path(bundle[0]) if isinstance(bundle, list) else bundle)


Bundle = Annotated[
    Path | None,
    typer.Option("--bundle", help="Bundle folder", show_default="the newest under ./bundles"),
]


def loading(*left_out: str, only: tuple[str, ...] | None = None, **defaults: Any) -> Flags:
    """Returns the flags of the options of `load`, without some that a command has no use for."""
    never = ("verify", *left_out)
    return Flags(LoadOptions, never, only, defaults, {"drafter": _complete_drafter})


def sampling(*left_out: str, only: tuple[str, ...] | None = None, **defaults: Any) -> Flags:
    """Returns the flags of the options of sampling, without some."""
    return Flags(SamplingParams, left_out, only, defaults)


Prompts = Annotated[
    Path, typer.Option("--prompts", help="JSON Lines: turns (Spec-Bench), prompt or messages")
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Number of prompts in all, evenly over categories"),
]
Out = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here")]
ShowAccepted = Annotated[
    bool,
    typer.Option(
        "--show-accepted",
        help="Colour the tokens the drafter guessed, by depth: green the first, then cyan, blue, "
        "magenta",
    ),
]
ControlTokens = Annotated[
    bool,
    typer.Option(
        "--control-tokens",
        help="Names of control tokens in the text, such as <|im_end|>, become these tokens",
    ),
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--template-kwargs",
        metavar="JSON",
        help='Further variables of the chat template, such as {"enable_thinking": false}',
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        help="System prompt",
        callback=lambda text: text and whole(text, "a system prompt"),
    ),
]


def template_kwargs(text: str | None) -> dict[str, Any] | None:
    """Returns the variables that `--template-kwargs` gives. Raises UserError for text that is no
    JSON; the chat template itself says which names it reads."""
    try:
        variables: dict[str, Any] | None = None if text is None else parse_json(text)
    except ValueError as error:
        raise UserError(
            f"got --template-kwargs {brief(text, 80)} ({brief(error, 80)}), expected a JSON object"
        ) from None
    return variables


def open_engine(bundle: Path | None, loading: dict[str, Any]) -> "Engine":
    """Opens an engine over ``bundle``, or over the newest bundle under ./bundles."""
    import spec_runtime
    from spec_runtime.bundle.manifest import find

    return spec_runtime.load(bundle or find(), **loading)


def standard_input() -> TextIO:
    """Returns standard input. Raises UserError if the caller closed it (`<&-`)."""
    if sys.stdin is None:
        raise UserError("got no standard input (it is closed), expected text there; open it")
    return sys.stdin


def write_figures(out: Path, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, atomically."""
    write_atomically(out, json.dumps(figures, indent=2) + "\n")


def deliver(out: Path | None, figures: dict[str, Any], show: Callable[[], None]) -> None:
    """Writes the figures to `out`, if that is given, and then prints them by `show`.

    Whatever goes wrong with one of the two, the other is done: a measurement is not lost because a
    disk is full or a table cannot be drawn.
    """
    try:
        if out is not None:
            write_figures(out, figures)
    finally:
        show()


def counted_threads(threads: int | None) -> str:
    """Returns how many threads an engine has, None for as many as this process may use."""
    from spec_runtime.files.machine import default_threads

    number = threads or default_threads()
    return f"{number} threads" if number > 1 else "1 thread"


def summary_line(result: "GenerationResult", loading: dict[str, Any] | None = None) -> str:
    """Returns one line that says how much was generated, how fast, and why it ended; also by how
    many threads and which native operators, if the options of `load` are given and they are those
    of a CPU."""
    from spec_runtime.kernels.library import instructions

    stats = result.stats
    caveat = "" if result.preserves_distribution else "; not the target's distribution"
    pauses = ""  # where drafts found or won little
    if 0 < stats.drafted_steps < stats.steps / 2:
        pauses = f" (drafts in {stats.drafted_steps} of {stats.steps} steps)"
    threads = ""
    if loading is not None and loading["backend"] == "onnxruntime":
        native = f" with {name}" if (name := instructions()) else ""
        threads = f"{counted_threads(loading['threads'])}{native}, "
    return (
        f"{len(result.token_ids)} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"accepted length {stats.accepted_length:.2f}{pauses}, "
        f"prefill {stats.prefill_seconds:.2f} s, {threads}"
        f"finished by {result.finish_reason}{caveat}"
    )
