#!/usr/bin/env python3
"""Prints how both packages are built: rooms and their arrows, import circles, the longest function.

    python -m tools.structure

Every import statement counts, at module level, inside a function and under TYPE_CHECKING alike;
modules named in strings (the tables of drafters, backends and the annex) do not.
`from package import name` imports the module `package.name` where there is one, and `package`
otherwise. A package's `__init__.py` is a module of its own: importing a submodule of a package is
not taken as importing the package. A room is a folder of a package, or a file at its root. An arrow
leads from a room to another one that it imports. An annex is a room that only its commands import.
The exit code is 1 if there is a circle of modules or of rooms, an import that a package must not
have, a function or a root that is too long, or more lines of a kind than its budget.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("spec_runtime", "spec_export")
# What a package must not import, and the room that may all the same.
FORBIDDEN = {
    "spec_runtime": ("spec_export", "torch", "transformers"),
    "spec_export": ("spec_runtime.cli",),
}
ALLOWED = {"spec_export.cli": ("spec_runtime.cli",)}
# Rooms that nothing else imports, and the modules that may: `spec_export/model/annex.py` finds
# modules of the second one by name.
ANNEXES = {"spec_runtime.serve": "spec_runtime.cli.serve", "spec_export.imports": "spec_export.cli"}
MAX_LINES = 80  # of a function, its docstring included and its decorators not
MAX_FILES = 8  # at the root of a package
# Lines that there may be of each kind, and their files. A change that needs more takes others out.
BUDGETS = {
    "product": (58_760, ("spec_*/**/*.py", "spec_*/**/*.html", "spec_*/**/*.[ch]")),
    "tests": (58_700, ("tests/**/*.py", "tests/**/*.cpp", "tests/**/*.h")),
    "tools": (8_250, ("tools/**/*.py", "tools/**/*.toml", "tools/**/*.sh", "tools/**/*.mjs")),
    "Markdown": (
        5_000,
        ("*.md", "docs/**/*.md", "spec_*/**/*.md", "recipes/**/*.md", "t*/**/*.md"),
    ),
}


@dataclass(frozen=True)
class Function:
    """One function or method, with the lines from its `def` to its end."""

    lines: int
    name: str
    place: str  # path:line

    def __str__(self) -> str:
        return f"{self.name}, {self.lines} lines, {self.place}"


@dataclass
class Structure:
    """Holds what was found in the packages below `root`.

    `imports` maps each module to the modules of the packages that it imports; `outside` maps it to
    the names it imports from elsewhere, such as "torch.nn".
    """

    root: Path
    imports: dict[str, set[str]] = field(default_factory=dict)
    outside: dict[str, set[str]] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    num_root_files: dict[str, int] = field(default_factory=dict)
    num_lines: dict[str, int] = field(default_factory=dict)  # by room

    @property
    def rooms(self) -> dict[str, set[str]]:
        """Maps each room to the other rooms that its modules import."""
        rooms: dict[str, set[str]] = {room_of(module): set() for module in self.imports}
        for module, names in self.imports.items():
            room = room_of(module)
            rooms[room] |= {room_of(name) for name in names} - {room}
        return rooms

    @property
    def arrows(self) -> int:
        """Counts the pairs of rooms of which one imports the other."""
        return sum(len(others) for others in self.rooms.values())

    @property
    def circles(self) -> list[str]:
        """Returns a circle of modules that import one another, and one of rooms."""
        return [circle for each in (self.imports, self.rooms) if (circle := circle_in(each))]

    @property
    def forbidden(self) -> list[str]:
        """Returns a line for each import that a package must not have."""
        lines = []
        for module in sorted(self.imports):
            for name in sorted(self.imports[module] | self.outside[module]):
                if _is_forbidden(module, name) or _is_annexed(module, name):
                    lines.append(f"{module} imports {name}")
        return lines

    @property
    def long_functions(self) -> list[Function]:
        """Returns the functions of more than MAX_LINES lines, the longest first."""
        return [function for function in self.functions if function.lines > MAX_LINES]


def read(root: Path = ROOT, packages: tuple[str, ...] = PACKAGES) -> Structure:
    """Reads every Python file of the packages below `root`."""
    files = {_module_name(root, file): file for p in packages for file in (root / p).rglob("*.py")}
    structure = Structure(root)
    for module, file in sorted(files.items()):
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        names = set(_imported(tree, package, set(files)))
        structure.imports[module] = names & set(files)
        lines = len(file.read_text(encoding="utf-8").splitlines())
        structure.num_lines[room_of(module)] = structure.num_lines.get(room_of(module), 0) + lines
        structure.outside[module] = names - set(files)
        structure.functions += _functions(tree, file.relative_to(root))
    structure.functions.sort(key=lambda function: (-function.lines, function.place))
    for package in packages:
        structure.num_root_files[package] = len(list((root / package).glob("*.py")))
    return structure


def room_of(module: str) -> str:
    """Returns the room of a module: "a.b" for a.b and a.b.c; a package's own names are a room too.

    >>> room_of("spec_runtime.trees.tree"), room_of("spec_runtime.kv"), room_of("spec_runtime")
    ('spec_runtime.trees', 'spec_runtime.kv', 'spec_runtime')
    """
    return ".".join(module.split(".")[:2])


def _is_forbidden(module: str, name: str) -> bool:
    forbidden = set(FORBIDDEN.get(module.split(".")[0], ())) - set(ALLOWED.get(room_of(module), ()))
    return any(f"{name}.".startswith(f"{each}.") for each in forbidden)


def _is_annexed(module: str, name: str) -> bool:
    """Says whether a module imports an annex that is not its own without being allowed to."""
    annex = room_of(name)
    if annex not in ANNEXES or room_of(module) == annex:
        return False
    return not f"{module}.".startswith(f"{ANNEXES[annex]}.")


def _module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, package: str, modules: set[str]) -> Iterator[str]:
    """Yields what a module in `package` imports, relative imports made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in modules else base


