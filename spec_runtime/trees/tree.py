"""Holds a draft as a tree of tokens.

Node 0 is the root: the last committed token, whose target row is not computed yet. Parents come
before their children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np


def chain_parents(num_nodes: int) -> np.ndarray:
    """Returns the parents of a chain, i64[N]: 4 -> [0, 0, 1, 2]."""
    parent_N = np.arange(-1, num_nodes - 1, dtype=np.int64)
    parent_N[:1] = 0
    return parent_N


def depths(parent_N: np.ndarray) -> np.ndarray:
    """Returns the depth of each node, i64[N]: [0, 0, 0, 1] -> [0, 1, 1, 2]. A node that is its own
    parent is a root: [0, 1, 1] -> [0, 0, 1]."""
    return tree_shape(parent_N)[0].copy()


def ancestors(parent_N: np.ndarray) -> np.ndarray:
    """Returns bool[N, N]: row i is True at i and at every ancestor of i.

    parents [0, 0, 0, 1] ->  1 . . .
                             1 1 . .
                             1 . 1 .
                             1 1 . 1
    """
    return tree_shape(parent_N)[1].copy()


def tree_shape(parent_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `depths` and `ancestors` of these parents i64[N], which must not be written to.

    Few shapes of trees are repeated often, so the last ones are remembered.
    """
    return _tree_shape(parent_N.tobytes())


@lru_cache(maxsize=256)
def _tree_shape(parent_bytes: bytes) -> tuple[np.ndarray, np.ndarray]:
    parents = np.frombuffer(parent_bytes, np.int64).tolist()
    n = len(parents)
    if parents[1:] == [*range(n - 1)]:
        depth_N, ancestor_NN = np.arange(n, dtype=np.int64), np.tri(n, dtype=np.bool_)
    else:
        depth, rows = [0] * n, [1] * n  # a row as an integer, bit j for node j
        for node, parent in enumerate(parents):
            rows[node] = 1 << node
            if parent < node:
                depth[node] = depth[parent] + 1
                rows[node] |= rows[parent]
        depth_N, ancestor_NN = np.array(depth, np.int64), _bits(rows)
    for array in (depth_N, ancestor_NN):
        array.flags.writeable = False
    return depth_N, ancestor_NN


def _bits(rows: list[int]) -> np.ndarray:
    """Returns bool[N, N]: the N lowest bits of each of N integers, [1, 3] -> [[1, 0], [1, 1]]."""
    n = len(rows)
    width = -(-n // 8)
    bytes_NB = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
    bit_NN = np.unpackbits(bytes_NB.reshape(n, width), axis=1, count=n, bitorder="little")
    return bit_NN.view(np.bool_)


@dataclass(frozen=True, eq=False)
class Draws:
    """Records how the children of a node were drawn: from `q_C` f64[C] over the tokens `id_C`
    i64[C]; `order` lists the candidates' indices in the order in which they were drawn.

    Example: ids [4, 9], q [.7, .3], order (0, 0, 1) with replacement means 4, 4 again, then 9. The
    two 4s are one child.
    """

    id_C: np.ndarray
    q_C: np.ndarray
    order: tuple[int, ...]
    with_replacement: bool


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A root and drafted nodes: `token_N` i64[N] and `parent_N` i64[N]; the root is its own parent.

    Example: tokens [5, 7, 8, 9] with parents [0, 0, 0, 1] is root 5 with children 7 and 8, and 9
    below 7. Siblings carry different tokens. `log_prob_N` f64[N] is the log-probability of the path
    to each node, if the tree was grown by probability. `draws` maps each node whose children were
    drawn to its draws.
    """

    token_N: np.ndarray
    parent_N: np.ndarray
    log_prob_N: np.ndarray | None = None
    draws: Mapping[int, Draws] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.token_N)
        assert n >= 1, "a tree has a root"
        assert self.parent_N.shape == self.token_N.shape == (n,), (n, self.parent_N.shape)
        # parents first: this is what lets one forward sweep fill depths and ancestors
        parents = self.parent_N.tolist()
        assert parents[0] == 0, "the root is its own parent"
        assert all(parent < node for node, parent in enumerate(parents[1:], 1)), parents

    def first(self, num_nodes: int) -> TokenTree:
        """Returns the first `num_nodes` nodes of a tree whose children were not drawn."""
        if num_nodes >= self.num_nodes:
            return self
        log_prob_N = None if self.log_prob_N is None else self.log_prob_N[:num_nodes]
        return TokenTree(self.token_N[:num_nodes], self.parent_N[:num_nodes], log_prob_N)

    def ending_at(self, ends: Set[int]) -> TokenTree:
        """Returns the tree without what stands below drafted nodes that carry one of these tokens.

        Example: [5, 7, 8, 9] with parents [0, 0, 1, 2] and the end 7 is [5, 7].
        """
        tokens, parents = self.token_N.tolist(), self.parent_N.tolist()
        if ends.isdisjoint(tokens[1:]):
            return self
        new_id, inner = {0: 0}, {0}
        for node, (token, parent) in enumerate(zip(tokens[1:], parents[1:], strict=True), 1):
            if parent in inner:
                new_id[node] = len(new_id)
                inner |= set() if token in ends else {node}
        kept = [*new_id]
        parent_N = np.array([new_id[parents[node]] for node in kept], np.int64)
        log_prob_N = None if self.log_prob_N is None else self.log_prob_N[kept]
        draws = {new_id[node]: each for node, each in self.draws.items() if node in inner}
        return TokenTree(self.token_N[kept], parent_N, log_prob_N, draws)

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """Returns the tree of one node."""
        return cls(np.array([token], dtype=np.int64), np.zeros(1, dtype=np.int64))

    @classmethod
    def chain(cls, tokens: Sequence[int] | np.ndarray) -> TokenTree:
        """Returns the tree without branches whose root is the first of `tokens`."""
        return cls(np.asarray(tokens, dtype=np.int64), chain_parents(len(tokens)))

    @property
    def num_nodes(self) -> int:
        return len(self.token_N)

    @cached_property
    def depth_N(self) -> np.ndarray:
        """The depth of each node, i64[N]; the root has depth 0."""
        return depths(self.parent_N)

    @cached_property
    def _children(self) -> list[dict[int, int]]:
        """Maps, for each node, a child's token to the child. Of equal siblings the first counts."""
        children: list[dict[int, int]] = [{} for _ in range(self.num_nodes)]
        pairs = zip(self.parent_N.tolist()[1:], self.token_N.tolist()[1:], strict=True)
        for node, (parent, token) in enumerate(pairs, 1):
            children[parent].setdefault(token, node)
        return children

    def children(self, node: int) -> list[int]:
        """Returns the children of `node` in the order of their ids."""
        return list(self._children[node].values())

    def child(self, node: int, token: int) -> int | None:
        """Returns the child of `node` that carries `token`, or None."""
        return self._children[node].get(token)

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Returns the nodes below the root that carry these tokens one after the other, up to the
        first token that no child carries."""
        nodes: list[int] = []
        for token in tokens:
            node = self.child(nodes[-1] if nodes else 0, token)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def path(self, node: int) -> list[int]:
        """Returns the node ids from the root to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(int(self.parent_N[path[-1]]))
        return path[::-1]
