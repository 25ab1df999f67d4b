"""Says what an option is: one sentence of help in the annotation of a dataclass' field.

A declaration is such a dataclass. The flags of commands, the fields of HTTP requests and the tables
of the reference are made from it, so that an option is said once.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Option:
    """Describes an option, next to its type and bounds: `Annotated[int, Ge(1), Option("Threads")]`.

    `help` is one sentence. `unset` says what the default does, where its value does not. `flag`
    names the flag on command lines, where that is not the field's name, and `metavar` its value.
    """

    help: str
    unset: str | None = None
    flag: str | None = None
    metavar: str | None = None


class Declared(NamedTuple):
    """One option of a declaration: its name, its annotation, what it takes apart from None, its
    default, and its description."""

    name: str
    annotation: Any
    kind: Any
    is_optional: bool
    default: Any
    option: Option


def declared(declaration: type) -> dict[str, Declared]:
    """Returns the options of a dataclass by name: its fields that are annotated with an Option."""
    hints = typing.get_type_hints(declaration, include_extras=True)
    found = {}
    for field in dataclasses.fields(typing.cast(Any, declaration)):
        hint = hints[field.name]
        options = [each for each in typing.get_args(hint) if isinstance(each, Option)]
        if not options:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        members = members_of(hint)
        kinds = [each for each in members if each is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else typing.Union[tuple(kinds)]  # noqa: UP007
        found[field.name] = Declared(
            field.name, hint, kind, len(kinds) < len(members), default, options[0]
        )
    return found


def members_of(hint: Any) -> list[Any]:
    """Returns the members of a union, or the type itself, without what they are annotated with."""
    if typing.get_origin(hint) is typing.Annotated:
        return members_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for member in typing.get_args(hint) for each in members_of(member)]
    return [hint]
