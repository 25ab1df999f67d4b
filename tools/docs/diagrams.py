"""Draws a drafter's data flow as SVG from a few lines of text.

Each line of the first part is a column of boxes from left to right, `kind: label, label`; each line
of the second part an arrow, `label -> label`. Kinds choose the colour:

    target: h_t
    token: x_t+1
    drafter: head 1, head 2
    guess: guess 1, guess 2

    h_t -> head 1
    head 1 -> guess 1

A column may mix kinds: `target: h_t; token: x_t+1`. `gap: 1` leaves a box's place empty, so that an
arrow can pass a column. `_2` after a letter is set as a subscript.
"""

import re
from html import escape

COLOURS = {
    "target": ("#dbeafe", "#1d4ed8"),
    "token": ("#f3f4f6", "#4b5563"),
    "drafter": ("#dcfce7", "#15803d"),
    "guess": ("#ffedd5", "#c2410c"),
    "gap": ("none", "none"),
}
BOX_HEIGHT, GAP, COLUMN_GAP, MARGIN, LETTER = 34, 14, 46, 8, 7.6


def svg(text: str) -> str:
    """Returns the diagram as inline SVG; ValueError for a line that is neither box nor arrow."""
    columns: list[list[tuple[str, str]]] = []
    arrows: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if "->" in line:
            first, _, second = line.partition("->")
            arrows.append((first.strip(), second.strip()))
        else:
            columns.append(_column(line))
    widths = [max(_width(label) for _, label in column) for column in columns]
    tallest = max(len(column) * (BOX_HEIGHT + GAP) - GAP for column in columns)
    place: dict[str, tuple[float, float, float]] = {}
    shapes = []
    x = float(MARGIN)
    for column, width in zip(columns, widths, strict=True):
        y = MARGIN + (tallest - (len(column) * (BOX_HEIGHT + GAP) - GAP)) / 2
        for kind, label in column:
            if kind != "gap":
                place[label] = (x, y + BOX_HEIGHT / 2, width)
                shapes.append(_box(x, y, width, kind, label))
            y += BOX_HEIGHT + GAP
        x += width + COLUMN_GAP
    lines = [_arrow(place, *arrow) for arrow in arrows]
    total_width, total_height = x - COLUMN_GAP + MARGIN, tallest + 2 * MARGIN
    return (
        f'<svg class="diagram" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {total_width:.0f} {total_height:.0f}" width="{total_width:.0f}" '
        'font-family="sans-serif" font-size="14"><defs><marker id="head" viewBox="0 0 8 8" '
        'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#6b7280"/></marker></defs>'
        + "".join(lines + shapes)
        + "</svg>"
    )


def _column(line: str) -> list[tuple[str, str]]:
    boxes = []
    for part in line.split(";"):
        kind, colon, labels = part.partition(":")
        if not colon or kind.strip() not in COLOURS:
            raise ValueError(f"got diagram line {line!r}, expected one of {', '.join(COLOURS)}: …")
        boxes += [(kind.strip(), label.strip()) for label in labels.split(",")]
    return boxes


def _width(label: str) -> float:
    return LETTER * len(re.sub(r"_", "", label)) + 24


def _box(x: float, y: float, width: float, kind: str, label: str) -> str:
    fill, stroke = COLOURS[kind]
    words = re.sub(
        r"_([^\s,()]+)",
        r'<tspan dy="4" font-size="10">\1</tspan><tspan dy="-4">&#8203;</tspan>',
        escape(label),
    )
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="6" '
        f'fill="{fill}" stroke="{stroke}"/><text x="{x + width / 2:.0f}" y="{y + 22:.0f}" '
        f'text-anchor="middle" fill="#111">{words}</text>'
    )


def _arrow(place: dict[str, tuple[float, float, float]], first: str, second: str) -> str:
    for label in (first, second):
        if label not in place:
            raise ValueError(f"got arrow to {label!r}, expected a box: {', '.join(place)}")
    x1, y1, width1 = place[first]
    x2, y2, width2 = place[second]
    style = 'fill="none" stroke="#6b7280" stroke-width="1.4" marker-end="url(#head)"'
    if x1 == x2:  # within a column: along its right edge
        x, bend = x1 + width1, x1 + width1 + 34
        return (
            f'<path d="M{x:.0f} {y1:.0f}C{bend:.0f} {y1:.0f} {bend:.0f} {y2:.0f} '
            f'{x:.0f} {y2:.0f}" {style}/>'
        )
    if x2 < x1:  # back to an earlier column: from the left edge to the right one
        start, end = x1, x2 + width2
    else:
        start, end = x1 + width1, x2
    middle = (start + end) / 2
    return (
        f'<path d="M{start:.0f} {y1:.0f}C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f} '
        f'{end:.0f} {y2:.0f}" {style}/>'
    )
