"""A static tree as a drawing: lines for a terminal, SVG, PNG.

Each node is named by its rank path and carries its acceptance (given that its parent was accepted)
and the probability of its path, both by a calibration. Levels go to the right; a best child stays
in its parent's row, the others come below. Knows nothing of bundles.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.tree import Tree

from spec_runtime.trees.budget import RankPath
from spec_runtime.trees.templates import Accuracy, path_probabilities

LEVEL_WIDTH, ROW_HEIGHT, MARGIN, TITLE_HEIGHT = 170, 24, 16, 28  # pixels
COLOUR = "#2b6cb0"


def labels(paths: Sequence[RankPath], accuracy: Accuracy) -> dict[RankPath, str]:
    """Of every node: (0, 2) -> "0.2  31%  p 0.120", acceptance and path probability."""
    probabilities = path_probabilities(paths, accuracy)
    return {
        path: f"{'.'.join(map(str, path))}  {accuracy[len(path) - 1][path[-1]]:.0%}  "
        f"p {probabilities[path]:.3f}"
        for path in sorted(paths)
    }


def terminal(paths: Sequence[RankPath], accuracy: Accuracy, title: str) -> Tree:
    """For `rich.print`."""
    root = Tree(title)
    branch: dict[RankPath, Tree] = {(): root}
    for path, label in labels(paths, accuracy).items():
        branch[path] = branch[path[:-1]].add(label)
    return root


def layout(paths: Sequence[RankPath]) -> dict[RankPath, tuple[int, int]]:
    """Column and row of every node, the root () included: (0,), (1,), (0, 0) -> column 1 row 0,
    column 1 row 1, column 2 row 0."""
    place: dict[RankPath, tuple[int, int]] = {(): (0, 0)}
    row = 0
    seen: set[RankPath] = set()  # nodes that have a child already
    for path in sorted(paths):
        if path[:-1] in seen:
            row += 1
        seen.add(path[:-1])
        place[path] = (len(path), row)
    return place


@dataclass(frozen=True)
class _Drawing:
    """In pixels: edges as (x1, y1, x2, y2), nodes as (x, y, radius, text)."""

    width: int
    height: int
    edges: list[tuple[int, int, int, int]]
    nodes: list[tuple[int, int, float, str]]


def _drawing(paths: Sequence[RankPath], accuracy: Accuracy, title: str) -> _Drawing:
    """A node's area grows with the probability of its path."""
    probability = {(): 1.0, **path_probabilities(paths, accuracy)}
    text = {(): "root", **labels(paths, accuracy)}
    at = {
        path: (MARGIN + column * LEVEL_WIDTH, TITLE_HEIGHT + MARGIN + row * ROW_HEIGHT)
        for path, (column, row) in layout(paths).items()
    }
    return _Drawing(
        max(MARGIN + 8 * len(title), LEVEL_WIDTH + max(x for x, _ in at.values())),
        MARGIN + max(y for _, y in at.values()),
        [(*at[path[:-1]], *at[path]) for path in paths],
        [(x, y, 1.5 + 6 * probability[path] ** 0.5, text[path]) for path, (x, y) in at.items()],
    )


def svg(paths: Sequence[RankPath], accuracy: Accuracy, title: str) -> str:
    """An SVG document: the title, a `line` an edge, then a `circle` and a `text` a node."""
    drawing = _drawing(paths, accuracy, title)
    width, height = drawing.width, drawing.height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 4}" font-size="14">{escape(title)}</text>',
    ]
    for x1, y1, x2, y2 in drawing.edges:
        lines.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#999"/>')
    for x, y, radius, text in drawing.nodes:
        lines.append(f'<circle cx="{x}" cy="{y}" r="{radius:.2f}" fill="{COLOUR}"/>')
        lines.append(f'<text x="{x + 9}" y="{y - 4}">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


def png(paths: Sequence[RankPath], accuracy: Accuracy, title: str) -> bytes:
    """The same as PNG, by matplotlib (ModuleNotFoundError without it)."""
    from matplotlib.figure import Figure

    drawing = _drawing(paths, accuracy, title)
    figure = Figure(figsize=(drawing.width / 100, drawing.height / 100), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    points = 72 / 100  # a pixel
    axes.text(MARGIN, MARGIN + 4, title, fontsize=14 * points)
    for x1, y1, x2, y2 in drawing.edges:
        axes.plot([x1, x2], [y1, y2], color="#999", linewidth=points, zorder=1)
    for x, y, radius, text in drawing.nodes:
        axes.plot([x], [y], "o", markersize=2 * radius * points, color=COLOUR, markeredgewidth=0)
        axes.text(x + 9, y - 4, text, fontsize=11 * points)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
