"""Writes the typed keyword arguments of `load` and of an engine's calls from their declarations.

A type checker reads source, so these TypedDicts have to stand there; a test compares them.

    python -m tools.docs.typed_arguments
"""

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

from spec_runtime.load import LoadOptions
from spec_runtime.loop.options import Request
from spec_runtime.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
# The file with the TypedDict, its name, and the declaration that it is made from.
WRITTEN: tuple[tuple[str, str, type], ...] = (
    ("spec_runtime/sampling/params.py", "SamplingOptions", SamplingParams),
    ("spec_runtime/loop/options.py", "CallOptions", Request),
    ("spec_runtime/load.py", "LoadArguments", LoadOptions),
)
NAMED = ("drafter", "threads")  # arguments of `load` by themselves, which also go by their place
MARKER = "    # made by tools/docs/typed_arguments.py\n"


def keys(declaration: type) -> str:
    """Returns the lines of a TypedDict with a key for each field of the declaration.

    Example: a field `top_k: Annotated[int | None, Ge(1)]` makes the line "    top_k: int | None".
    """
    hints = typing.get_type_hints(declaration)
    fields = [
        each
        for each in dataclasses.fields(typing.cast(Any, declaration))
        if declaration is not LoadOptions or each.name not in NAMED
    ]
    return "".join(f"    {each.name}: {_text(hints[each.name])}\n" for each in fields)


def _text(hint: Any) -> str:
    """Returns an annotation as source: with the names that the files import."""
    if typing.get_origin(hint) is typing.Union:
        return " | ".join(_text(each) for each in typing.get_args(hint))
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else repr(hint)
    text = re.sub(r"collections\.abc\.Callable\[.*\](?= \||$)", "LogitsProcessor", text)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text).replace("Event", "threading.Event")


def rewritten(text: str, name: str, declaration: type) -> str:
    """Returns the source of a file with the keys of its TypedDict `name` made anew."""
    pattern = rf"(class {name}\(.*?{re.escape(MARKER)}).*?(?=\n\n)"
    changed, count = re.subn(
        pattern, lambda found: found[1] + keys(declaration).rstrip("\n"), text, flags=re.S
    )
    assert count == 1, f"{name} has no marker"
    return changed


def main() -> None:
    for file, name, declaration in WRITTEN:
        path = ROOT / file
        path.write_text(rewritten(path.read_text(), name, declaration))


if __name__ == "__main__":
    main()
