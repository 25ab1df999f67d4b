"""Drafts with block drafters (DFlash, DSpark), whose one graph run fills in a block of tokens."""

from __future__ import annotations

import numpy as np

from spec_runtime.backends import Runtime
from spec_runtime.bundle.manifest import Bundle, BundleError, DrafterInfo, require_config
from spec_runtime.loop.proposer import Drafting
from spec_runtime.loop.target import Target
from spec_runtime.proposers.heads import PAIRS, read_pairs
from spec_runtime.proposers.rows import DrafterRows, RowsProposer
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

KEYS = ("block_size", "first_row", "mask_token_base", "num_guesses")


class BlockProposer(RowsProposer):
    """Runs a graph once a step on the root and masks behind it, and grows a tree of the guesses.

    The cache has a row a committed position, made of the target's features alone; the block's rows
    are scratch. Example, block_size 3, committed tokens a b c (rows 0 and 1 done) and root d: the
    run has row 2, the feature of c, which stays, and the block d, mask, mask at positions 3, 4 and
    5, whose rows see the rows 0 to 2 and each other. The masks give the tokens at 4 and 5, or with
    first_row 0 all three the tokens at 4, 5 and 6.

    has_pairs: the graph says how likely each candidate is after each candidate of the guess before
    it (`pair_log_probs`). base: the input id of the token 0 as a root; a mask has 2 · base.
    """

    def __init__(self, rows: DrafterRows, base: int, block_size: int, has_pairs: bool) -> None:
        super().__init__(rows)
        self._block_ids = np.full(block_size, 2 * base, np.int64)
        self._base, self._has_pairs = base, has_pairs

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> BlockProposer:
        """Opens a drafter of the bundle; raises BundleError if its settings or its graph's outputs
        do not fit each other, or if the scratch is too small for a block."""
        info = require_config(info, KEYS, ("drafter",))
        size, first, base, num_guesses = (info.config[key] for key in KEYS)
        if first not in (0, 1) or num_guesses != size - first:
            raise BundleError(
                f"drafter {info.name!r}: got first_row {first} and num_guesses {num_guesses} of "
                f"{size} rows, expected first_row 0 or 1 and a guess of each row from it on"
            )
        scratch = bundle.manifest.target.scratch
        if size >= scratch:
            raise BundleError(
                f"drafter {info.name!r}: got block_size {size}, expected less than the bundle's "
                f"scratch of {scratch}"
            )
        rows = DrafterRows.open(
            bundle, info.graphs["drafter"], runtime, target, wants_features=True, block_row=first
        )
        return cls(rows, base, size, read_pairs(info, num_guesses))

    def drafting(self, token: int, budget: Budget) -> Drafting:
        self._rows.add(token)
        if budget.is_root_only:
            return TokenTree.root(token)
        self._block_ids[0] = self._base + token
        outputs = ["guess_ids", "guess_log_probs", *([PAIRS] if self._has_pairs else [])]
        assert isinstance(self._rows, DrafterRows)
        results = yield from self._rows.run(outputs, self._block_ids)
        guesses = Guesses(results["guess_ids"], results["guess_log_probs"], results.get(PAIRS))
        return grow(token, guesses, budget)
