"""Drafts by feature-level autoregression (EAGLE): nodes read their parents' predicted features.

The cache holds committed pairs (feature of a position, token of the next one), which each step
fills with the target's own features. A tree's rows, made from predicted features, are scratch.
Static trees are EAGLE-1's and grown ones EAGLE-2's; the budget decides which.
"""

import numpy as np

from spec_runtime.bundle.manifest import FEATURE_ROWS
from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.proposers.rows import Expanding
from spec_runtime.trees.grow import TreeBuilder


class FeatureProposer(DraftModelProposer):
    """Runs a draft model whose rows also read `features` f32[1, N, F]: for a committed pair the
    target's, for a node of a tree its parent's output `hidden` f32[M, F].

    Example, committed tokens a b c (pairs (f_a, b), (f_b, c) done) and root d: one run adds pair
    (f_c, d) at position 2, which guesses the depth-1 nodes and their feature; each of those that
    is expanded, x, is a row (hidden of the pair, x) at position 3, and so on.
    """

    reads_features = True
    first_token = 1

    _hidden_NF: np.ndarray  # outputs of the level last run, whose first node is `_first`
    _first: int

    def _expand(self, nodes: TreeBuilder, first: int) -> Expanding:
        parent_N = np.array(nodes.parents[first:])
        outputs = ["guess_ids", "guess_log_probs"]
        if not self.wants_features:  # features are in banks: row i of the drafter's is node i's
            rows = {FEATURE_ROWS: -1 - parent_N}
            result = yield from self._rows.run_level(outputs, nodes, first, rows)
            return result["guess_ids"], result["guess_log_probs"]
        features = None
        if first:  # the parents of a level's nodes are in the level before it
            features = {"features": self._hidden_NF[None, parent_N - self._first]}
        result = yield from self._rows.run_level([*outputs, "hidden"], nodes, first, features)
        # this is a view of memory that the next run overwrites, after it has read it
        self._hidden_NF, self._first = result["hidden"], first
        return result["guess_ids"], result["guess_log_probs"]
