"""Makes the flags of a command from the declaration of its options."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

import typer

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief
from spec_runtime.options import Declared, declared, members_of


@dataclass(frozen=True)
class Flags:
    """Says which options of a declaration are flags of a command: all but those left out, or `only`
    some. `defaults` are the command's own."""

    declaration: type
    leave_out: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    completions: Mapping[str, Callable[..., list[str]]] = field(default_factory=dict)

    def options(self) -> dict[str, Declared]:
        """Returns the options by name, with the command's defaults."""
        return {
            name: option._replace(default=self.defaults.get(name, option.default))
            for name, option in declared(self.declaration).items()
            if name not in self.leave_out and (self.only is None or name in self.only)
        }


def with_flags(**groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command flags in place of its parameters of these names, which then get a dictionary
    of the options' values. The flags come after the command's own.

    What the declaration refuses is refused before the command begins.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        found = {group: flags.options() for group, flags in groups.items()}
        own = inspect.signature(command).parameters
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            each.replace(kind=keyword) for name, each in own.items() if name not in groups
        ]
        for group, options in found.items():
            completions = groups[group].completions
            parameters += [_parameter(option, completions) for option in options.values()]

        def run(**given: Any) -> None:
            for group, options in found.items():
                values = {name: _value(each, given.pop(name)) for name, each in options.items()}
                groups[group].declaration(**values)
                given[group] = values
            command(**given)

        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameter(option: Declared, completions: Mapping[str, Any]) -> inspect.Parameter:
    """Returns the parameter from which typer makes the option's flag."""
    about, item = option.option, _item_type(option)
    plain = option.name.replace("_", "-")
    flag = about.flag or f"--{plain}"
    kind: Any = option.kind
    default = option.default
    if kind is bool and (option.is_optional or default):
        flag += f"/--no-{plain}"
    if item is not None:  # repeated, or joined by commas
        kind, default = (str if "," in (about.metavar or "") else GenericAlias(list, (item,))), None
    typed = typer.Option(
        flag,
        help=about.help,
        metavar=about.metavar,
        show_default=about.unset or True,
        autocompletion=completions.get(option.name),
    )
    annotation: Any = Annotated[kind | None if default is None else kind, typed]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option.name, keyword, default=default, annotation=annotation)


def _item_type(option: Declared) -> type | None:
    """Returns the type of an option's items, None for one that has a single value."""
    for member in members_of(option.kind):
        if get_origin(member) is list:
            found: type = members_of(get_args(member)[0])[0]
            return found
    return str if option.option.metavar == "ID=VALUE" else None


def _value(option: Declared, given: Any) -> Any:
    """Returns the value of an option from what was typed."""
    flag = option.option.flag or f"--{option.name.replace('_', '-')}"
    if given is None:
        return option.default
    if option.option.metavar == "ID=VALUE":
        return dict(_pair(flag, entry) for entry in given)
    if _item_type(option) is int and isinstance(given, str):
        return _numbers(flag, given)
    for text in given if isinstance(given, list) else ():
        if isinstance(text, str):
            whole(text, f"a {flag} text")
    return given


def _pair(flag: str, entry: str) -> tuple[int, float]:
    """Parses "42=-5" as (42, -5.0)."""
    token, _, value = entry.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UserError(f"got {flag} {brief(entry, 80)}, expected ID=VALUE, as in 42=-5") from None


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """Parses "3,2,1" as (3, 2, 1)."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"got {flag} {brief(text, 80)}, expected numbers, as in 3,2,1") from None


def whole(text: str, what: str) -> str:
    """Returns `text`. Raises UserError if it has a half surrogate, which no tokenizer takes.

    Python keeps bytes of the command line and of standard input that are not UTF-8 as such halves.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"got {what} whose character {error.start + 1} is not UTF-8, expected text in UTF-8; "
            "convert it, or set PYTHONUTF8=1"
        ) from None
    return text
