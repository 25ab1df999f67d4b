"""Drafts with one-pass drafters, whose one graph run guesses all positions at once.

ParallelSpec, Amphista and Medusa differ in what they read: committed rows and mask rows after them,
only committed rows, or only the last feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_runtime.backends import Runtime
from spec_runtime.bundle.manifest import Bundle, BundleError, DrafterInfo, require_config
from spec_runtime.loop.proposer import Drafting
from spec_runtime.loop.target import Target
from spec_runtime.proposers.rows import DrafterRows, LastFeature, RowsProposer
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

PAIRS = "pair_log_probs"


class OnePassProposer(RowsProposer):
    """Runs a graph once a step and grows its guesses into a tree.

    `rows` feeds the graph. If the graph has a cache, the waiting rows are run and then `mask_ids`,
    in one chain. Example, 2 masks, committed tokens a b c (rows 0 and 1 of the drafter done) and
    root d: the run has row 2 = (feature of c, d) and masks 1 and 2 at positions 3 and 4; the three
    guess the tokens at positions 4, 5 and 6. Row 2 stays, the mask rows are scratch. Without masks
    the last row gives all the guesses.

    has_pairs: the graph says how likely each candidate is after each candidate of the guess before
    it (`pair_log_probs`).
    """

    def __init__(
        self,
        rows: DrafterRows | LastFeature,
        mask_ids: Sequence[int] = (),
        has_pairs: bool = False,
    ) -> None:
        super().__init__(rows)
        self._mask_ids = np.array(mask_ids, np.int64)
        self._has_pairs = has_pairs

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> OnePassProposer:
        """Opens a drafter of the bundle; raises BundleError if its graph's outputs do not fit each
        other, or if the scratch is too small for it."""
        info = require_config(info, (), ("drafter",))
        graph = info.graphs["drafter"]
        if graph.form == "stateless":
            last = LastFeature.open(bundle, graph, runtime, target)
            return cls(last, has_pairs=read_pairs(info))
        info = require_config(info, ("num_masks", "mask_token_base", "inputs"), ("drafter",))
        num_masks, scratch = info.config["num_masks"], bundle.manifest.target.scratch
        if num_masks >= scratch:
            raise BundleError(
                f"drafter {info.name!r}: got {num_masks} masks, expected fewer than the bundle's "
                f"scratch of {scratch}"
            )
        rows = DrafterRows.open(
            bundle,
            graph,
            runtime,
            target,
            wants_features=info.config["inputs"] != "tokens",
            first_token=info.config.get("first_token", 1),
            repeat_feature=info.config.get("mask_feature") == "anchor",
        )
        base = info.config["mask_token_base"]
        return cls(rows, range(base, base + num_masks), read_pairs(info))

    def drafting(self, token: int, budget: Budget) -> Drafting:
        self._rows.add(token)
        if budget.is_root_only:
            return TokenTree.root(token)
        outputs = ["guess_ids", "guess_log_probs", *([PAIRS] if self._has_pairs else [])]
        if isinstance(self._rows, LastFeature):
            results = yield from self._rows.run(outputs)
        else:
            results = yield from self._rows.run(outputs, self._mask_ids)
        guesses = Guesses(results["guess_ids"], results["guess_log_probs"], results.get(PAIRS))
        return grow(token, guesses, budget)


def read_pairs(info: DrafterInfo, free_rows: int | None = None) -> bool:
    """Returns whether a one-pass drafter's graph conditions its guesses in pairs.

    Raises BundleError if the graph's outputs do not fit each other or the number of guesses. A free
    axis has `free_rows` rows, by default one for the last token and one for each mask.
    """
    shapes = {spec.name: spec.shape for spec in info.graphs["drafter"].outputs}
    has_pairs = PAIRS in shapes
    if has_pairs:
        require_config(info, ("num_guesses",), ("drafter",))
    if "num_guesses" not in info.config:
        return False
    num_guesses, num_masks = info.config["num_guesses"], info.config.get("num_masks", 0)
    ids = shapes.get("guess_ids", (num_guesses, 0))
    num_rows = ids[0] if len(ids) == 2 else 0
    if free_rows is None:
        free_rows = 1 + num_masks
    if (free_rows if isinstance(num_rows, str) else num_rows) != num_guesses:
        raise BundleError(
            f"drafter {info.name!r}: got guess_ids as {list(ids)!r:.60} and num_masks {num_masks} "
            f"for num_guesses {num_guesses}, expected a row for each guess; build the bundle again"
        )
    expected = {"guess_log_probs": ids, PAIRS: (num_guesses - 1, *ids[1:], *ids[1:])}
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            raise BundleError(
                f"drafter {info.name!r}: got {name} as {list(shapes[name])!r:.60}, expected "
                f"{list(shape)!r:.60}; build the bundle again"
            )
    return has_pairs
