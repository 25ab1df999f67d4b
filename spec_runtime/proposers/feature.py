"""Feature-level autoregression (EAGLE): a level's nodes read their parents' predicted features.

The cache holds committed pairs (feature of a position, token of the next one), which each step
fills with the target's own features; a tree's rows, made from predicted features, are scratch.
Static trees are EAGLE-1's, grown ones EAGLE-2's: the budget decides. Knows no network.
"""

from __future__ import annotations

import numpy as np

from spec_runtime.bundle import FEATURE_ROWS
from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.trees.grow import TreeBuilder


class FeatureProposer(DraftModelProposer):
    """A draft model whose rows also read `features` f32[1, N, F]: of a committed pair the target's,
    of a tree's node its parent's output `hidden` f32[M, F].

    Example, committed tokens a b c (pairs (f_a, b), (f_b, c) done) and root d: one run adds pair
    (f_c, d) at position 2, which guesses the depth-1 nodes and their feature; each of those that
    is expanded, x, is a row (hidden of the pair, x) at position 3, and so on.
    """

    reads_features = True
    first_token = 1

    _hidden_NF: np.ndarray  # of the level last run, whose first node is `_first`
    _first: int

    def _expand(self, nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
        parent_N = np.array(nodes.parents[first:])
        outputs = ["guess_ids", "guess_log_probs"]
        if not self.wants_features:  # they are in banks: row i of its own is node i's
            result = self._rows.run_level(outputs, nodes, first, {FEATURE_ROWS: -1 - parent_N})
            return result["guess_ids"], result["guess_log_probs"]
        features = None
        if first:  # the parents of a level's nodes are in the level before it
            features = {"features": self._hidden_NF[None, parent_N - self._first]}
        result = self._rows.run_level([*outputs, "hidden"], nodes, first, features)
        # a view of what the next run overwrites, which has read it by then
        self._hidden_NF, self._first = result["hidden"], first
        return result["guess_ids"], result["guess_log_probs"]
