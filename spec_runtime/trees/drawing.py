"""Draws the tree of one step as SVG: what was drafted, and what of it was accepted.

Levels go to the right. The first child stays in its parent's row and the others come below.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from spec_runtime.errors import UserError
from spec_runtime.trees.budget import RankPath
from spec_runtime.trees.tree import TokenTree

MARGIN, TITLE_HEIGHT = 16, 28  # pixels


def layout(paths: Sequence[RankPath]) -> dict[RankPath, tuple[int, int]]:
    """Returns the column and row of each node, the root () included: (0,), (1,), (0, 0) -> column 1
    row 0, column 1 row 1, column 2 row 0."""
    place: dict[RankPath, tuple[int, int]] = {(): (0, 0)}
    row = 0
    seen: set[RankPath] = set()  # nodes that have a child already
    for path in sorted(paths):
        if path[:-1] in seen:
            row += 1
        seen.add(path[:-1])
        place[path] = (len(path), row)
    return place


CHARACTER = 7.8  # the width of a monospaced character of 13 px
BOX_HEIGHT, BOX_ROW, GAP, PADDING = 24, 34, 34, 8  # GAP: between two levels
LONGEST = 18  # characters of a node's text
VISIBLE = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"})  # open box, arrows


@dataclass(frozen=True)
class _Box:
    """One node of an accepted tree in pixels: `y` is its middle, `x` its left edge."""

    kind: str  # root | accepted | refused | bonus
    text: str
    x: float
    y: float

    @property
    def width(self) -> float:
        return 2 * PADDING + CHARACTER * _num_columns(self.text)

    def svg(self) -> str:
        # textLength keeps the text inside its box, whatever font there is
        return (
            f'<g class="node {self.kind}"><rect x="{self.x:.1f}" y="{self.y - BOX_HEIGHT / 2:.1f}" '
            f'width="{self.width:.1f}" height="{BOX_HEIGHT}" rx="6"/>'
            f'<text x="{self.x + PADDING:.1f}" y="{self.y + 4.5:.1f}" '
            f'textLength="{self.width - 2 * PADDING:.1f}" lengthAdjust="spacingAndGlyphs">'
            f"{escape(self.text)}</text></g>"
        )


class AcceptedTree(NamedTuple):
    """SVG elements of one step's tree, without a style: groups `node` and paths `edge`, both of
    which also have the class root, accepted, refused or bonus.

    In pixels: they end at `right`, and the middle of the lowest box is at `bottom`; there is room
    for a title above them.
    """

    elements: list[str]
    right: float
    bottom: float


def accepted_tree(
    tree: TokenTree, path: Sequence[int], texts: Sequence[str], bonus_text: str | None
) -> AcceptedTree:
    """Returns the picture of one step: the drafted tree, the accepted path, and the bonus token,
    whose text is None where there is none.

    `path` holds the accepted nodes from the root on, as acceptance returns it, and `texts` one text
    a node. The path goes along the first row, and the bonus stands at its end. Raises UserError if
    `path` is not a path from the root, or if there is not one text a node.

    Example: root 5 has children 7 and 8, and 8 is accepted: path [0, 2]; node 2 stands to
    the right of the root, node 1 below node 2, the bonus to the right of node 2.
    """
    nodes = accepted_nodes(tree, path, texts, bonus_text)
    ranks = _ranks(tree, path)[: len(nodes)]
    boxes = _boxes(ranks, [node.kind for node in nodes], [node.text for node in nodes])
    edges = [
        (box.kind, _edge(boxes[node.parent], box))
        for box, node in zip(boxes[1:], nodes[1:], strict=True)
    ]
    edges.sort(key=lambda edge: edge[0] != "refused")  # the path's are drawn over the others
    lines = [f'<path class="edge {kind}" d="{line}"/>' for kind, line in edges]
    return AcceptedTree(
        [*lines, *(box.svg() for box in boxes)],
        MARGIN + max(box.x + box.width for box in boxes),
        max(box.y for box in boxes),
    )


class AcceptedNode(NamedTuple):
    """One node of a step's tree as it is shown: `kind` is root, accepted, refused or bonus."""

    parent: int
    kind: str
    text: str


