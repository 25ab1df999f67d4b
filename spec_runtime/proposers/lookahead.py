"""Drafts by lookahead decoding (Fu et al.): n-grams from Jacobi iterations run with the text.

The window holds W columns of N - 1 guessed tokens. The target's argmax after the newest token of
column i completes an n-gram,

    y_i = argmax p(. | text, x_00 … x_0i, x_1i … x_{N-2,i}),

which goes into a pool under its first token and is drafted whenever that token is the root. Window
and drafted n-grams are one tree, so one target pass does both. It needs no model, no features and
no training.
"""

import random
from collections.abc import Sequence

import numpy as np

from spec_runtime.loop.proposer import StatelessProposer
from spec_runtime.loop.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import TreeBuilder
from spec_runtime.trees.tree import TokenTree

LEVEL, WINDOW, POOL = 5, 7, 7
NUM_NODES = (WINDOW + POOL) * (LEVEL - 1)  # of a full tree, root included


class LookaheadProposer(StatelessProposer):
    """Drafts n-grams from its pool, and a window of guesses that makes new n-grams.

    `level` N: tokens of an n-gram; `window` W: columns; `pool` G: n-grams kept per first token.

    Level 0 of the window is a chain that begins with the root, further levels hang below it, one
    chain a column: level j of column i lies i + j below the root. Example, W = 3, N = 3:

        root ── a1 ── a2      level 0
         │      │     │
         b0     b1    b2      level 1; what follows b0 completes the n-gram (root, b0, ·)

    A step moves every level up by one, and the target's answers become the last level. So does a
    step that accepted several tokens: moving the columns along with them had an accepted length of
    1.44 instead of 1.56 on the demo. The first level is drawn from the prompt; each step fills
    another level until all are full.

    With a smaller budget at most half of the nodes are the pool's, and the window loses its
    rightmost columns, also if they reach below `max_depth`. They do not come back in that
    generation. A budget for only the root leaves the window as it is, and so does a step without
    the target's answers: a grammar left out nodes of the tree, the window's among them.

    `truncate` does nothing, because `start` begins anew, whatever is reused.
    """

    reads_answers = True

    def __init__(self, level: int = LEVEL, window: int = WINDOW, pool: int = POOL) -> None:
        assert level >= 2, level
        self._num_levels = level - 1
        self._window = window
        self._pool_size = pool
        self._level_JW: list[list[int]] = []  # oldest first
        self._newest_W: list[int] = []  # nodes of the last level in the tree last proposed
        # first token -> n-grams without it, oldest first
        self._pool: dict[int, list[tuple[int, ...]]] = {}

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._pool = {}
        # always the same draw, so that a generation can be repeated
        self._level_JW = [random.Random(0).choices(prompt, k=self._window)]

    def propose(self, token: int, budget: Budget) -> TokenTree:
        if budget.is_root_only:  # the window waits
            self._newest_W = []
            return TokenTree.root(token)
        width = self._width(budget)
        self._level_JW = [level_W[:width] for level_W in self._level_JW]
        tree = TreeBuilder(token)
        self._newest_W = self._add_window(tree) if width else []
        max_depth = self._num_levels if budget.max_depth is None else budget.max_depth
        for ngram in reversed(self._pool.get(token, ())):
            node = 0
            for guess in ngram[:max_depth]:
                if len(tree) >= budget.max_nodes:
                    break
                node = tree.add(node, guess)
        return tree.build()

    def commit(self, step: Step) -> None:
        if not self._newest_W or step.verified is None:
            return
        answer_W = step.verified.argmax_N[self._newest_W].tolist()
        if len(self._level_JW) == self._num_levels:
            for first, *rest in zip(*self._level_JW, answer_W, strict=True):
                self._remember(first, tuple(rest))
            del self._level_JW[0]
        self._level_JW.append(answer_W)

    def _width(self, budget: Budget) -> int:
        """Returns how many of the columns still there the budget has room for."""
        for_pool = min(self._pool_size * self._num_levels, budget.max_nodes // 2)
        width = min(len(self._level_JW[0]), (budget.max_nodes - for_pool) // self._num_levels)
        if budget.max_depth is not None:
            width = min(width, budget.max_depth - self._num_levels + 2)
        return max(0, width)

    def _add_window(self, tree: TreeBuilder) -> list[int]:
        """Adds the columns to the tree; returns the node of each column's newest token."""
        self._level_JW[0][0] = tree.tokens[0]
        node_W = [0]
        for guess in self._level_JW[0][1:]:
            node_W.append(tree.add(node_W[-1], guess))
        for level_W in self._level_JW[1:]:
            node_W = [tree.add(node, guess) for node, guess in zip(node_W, level_W, strict=True)]
        return node_W

    def _remember(self, first: int, rest: tuple[int, ...]) -> None:
        """Puts an n-gram into the pool as the newest under its first token."""
        ngrams = self._pool.setdefault(first, [])
        if rest in ngrams:
            ngrams.remove(rest)
        ngrams.append(rest)
        del ngrams[: -self._pool_size]