def _functions(tree: ast.AST, file: Path) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            yield Function(lines, node.name, f"{file.as_posix()}:{node.lineno}")


def sizes() -> dict[str, int]:
    """Returns how many lines there are of each kind in BUDGETS."""
    found = {}
    for kind, (_, patterns) in BUDGETS.items():
        files = {file for pattern in patterns for file in ROOT.glob(pattern)}
        found[kind] = sum(len(file.read_bytes().splitlines()) for file in files)
    return found


def circle_in(imports: dict[str, set[str]]) -> str | None:
    """Returns a circle of imports, such as "a -> b -> a", or None if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))  # each is imported by the next one
    return None


def describe(structure: Structure) -> str:
    """Returns the findings as lines of text, those that are too long or forbidden named."""
    lines = [f"import circles: {len(structure.circles)} of {len(structure.rooms)} rooms"]
    lines += [f"  {circle}" for circle in structure.circles]
    lines.append(f"forbidden imports: {len(structure.forbidden)}")
    lines += [f"  {line}" for line in structure.forbidden]
    for package in structure.num_root_files:
        mine = [each for each in structure.functions if each.place.startswith(f"{package}/")]
        lines += [f"longest function of {package}: {each}" for each in mine[:1]]
    lines.append(f"functions of more than {MAX_LINES} lines: {len(structure.long_functions)}")
    lines += [f"  {function}" for function in structure.long_functions]
    for package, count in structure.num_root_files.items():
        lines.append(f"files at the root of {package}: {count} (at most {MAX_FILES})")
    counted = (f"{kind} {count} (at most {BUDGETS[kind][0]})" for kind, count in sizes().items())
    lines.append(f"lines: {', '.join(counted)}")
    return "\n".join(lines)


def describe_rooms(structure: Structure) -> str:
    """Returns the rooms, the longest first, with the rooms that each imports and is imported by."""
    rooms = structure.rooms
    lines = [f"{len(rooms)} rooms with {structure.arrows} arrows"]
    for room, count in sorted(structure.num_lines.items(), key=lambda pair: -pair[1]):
        importers = {other for other, imported in rooms.items() if room in imported}
        lines.append(f"{count:6} lines: {room}")
        lines += [f"       -> {_listed(room, rooms[room])}"] if rooms[room] else []
        lines += [f"       <- {_listed(room, importers)}"] if importers else []
    return "\n".join(lines)


def _listed(room: str, others: set[str]) -> str:
    """Returns names of rooms, without the package where it is the room's own."""
    package = room.split(".")[0]
    return ", ".join(sorted(other.removeprefix(f"{package}.") for other in others))


def main() -> int:
    """Prints the findings; returns the exit code."""
    structure = read()
    print(describe(structure))
    print("\n" + describe_rooms(structure))
    is_over = any(count > MAX_FILES for count in structure.num_root_files.values())
    is_over = is_over or any(count > BUDGETS[kind][0] for kind, count in sizes().items())
    found = structure.circles or structure.forbidden or structure.long_functions
    return int(bool(found) or is_over)


if __name__ == "__main__":
    sys.exit(main())
