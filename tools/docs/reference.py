"""Writes reference pages from the code: commands and the manifest's schema."""

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import typer
from annotated_types import Ge, Gt, Le, Lt

from spec_runtime.options import declared

# ---- commands


def commands(package: str) -> str:
    """Returns Markdown for every verb of `package` ("spec_runtime"): usage, help, options."""
    program = package.replace("_", "-")
    cli = importlib.import_module(f"{package}.cli")
    parts = []
    for verb in cli.VERBS:
        module = importlib.import_module(f"{package}.cli.{verb}")
        app = typer.Typer(add_completion=False)
        app.callback()(lambda: None)
        app.command(verb)(module.command)
        command: Any = typing.cast(Any, typer.main.get_command(app)).commands[verb]
        arguments = [each for each in command.params if not _is_option(each)]
        options = [each for each in command.params if _is_option(each) and each.name != "help"]
        names = " ".join(f"[{each.name.upper()}]" for each in arguments)
        parts += [
            f"## {program} {verb}",
            f"```text\n{' '.join(filter(None, (program, verb, '[OPTIONS]', names)))}\n```",
            " ".join((command.help or "").split()),
        ]
        rows = [f"| `{each.name.upper()}` | {_sentence(each)} |" for each in arguments] + [
            f"| {_flags(each)} | {_sentence(each)} |" for each in options
        ]
        parts.append("| option | what it does |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _is_option(parameter: Any) -> bool:
    return parameter.param_type_name == "option"


def _flags(option: Any) -> str:
    flags = "/".join([*option.opts, *option.secondary_opts])
    takes = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return f"`{flags}{takes}`"


def _sentence(parameter: Any) -> str:
    help_ = (parameter.help or "").replace("|", "\\|")
    shown = getattr(parameter, "show_default", None)
    if getattr(parameter, "required", False):
        return f"{help_} (required)"
    if isinstance(shown, str):
        return f"{help_} (default: {shown})"
    default = parameter.default
    default = getattr(default, "value", default)
    if default in (None, False, True, "") or default == []:
        return help_
    return f"{help_} (default: {default})"


# ---- options that are declared


def options(declaration: type) -> str:
    """Returns a table of the options of a declaration, such as LoadOptions: type, bounds, help."""
    rows = []
    for name, each in declared(declaration).items():
        takes = " ".join([_type(_plain(each.annotation)), *_bounds(each.annotation)])
        unset = each.option.unset or f"`{each.default!r}`"
        rows.append(f"| `{name}` | {takes} | {unset} | {each.option.help} |")
    head = "| option | takes | if left out | what it does |\n|---|---|---|---|\n"
    return head + "\n".join(rows)


def _plain(hint: Any) -> Any:
    """Returns a type without what it is annotated with."""
    return typing.get_type_hints(types.SimpleNamespace(__annotations__={"of": hint}))["of"]


def _bounds(hint: Any) -> Iterator[str]:
    """Yields the bounds in an annotation: "≥ 1"."""
    signs = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
    for part in _parts(hint):
        for kind, sign in signs.items():
            if isinstance(part, kind):
                yield f"{sign} {getattr(part, kind.__name__.lower()):g}"


# ---- the manifest


def manifest() -> str:
    """Returns Markdown for each dataclass of the manifest: its docstring and its keys."""
    from spec_runtime.bundle import manifest as bundle

    order: list[type] = []

    def walk(cls: type) -> None:
        if cls in order:
            return
        order.append(cls)
        for hint in typing.get_type_hints(cls).values():
            for part in _parts(hint):
                if dataclasses.is_dataclass(part):
                    walk(typing.cast(type, part))

    walk(bundle.Manifest)
    parts = []
    for cls in order:
        hints = typing.get_type_hints(cls)
        rows = []
        for field in dataclasses.fields(typing.cast(Any, cls)):
            missing = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            rows.append(f"| `{field.name}` | {_type(hints[field.name])} | {missing} |")
        doc = inspect.cleandoc(cls.__doc__ or "").replace("[", "\\[")  # indices are no links
        parts += [
            f"## {cls.__name__}",
            doc,
            "| key | type | if left out |\n|---|---|---|\n" + "\n".join(rows),
        ]
    return "\n\n".join(parts)


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for each in typing.get_args(hint):
        yield from _parts(each)


def _type(hint: Any) -> str:
    """Names a type in the words of JSON."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "anything"
    if dataclasses.is_dataclass(hint):
        name = typing.cast(type, hint).__name__
        return f"[{name}](#{name.lower()})"
    if origin is dict:
        return f"object of {_type(args[1])}"
    if origin is tuple:
        return f"list of {_type(args[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if each is type(None) else _type(each) for each in args)
    return {str: "string", int: "integer", float: "number", bool: "true or false"}.get(
        hint, str(hint)
    )
