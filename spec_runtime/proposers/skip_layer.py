"""Drafts with the target's first layers, on the target's own key/value rows.

The committed rows are there already. The drafter runs the root and then level after level into the
target's free slots and keeps nothing: the verify pass writes those slots anew with all layers.
"""

from __future__ import annotations

import numpy as np

from spec_runtime import backends
from spec_runtime.backends import Backend, GraphRun, Runtime
from spec_runtime.bundle.manifest import Bundle, BundleError, DrafterInfo, require_config
from spec_runtime.loop.kv import Cache
from spec_runtime.loop.proposer import Drafting, StatelessProposer, WithRuns, grow_with
from spec_runtime.loop.target import Target
from spec_runtime.proposers.rows import Expanding, require_levels_fit
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import TreeBuilder, growing


class SkipLayerProposer(WithRuns, StatelessProposer):
    """Runs `backend`, which shares the target's buffers, level by level.

    `cache` is the target's, and says where the rows go. One run of a level returns its nodes'
    guesses: `guess_ids` i64[M, C] and `guess_log_probs` f32[M, C].
    """

    def __init__(self, backend: Backend, cache: Cache, *, num_guesses: int, max_width: int) -> None:
        self.run_seconds = 0.0
        self._backend = backend
        self._cache = cache
        self._num_guesses = num_guesses
        self._max_width = max_width

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> SkipLayerProposer:
        """Opens a drafter of the bundle; raises BundleError for a graph that is not in the slots
        form, and if the scratch is too small for its levels."""
        info = require_config(info, ("num_guesses", "max_width"), ("drafter",))
        require_levels_fit(info, bundle.manifest.target.scratch)
        graph, (lender, cache) = info.graphs["drafter"], target.lend()
        if graph.form != "slots":
            # runs of another form would move the committed rows of some layers and not of others
            raise BundleError(
                f"drafter {info.name!r}: got a graph of the {graph.form} form, expected slots; "
                "build the bundle with --form slots"
            )
        return cls(
            backends.open_graph(bundle, graph, lender.capacity, runtime, share=lender),
            cache,
            num_guesses=info.config["num_guesses"],
            max_width=info.config["max_width"],
        )

    def drafting(self, token: int, budget: Budget) -> Drafting:
        levels = growing(token, budget, self._num_guesses, self._max_width)
        return grow_with(levels, self._expand)

    def _expand(self, nodes: TreeBuilder, first: int) -> Expanding:
        token_N = np.array(nodes.tokens[first:], np.int64)
        feeds = self._cache.place(np.array(nodes.parents, np.int64), first)
        feeds["input_ids"] = token_N[None]
        feeds["logit_rows"] = np.arange(len(token_N), dtype=np.int64)
        run = GraphRun(self._backend, feeds, ["guess_ids", "guess_log_probs"])
        yield run
        self.run_seconds += run.seconds
        return run.results["guess_ids"], run.results["guess_log_probs"]
