"""Applies a grammar along the paths of token trees.

Which tokens are allowed depends on the text, so each node of a tree has the mask of its own path,
as penalties differ from node to node. One matcher walks from path to path: it takes back what two
paths do not share and reads the rest.
"""

from collections.abc import Sequence

import numpy as np

from spec_runtime.grammar.base import Matcher, read
from spec_runtime.grammar.formats import format_error
from spec_runtime.trees.grow import TreeBuilder
from spec_runtime.trees.tree import TokenTree


class PathMasks:
    """Says which tokens a grammar allows after the committed text and a path of drafted tokens."""

    def __init__(self, matcher: Matcher, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._path: list[int] = []  # what the matcher has read after the committed text

    def commit(self, tokens: Sequence[int]) -> None:
        """Makes these tokens, which must be allowed, part of the committed text.

        Raises UserError, as `after` and `restrict` do, if the matcher refuses what it allowed.
        """
        self._follow(tokens)
        self._path = []

    def after(self, path: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns which tokens may follow this path, bool[V]; the path must be allowed."""
        self._follow([int(token) for token in path])
        return self._matcher.allowed()

    def restrict(self, tree: TokenTree, max_nodes: int, max_depth: int, room: int) -> TokenTree:
        """Returns the tree inside the grammar: without nodes that it does not allow, and with what
        it determines.

        Below the root hangs the chain of forced tokens, at most `max_depth` long. These are next to
        certain, so they are nodes beyond `max_nodes`, up to `room` nodes in all. Then come the
        nodes of the draft, and below these what follows them with as little doubt. If nothing
        changes, the tree itself is returned; otherwise its log-probabilities are left out.

        Nodes are numbered parents first. Children that were drawn keep their draws: one outside the
        grammar has p = 0 and is refused without its node.

        Example: the grammar is "(yes|no)!", a token is a letter or "!", and the root is followed by
        y, n and x, of which n is followed by a. Then x and a are left out, and e, s, ! and EOS are
        added below y, and o, ! and EOS below n.
        """
        builder = TreeBuilder(int(tree.token_N[0]))
        self._go(())
        chain = self._matcher.forced(min(max_depth, room - 1))
        self._add_chain(builder, 0, chain)
        limit = min(room, max_nodes + len(chain))
        new_id: dict[int, int] = {0: 0}
        pairs = zip(tree.token_N.tolist()[1:], tree.parent_N.tolist()[1:], strict=True)
        for node, (token, old_parent) in enumerate(pairs, 1):
            parent = new_id.get(old_parent)
            if parent is None:
                continue
            has_room = len(builder) < limit
            if builder.has(parent, token) or (has_room and self._allows(builder, parent, token)):
                new_id[node] = builder.add(parent, token)
        self._extend(builder, [*new_id.values()][1:], limit, max_depth)
        if builder.tokens == tree.token_N.tolist() and builder.parents == tree.parent_N.tolist():
            return tree
        draws = {new_id[node]: each for node, each in tree.draws.items() if node in new_id}
        return builder.build(draws=draws)

    def _allows(self, builder: TreeBuilder, parent: int, token: int) -> bool:
        return self._go([*_path(builder, parent), token])

    def _extend(self, builder: TreeBuilder, nodes: list[int], limit: int, max_depth: int) -> None:
        """Adds below each of these nodes what the grammar determines, while there is room."""
        for node in nodes:
            path = _path(builder, node)
            most = min(limit - len(builder), max_depth - len(path))
            if most <= 0 or path[-1] in self._eos:
                continue
            self._follow(path)
            self._add_chain(builder, node, self._matcher.forced(most))

    def _add_chain(self, builder: TreeBuilder, node: int, chain: list[int]) -> None:
        for token in chain:
            node = builder.add(node, token)

    def _follow(self, path: Sequence[int]) -> None:
        """Moves the matcher to the end of this path, whose tokens were all found to be allowed."""
        if not self._go(path):
            raise format_error(
                f"the grammar refuses token {path[len(self._path)]}, which it allowed before; "
                "write it otherwise"
            )

    def _go(self, path: Sequence[int]) -> bool:
        """Moves the matcher to the end of this path. Returns False if the grammar does not allow
        it; the matcher has then read as much of the path as it allows."""
        num_shared = 0
        for token, known in zip(path, self._path, strict=False):
            if token != known:
                break
            num_shared += 1
        self._matcher.retreat(len(self._path) - num_shared)
        del self._path[num_shared:]
        rest = list(path[num_shared:])
        num_read = read(self._matcher, rest)
        self._path += rest[:num_read]
        return num_read == len(rest)


def _path(builder: TreeBuilder, node: int) -> list[int]:
    """Returns the tokens from below the root to `node`."""
    tokens: list[int] = []
    while node:
        tokens.append(builder.tokens[node])
        node = builder.parents[node]
    return tokens[::-1]
