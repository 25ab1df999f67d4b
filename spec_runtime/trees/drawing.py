"""Says what is shown of one step's tree: what was drafted, and what of it was accepted."""

from collections.abc import Sequence
from typing import NamedTuple

from spec_runtime.trees.tree import TokenTree

LONGEST = 18  # characters of a node's text
VISIBLE = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"})  # open box, arrows


class AcceptedNode(NamedTuple):
    """One node of a step's tree as it is shown: `kind` is root, accepted, refused or bonus."""

    parent: int
    kind: str
    text: str


def accepted_nodes(
    tree: TokenTree, path: Sequence[int], texts: Sequence[str], bonus_text: str | None
) -> list[AcceptedNode]:
    """Returns the nodes of one step's tree, and the bonus token after them, whose text is None
    where there is none.

    `path` holds the accepted nodes from the root on, as acceptance returns it, and `texts` one text
    a node: they are shown with visible white space, and cut.
    """
    assert list(path) == tree.path(path[-1]), path
    kinds = ["accepted" if node in path else "refused" for node in range(tree.num_nodes)]
    kinds[0] = "root"
    shown = [_shown(text) for text in texts]
    rows = zip(tree.parent_N.tolist(), kinds, shown, strict=True)
    nodes = [AcceptedNode(*row) for row in rows]
    if bonus_text is not None:
        nodes.append(AcceptedNode(path[-1], "bonus", _shown(bonus_text)))
    return nodes


def _shown(text: str) -> str:
    """Returns the text with white space made visible, cut to LONGEST characters; what cannot be
    printed becomes U+FFFD."""
    visible = "".join(c if c.isprintable() else "\ufffd" for c in text.translate(VISIBLE))
    return visible if len(visible) <= LONGEST else visible[: LONGEST - 1] + "\u2026"
