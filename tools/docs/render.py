"""Writes measured figures from JSON into the marked tables of README.md and docs/.

    python -m tools.docs.render [--check]

A block is everything between `<!-- figures: NAME [ARGUMENT] -->` and `<!-- /figures -->`: one of
the tables of tables.py, such as `sweep int8`, or `source FILE`, the line under it. Figures are
never typed by hand, so that a new measurement needs this command and no editing. With --check
nothing is written: the exit code is 1 if a block is not what its JSON says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.docs.results import ROOT, FigureError, cell, source
from tools.docs.tables import TABLES
from tools.figures import markdown

BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<name>[^>]+?) -->)(?P<body>.*?)(?P<end><!-- /figures -->)",
    re.DOTALL,
)


def render(name: str) -> str:
    """Returns the Markdown that belongs between the markers of the block called `name`."""
    word, _, argument = name.partition(" ")
    if word == "source":
        return f"\n\nMeasured: {source(argument)}\n\n"
    if word not in TABLES:
        raise FigureError(f"got figures block {name!r}, expected source or {', '.join(TABLES)}")
    table = TABLES[word]
    rows = table.rows_for(argument)
    heads, templates = zip(*table.columns_for(rows), strict=True)
    cells = [[cell(template, row) for template in templates] for row in rows]
    return f"\n\n{markdown(heads, cells, table.left)}\n\n"


def rendered(text: str) -> str:
    """Returns a document's text with all of its blocks rendered anew."""
    return BLOCK.sub(lambda block: block["begin"] + render(block["name"]) + block["end"], text)


def documents() -> Iterator[Path]:
    """Yields every Markdown file that may hold a block."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a block is stale")
    args = parser.parse_args()
    stale = []
    for file in documents():
        text = file.read_text(encoding="utf-8")
        try:
            new = rendered(text)
        except FigureError as error:
            print(f"error: {file.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if new != text:
            stale.append(file.relative_to(ROOT))
            if not args.check:
                file.write_text(new, encoding="utf-8")
    for each in stale:
        print(f"{each}: {'is not what its JSON says' if args.check else 'rendered'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
