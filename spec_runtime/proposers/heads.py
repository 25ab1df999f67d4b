"""Drafts with one-pass drafters, whose one graph run guesses all positions at once.

ParallelSpec, Amphista and Medusa differ in what they read: committed rows and mask rows behind
them, committed rows alone, or only the last feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_runtime.backends import Backend, Runtime
from spec_runtime.bundle import Bundle, BundleError, DrafterInfo, require_config
from spec_runtime.proposers.base import Follower
from spec_runtime.proposers.rows import DrafterRows, LastFeature
from spec_runtime.step import Step
from spec_runtime.target import Target
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree


class OnePassProposer:
    """Drafts with a graph that has a cache: runs the waiting rows and then `mask_ids` in one chain,
    and grows their guesses into a tree.

    Example, 2 masks, committed tokens a b c (rows 0 and 1 of the drafter done) and root d: the
    run has row 2 = (feature of c, d) and masks 1 and 2 at positions 3 and 4; the three guess
    the tokens at positions 4, 5 and 6. Row 2 stays, the mask rows are scratch. Without masks the
    last row gives all the guesses.
    """

    def __init__(self, rows: DrafterRows, mask_ids: Sequence[int] = ()) -> None:
        self.wants_features = rows.wants_features
        self._rows = rows
        self._mask_ids = np.array(mask_ids, np.int64)

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> OnePassProposer:
        """Opens a drafter of the bundle; raises BundleError if the scratch is too small for it."""
        info = require_config(info, ("num_masks", "mask_token_base", "inputs"), ("drafter",))
        num_masks, scratch = info.config["num_masks"], bundle.manifest.target.scratch
        if num_masks >= scratch:
            raise BundleError(
                f"drafter {info.name!r}: got {num_masks} masks, expected fewer than the bundle's "
                f"scratch of {scratch}"
            )
        rows = DrafterRows.open(
            bundle,
            info.graphs["drafter"],
            runtime,
            target,
            wants_features=info.config["inputs"] != "tokens",
            repeat_feature=info.config.get("mask_feature") == "anchor",
        )
        base = info.config["mask_token_base"]
        return cls(rows, range(base, base + num_masks))

    @property
    def run_seconds(self) -> float:
        return self._rows.run_seconds

    def fusable(self) -> tuple[Follower, Backend | None]:
        """See base.Fusable."""
        return self._rows, self._rows.backend

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._rows.start(prompt, features_TF, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self._rows.add(token)
        if budget.is_root_only:
            return TokenTree.root(token)
        guesses = self._rows.run(["guess_ids", "guess_log_probs"], self._mask_ids)
        found = Guesses(guesses["guess_ids"], guesses["guess_log_probs"])
        return grow(token, found, budget)

    def commit(self, step: Step) -> None:
        self._rows.commit(step)

    def truncate(self, length: int) -> None:
        self._rows.truncate(length)


class LastFeatureProposer:
    """Drafts with a graph that has no cache (Medusa): it reads `features` f32[1, F] of the last
    committed position and guesses what follows the root."""

    def __init__(self, last: LastFeature) -> None:
        self.wants_features = last.wants_features
        self._last = last

    def fusable(self) -> tuple[Follower, Backend | None]:
        """See base.Fusable."""
        return self, None

    def enter(self, token: int) -> None:
        """See base.Follower."""

    def follow(self, tokens: list[int]) -> None:
        """See base.Follower."""

    def leave(self, feature_1F: np.ndarray) -> None:
        """See base.Follower."""
        self._last.take(feature_1F)

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> LastFeatureProposer:
        """Opens a drafter of the bundle."""
        info = require_config(info, (), ("drafter",))
        return cls(LastFeature.open(bundle, info.graphs["drafter"], runtime, target))

    @property
    def run_seconds(self) -> float:
        return self._last.run_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._last.start(prompt, features_TF, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        if budget.is_root_only:
            return TokenTree.root(token)
        guesses = self._last.run(["guess_ids", "guess_log_probs"])
        found = Guesses(guesses["guess_ids"], guesses["guess_log_probs"])
        return grow(token, found, budget)

    def commit(self, step: Step) -> None:
        self._last.commit(step)

    def truncate(self, length: int) -> None:
        self._last.truncate(length)


def open_by_form(
    bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
) -> LastFeatureProposer | OnePassProposer:
    """Opens a drafter of the bundle as one or the other, as its graph is stateless or has a
    cache."""
    info = require_config(info, (), ("drafter",))
    is_stateless = info.graphs["drafter"].form == "stateless"
    proposer = LastFeatureProposer if is_stateless else OnePassProposer
    return proposer.open(bundle, info, runtime, target)
