"""Drafts with a small language model: one run a level, with all nodes of the level in one batch.

The model has its own cache, in which row t holds token t. The committed rows stay in step with the
target's; a tree's rows are scratch after them. With a width of one it drafts a chain.
"""

from typing import Self

from spec_runtime.backends import Runtime
from spec_runtime.bundle.manifest import Bundle, DrafterInfo, require_config
from spec_runtime.loop.proposer import Drafting, grow_with
from spec_runtime.loop.target import Target
from spec_runtime.proposers.rows import DrafterRows, Expanding, RowsProposer, require_levels_fit
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import TreeBuilder, growing


class DraftModelProposer(RowsProposer):
    """Runs the graph "drafter", which has a cache: a row is a token, and its outputs `guess_ids`
    i64[M, C] and `guess_log_probs` f32[M, C] are guesses of the next token.

    Example, committed tokens a b c (three rows done) and root d: one run adds row d at position 3,
    which guesses the depth-1 nodes; each of those that is expanded is a row at position 4, and so
    on. num_guesses: levels; max_width: nodes expanded a level.
    """

    reads_features = False
    first_token = 0
    _rows: DrafterRows

    def __init__(self, rows: DrafterRows, *, num_guesses: int, max_width: int) -> None:
        super().__init__(rows)
        assert rows.wants_features <= self.reads_features, rows.wants_features
        self._num_guesses, self._max_width = num_guesses, max_width

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> Self:
        """Opens a drafter of the bundle; raises BundleError if the scratch is too small for it."""
        info = require_config(info, ("num_guesses", "max_width"), ("drafter",))
        require_levels_fit(info, bundle.manifest.target.scratch)
        rows = DrafterRows.open(
            bundle,
            info.graphs["drafter"],
            runtime,
            target,
            wants_features=cls.reads_features,
            first_token=cls.first_token,
        )
        return cls(rows, num_guesses=info.config["num_guesses"], max_width=info.config["max_width"])

    def drafting(self, token: int, budget: Budget) -> Drafting:
        self._rows.add(token)
        levels = growing(token, budget, self._num_guesses, self._max_width)
        return grow_with(levels, self._expand)

    def _expand(self, nodes: TreeBuilder, first: int) -> Expanding:
        result = yield from self._rows.run_level(("guess_ids", "guess_log_probs"), nodes, first)
        return result["guess_ids"], result["guess_log_probs"]