def accepted_nodes(
    tree: TokenTree, path: Sequence[int], texts: Sequence[str], bonus_text: str | None
) -> list[AcceptedNode]:
    """Returns the nodes of one step's tree, and the bonus after them unless its text is None. Their
    texts have visible white space, and are cut.

    Raises UserError as `accepted_tree` does.
    """
    if len(texts) != tree.num_nodes or list(path) != tree.path(path[-1] if path else 0):
        raise UserError(
            f"got path {list(path)} and {len(texts)} texts for {tree.num_nodes} nodes, expected a "
            "path from the root and one text a node"
        )
    kinds = ["accepted" if node in path else "refused" for node in range(tree.num_nodes)]
    kinds[0] = "root"
    shown = [_shown(text) for text in texts]
    nodes = list(map(AcceptedNode, tree.parent_N.tolist(), kinds, shown))
    if bonus_text is not None:
        nodes.append(AcceptedNode(path[-1], "bonus", _shown(bonus_text)))
    return nodes


def _ranks(tree: TokenTree, path: Sequence[int]) -> list[RankPath]:
    """Returns each node as a path of ranks for `layout`, in which the accepted child, or the bonus
    after the last one, comes first; the bonus is the last entry."""
    ranks: list[RankPath] = [()] * tree.num_nodes
    for node in range(tree.num_nodes):
        children = tree.children(node)
        children.sort(key=lambda child: child not in path)
        for rank, child in enumerate(children, node == path[-1]):
            ranks[child] = (*ranks[node], rank)
    return [*ranks, (*ranks[path[-1]], 0)]


def _boxes(ranks: Sequence[RankPath], kinds: Sequence[str], texts: Sequence[str]) -> list[_Box]:
    """Places the nodes: a level is as wide as its longest text."""
    place = layout(ranks[1:])
    widths: dict[int, float] = {}
    for rank, text in zip(ranks, texts, strict=True):
        widths[len(rank)] = max(widths.get(len(rank), 0.0), _Box("", text, 0, 0).width)
    left = {0: float(MARGIN)}
    for level in range(len(widths)):
        left[level + 1] = left[level] + widths[level] + GAP
    top = TITLE_HEIGHT + MARGIN + BOX_HEIGHT / 2
    return [
        _Box(kind, text, left[place[rank][0]], top + BOX_ROW * place[rank][1])
        for rank, kind, text in zip(ranks, kinds, texts, strict=True)
    ]


def _edge(parent: _Box, child: _Box) -> str:
    """Returns the line from a parent to its child: it turns within the gap left of the child, where
    there is no other node."""
    begin, end, turn, radius = parent.x + parent.width, child.x, child.x - GAP / 2, 6
    if parent.y == child.y:
        return f"M{begin:.1f},{parent.y:.1f} H{end:.1f}"
    return (
        f"M{begin:.1f},{parent.y:.1f} H{turn - radius:.1f} "
        f"Q{turn:.1f},{parent.y:.1f} {turn:.1f},{parent.y + radius:.1f} "
        f"V{child.y - radius:.1f} Q{turn:.1f},{child.y:.1f} {turn + radius:.1f},{child.y:.1f} "
        f"H{end:.1f}"
    )


def _shown(text: str) -> str:
    """Returns the text with white space made visible, cut to LONGEST characters; what cannot be
    printed becomes U+FFFD."""
    visible = "".join(c if c.isprintable() else "\ufffd" for c in text.translate(VISIBLE))
    return visible if len(visible) <= LONGEST else visible[: LONGEST - 1] + "\u2026"


def _num_columns(text: str) -> int:
    """Returns the width of a text in monospaced columns, at least 1; wide characters have two."""
    return max(1, sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text))
