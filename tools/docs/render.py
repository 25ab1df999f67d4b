"""Writes measured figures from JSON: into README.md, and into the pages when the site is built.

    python -m tools.docs.render [--check]

A marker `<!-- figures: NAME [ARGUMENT] -->` stands for one of the tables of tables.toml, such as
`sweep int8`, or for `source FILE`, the line under it. In README.md the table is kept, as a block
that ends with `<!-- /figures -->`; the command renders it anew. In a page of docs/ there is only
the marker, and hooks.py puts the table there. Figures are never typed by hand. With --check nothing
is written: the exit code is 1 if a block is not what its JSON says.
"""

import argparse
import itertools
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.docs import rows
from tools.docs.results import ROOT, FigureError, Row, cell, rows_of, source
from tools.figures import markdown

TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
REPEATED = re.compile(r'(?P<field>\w+)\."?\{(?P<mark>k|each)\}')
BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<name>[^>]+?) -->)(?P<body>.*?)(?P<end><!-- /figures -->)",
    re.DOTALL,
)

MARKER = re.compile(r"^<!-- figures: (?P<name>[^>]+?) -->$", re.MULTILINE)


def render(name: str) -> str:
    """Returns the Markdown that belongs between the markers of the block called `name`."""
    word, _, argument = name.partition(" ")
    if word == "source":
        return f"\n\nMeasured: {source(argument)}\n\n"
    if word not in TABLES:
        raise FigureError(f"got figures block {name!r}, expected source or {', '.join(TABLES)}")
    table = TABLES[word]
    found = rows_for(table["rows"].replace("{}", argument), argument)
    return f"\n\n{shown(word, found)}\n\n"


def shown(name: str, found: Sequence[Row]) -> str:
    """Returns rows in the columns of a table of tables.toml; what measures them prints it, too."""
    columns = columns_for(TABLES[name]["columns"], found)
    cells = [[cell(template, row) for _, template in columns] for row in found]
    return markdown([head for head, _ in columns], cells, TABLES[name].get("left", 1))


def rows_for(where: str, argument: str) -> list[Row]:
    """Returns the rows of "FILE:PATH", or those that a function of rows.py makes."""
    file, colon, path = where.partition(":")
    if colon:
        return rows_of(file, path)
    function, _, own_argument = where.partition(" ")
    return getattr(rows, function)(own_argument or argument)


def columns_for(text: str, found: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns heads and templates, with those repeated whose cell has {k} or {each}.

    With rows {n: {a: 1, b: 2}} the column "at {each} := {n.{each}}" becomes "at a := {n.a}" and
    "at b := {n.b}".
    """
    pairs = [column.partition(":=")[::2] for column in re.split(r"[|\n]", text.strip())]
    columns = []
    for _, group in itertools.groupby(pairs, key=lambda pair: REPEATED.search(pair[1]) is None):
        alike = list(group)
        repeated = REPEATED.search(alike[0][1])
        names = [("", "")]
        if repeated is not None:
            names = names_in(found, repeated["field"], repeated["mark"])
        columns += [
            (head.replace("{k}", shown).replace("{each}", shown).strip(), _named(template, name))
            for name, shown in names
            for head, template in alike
        ]
    return columns


def names_in(found: Sequence[Row], field: str, mark: str) -> list[tuple[str, str]]:
    """Returns the keys of a field in any row, or its places from 0, and how heads show them."""
    if mark == "k":
        return [(str(k), str(k + 1)) for k in range(max(len(row[field]) for row in found))]
    keys = dict.fromkeys(key for row in found for key in row[field])
    return [(key, key) for key in keys]


def _named(template: str, name: str) -> str:
    return template.replace("{k}", name).replace("{each}", name).strip()


def rendered(text: str) -> str:
    """Returns a document's text with all of its blocks rendered anew."""
    return BLOCK.sub(lambda block: block["begin"] + render(block["name"]) + block["end"], text)


def filled(text: str) -> str:
    """Returns a page's text with the table of each marker."""
    return MARKER.sub(lambda marker: marker[0] + render(marker["name"]), text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a block is stale")
    args = parser.parse_args()
    file = ROOT / "README.md"
    text = file.read_text(encoding="utf-8")
    try:
        new = rendered(text)
    except FigureError as error:
        print(f"error: {file.name}: {error}", file=sys.stderr)
        return 2
    if new == text:
        return 0
    if not args.check:
        file.write_text(new, encoding="utf-8")
    print(f"{file.name}: {'is not what its JSON says' if args.check else 'rendered'}")
    return 1 if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
