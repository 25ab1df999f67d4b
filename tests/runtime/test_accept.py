"""Acceptance by target sampling: hand cases."""

from __future__ import annotations

import numpy as np
import pytest

from spec_runtime.accept import by_target_sampling
from spec_runtime.tree import TokenTree

# 5 ─┬─ 7 ── 9
#    └─ 8
TREE = TokenTree(np.array([5, 7, 8, 9]), np.array([0, 0, 0, 1]))


@pytest.mark.parametrize(
    ("drawn", "path", "bonus", "visited"),
    [
        ({0: 7, 1: 9, 3: 2}, [0, 1, 3], 2, [0, 1, 3]),  # all accepted
        ({0: 1}, [0], 1, [0]),  # first refused
        ({0: 8, 2: 3}, [0, 2], 3, [0, 2]),  # the second branch
        ({0: 7, 1: 8}, [0, 1], 8, [0, 1]),  # 8 is the root's child, not this node's
        ({0: 9}, [0], 9, [0]),  # 9 is a grandchild
    ],
)
def test_walk(drawn: dict[int, int], path: list[int], bonus: int, visited: list[int]) -> None:
    asked = []

    def draw(node: int) -> int:
        asked.append(node)
        return drawn[node]

    assert by_target_sampling(TREE, draw) == (path, bonus)
    assert asked == visited  # no other row is touched


def test_empty_draft_is_plain_decoding() -> None:
    assert by_target_sampling(TokenTree.root(4), lambda node: 6) == ([0], 6)
