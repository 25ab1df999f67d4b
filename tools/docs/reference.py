"""Writes reference pages from the code: commands, the manifest's schema, error lines."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]


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


# ---- error lines


@dataclass(frozen=True)
class Line:
    """One message that the code can raise or log: `{…}` stands for what is filled in."""

    text: str
    file: str
    place: str  # the class and function it is raised in


RAISERS = ("_require", "require")  # functions that raise their second argument
MARKER = re.compile(r"<!-- errors: (?P<selector>[^>]+) -->")


def error_lines() -> list[Line]:
    """Returns every message of both packages, in the order of their files."""
    lines: list[Line] = []
    for file in sorted([*ROOT.glob("spec_runtime/**/*.py"), *ROOT.glob("spec_export/**/*.py")]):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        reader = _Reader(file.relative_to(ROOT).as_posix(), tree)
        reader.visit(tree)
        lines += reader.lines
    return list(dict.fromkeys(lines))


class _Reader(ast.NodeVisitor):
    """Collects messages of `raise SomeError(message)`, `_require(condition, message)`, `warn`."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file = file
        self.lines: list[Line] = []
        self._place: list[str] = []
        # helpers that only word a message, such as `_unknown(name, known)`
        self._worded = {
            node.name: returned.value
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for returned in ast.walk(node)
            if isinstance(returned, ast.Return) and isinstance(returned.value, ast.JoinedStr)
        }

    def _inside(self, node: Any) -> None:
        self._place.append(node.name)
        self.generic_visit(node)
        self._place.pop()

    visit_FunctionDef = visit_ClassDef = _inside

    def _keep(self, message: ast.expr) -> None:
        if isinstance(message, ast.Call) and isinstance(message.func, ast.Name):
            message = self._worded.get(message.func.id, message)
        text = _words(message)
        if text and len(text.replace("{…}", "").strip()) > 8:
            self.lines.append(Line(" ".join(text.split()), self.file, ".".join(self._place)))

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call) and node.exc.args:
            self._keep(node.exc.args[0])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in RAISERS and len(node.args) == 2:
            self._keep(node.args[1])
        elif name in ("warn", "warning", "_fail") and node.args:
            self._keep(node.args[0])
        self.generic_visit(node)


def _words(message: ast.expr) -> str | None:
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        return re.sub(r"%[sd]", "{…}", message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _placeholder(part)
            for part in message.values
        )
    if isinstance(message, ast.BinOp) and isinstance(message.op, ast.Add):
        left, right = _words(message.left), _words(message.right)
        return None if left is None or right is None else left + right
    return None


def _placeholder(part: ast.expr) -> str:
    """Names what is filled in where the code has a plain name for it."""
    inner = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(inner, ast.Name):
        return f"{{{inner.id}}}"
    if isinstance(inner, ast.Attribute):
        return f"{{{inner.attr}}}"
    return "{…}"


def grouped(page: str) -> tuple[dict[str, list[Line]], list[Line]]:
    """Returns the lines of each group on the page of errors, and the lines that no group takes.

    A group's marker holds a selector: `spec_runtime/kv.py` or `spec_export/drafters/*.py` takes
    a file's lines, `"got drafter"` those that hold these words, both together what fits both, and
    `or` stands between alternatives. A line belongs to the first group that takes it.
    """
    groups: dict[str, list[Line]] = {each["selector"]: [] for each in MARKER.finditer(page)}
    left = []
    for line in error_lines():
        for selector, lines in groups.items():
            if _takes(selector, line):
                lines.append(line)
                break
        else:
            left.append(line)
    return groups, left


def _takes(selector: str, line: Line) -> bool:
    """Says whether one of the selector's alternatives, parted by `or`, fits the line."""
    fits = True
    for quoted, word in re.findall(r'"([^"]+)"|(\S+)', f"{selector} or"):
        if word == "or":
            if fits:
                return True
            fits = True
        elif quoted:
            fits = fits and quoted in line.text
        else:
            fits = fits and fnmatch.fnmatch(line.file, word)
    return False


def with_error_lines(page: str) -> str:
    """Returns the page of errors with each group's lines in the place of its marker.

    Raises ValueError for a line that no group takes and for a group without lines.
    """
    groups, left = grouped(page)
    empty = [selector for selector, lines in groups.items() if not lines]
    if left or empty:
        raise ValueError(
            "docs/reference/errors.md: "
            + "; ".join(
                [f"no group takes {line.file}: {line.text!r}" for line in left]
                + [f"the group {selector!r} has no line" for selector in empty]
            )
        )

    def block(marker: re.Match[str]) -> str:
        lines = dict.fromkeys(line.text for line in groups[marker["selector"]])
        return "\n".join(f"- `{text}`" for text in lines)

    return MARKER.sub(block, page)
