"""Acceptance: choose a path of the tree. Pure functions of a tree and what the target says.

They know no cache, no tokenizer and no engine, and ask only for the rows they visit.
"""

from __future__ import annotations

from collections.abc import Callable

from spec_runtime.tree import TokenTree


def by_target_sampling(tree: TokenTree, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Draw the target's own token at a node; walk to the child that carries it, if there is one.

    `draw(node)` is a draw from p at that node (greedy: the argmax). Every emitted token is such a
    draw, so any tree chosen without looking at the draws leaves the distribution as it was.

    Returns the path (node ids, root first) and the bonus, the first draw no child carries.
    Example: root 5 with children 7 and 8; the target draws 8 at the root and 3 at node 2:
    path [0, 2], bonus 3, committed tokens 8 and 3.
    """
    path = [0]
    while True:
        token = draw(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return path, token
        path.append(child)
