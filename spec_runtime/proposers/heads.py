"""Drafts with one-pass drafters, whose one graph run guesses all positions at once.

ParallelSpec, Amphista and Medusa differ in what they read: committed rows and mask rows behind
them, committed rows alone, or only the last feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_runtime.backends import Backend, Runtime
from spec_runtime.bundle.manifest import Bundle, BundleError, DrafterInfo, require_config
from spec_runtime.proposers.base import Follower
from spec_runtime.proposers.rows import DrafterRows, LastFeature
from spec_runtime.step import Step
from spec_runtime.target import Target
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

PAIRS = "pair_log_probs"


@dataclass(frozen=True, eq=False)
class GuessReader:
    """Reads the guesses of a one-pass drafter from its graph's outputs.

    has_pairs: the graph says how likely each candidate is behind each candidate of the guess before
    it (`pair_log_probs`). scale_K2: f64[K, 2], see Guesses.scaled; None leaves them as they are.
    """

    has_pairs: bool = False
    scale_K2: np.ndarray | None = None

    @classmethod
    def open(cls, info: DrafterInfo) -> GuessReader:
        """Returns the reader of this drafter; raises BundleError if its graph's outputs do not fit
        each other, or if its calibration is that of another number of guesses."""
        has_pairs = PAIRS in _output_shapes(info)
        scales = (info.calibration or {}).get("depth_scales")
        if has_pairs or scales is not None:
            require_config(info, ("num_guesses",), ("drafter",))
        if "num_guesses" not in info.config:
            return cls()
        num_guesses = info.config["num_guesses"]
        _require_guesses(info, num_guesses)
        if has_pairs:
            _require_pairs(info, num_guesses)
        if scales is None:
            return cls(has_pairs)
        if len(scales) != num_guesses:
            raise BundleError(
                f"drafter {info.name!r}: got depth_scales of {len(scales)} guesses, expected "
                f"{num_guesses}; run spec-export calibrate again"
            )
        return cls(has_pairs, np.array(scales, np.float64))

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs that are read."""
        return ["guess_ids", "guess_log_probs", *([PAIRS] if self.has_pairs else [])]

    def read(self, results: Mapping[str, np.ndarray]) -> Guesses:
        """Returns the guesses as the graph gives them, without scales."""
        pair_KCC = results[PAIRS] if self.has_pairs else None
        return Guesses(results["guess_ids"], results["guess_log_probs"], pair_KCC)

    def grow(self, token: int, guesses: Guesses, budget: Budget) -> TokenTree:
        """Returns the tree of these guesses, scaled, below the root `token`."""
        if self.scale_K2 is not None:
            guesses = guesses.scaled(self.scale_K2)
        return grow(token, guesses, budget)


def _require_guesses(info: DrafterInfo, num_guesses: int) -> None:
    """Raises BundleError unless the drafter's graph gives so many guesses, as far as the manifest
    says: a free axis has a row for the last token and one for each mask."""
    shapes = _output_shapes(info)
    shape = shapes.get("guess_ids", (num_guesses, 0))
    num_rows = shape[0] if len(shape) == 2 else 0
    if isinstance(num_rows, str):
        num_rows = 1 + info.config.get("num_masks", 0)
    if num_rows != num_guesses:
        raise BundleError(
            f"drafter {info.name!r}: got guess_ids as {list(shape)!r:.60} and num_masks "
            f"{info.config.get('num_masks', 0)} for num_guesses {num_guesses}, expected a row for "
            "each guess; build the bundle again"
        )
    log_probs = shapes.get("guess_log_probs", shape)
    if log_probs != shapes.get("guess_ids", log_probs):
        raise BundleError(
            f"drafter {info.name!r}: got guess_log_probs as {list(log_probs)!r:.60}, expected "
            f"{list(shape)!r:.60} as guess_ids; build the bundle again"
        )


def _require_pairs(info: DrafterInfo, num_guesses: int) -> None:
    """Raises BundleError unless the drafter's graph has pairs that fit its candidates."""
    shapes = _output_shapes(info)
    candidates = shapes.get("guess_ids", ())[1:]
    expected = (num_guesses - 1, *candidates, *candidates)
    got = shapes[PAIRS]
    if got != expected:
        raise BundleError(
            f"drafter {info.name!r}: got {PAIRS} as {list(got)!r:.60}, expected "
            f"{list(expected)!r:.60}; build the bundle again"
        )


def _output_shapes(info: DrafterInfo) -> dict[str, tuple[int | str, ...]]:
    return {spec.name: spec.shape for spec in info.graphs["drafter"].outputs}


class OnePassProposer:
    """Drafts with a graph that has a cache: runs the waiting rows and then `mask_ids` in one chain,
    and grows their guesses into a tree.

    Example, 2 masks, committed tokens a b c (rows 0 and 1 of the drafter done) and root d: the
    run has row 2 = (feature of c, d) and masks 1 and 2 at positions 3 and 4; the three guess
    the tokens at positions 4, 5 and 6. Row 2 stays, the mask rows are scratch. Without masks the
    last row gives all the guesses. If the masks read the root's token (`mask_reads_token`), d is
    added to each of `mask_ids`, which are then multiples of the vocabulary's size.
    """

    def __init__(
        self,
        rows: DrafterRows,
        mask_ids: Sequence[int] = (),
        reader: GuessReader = GuessReader(),
        mask_reads_token: bool = False,
    ) -> None:
        self.wants_features = rows.wants_features
        self.reader = reader
        self._rows = rows
        self._mask_ids = np.array(mask_ids, np.int64)
        self._mask_reads_token = mask_reads_token

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
        base, reads_token = info.config["mask_token_base"], info.config.get("mask_reads_token")
        mask_ids = mask_input_ids(base, num_masks, bool(reads_token))
        return cls(rows, mask_ids, GuessReader.open(info), bool(reads_token))

    @property
    def run_seconds(self) -> float:
        return self._rows.run_seconds

    def fusable(self) -> tuple[Follower, Backend | None]:
        """See base.Fusable."""
        return self._rows, self._rows.backend

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._rows.start(prompt, features_TF, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        if budget.is_root_only:
            self._rows.add(token)
            return TokenTree.root(token)
        return self.reader.grow(token, self.guess(token), budget)

    def guess(self, token: int) -> Guesses:
        """See base.Guesser."""
        self._rows.add(token)
        mask_ids = self._mask_ids + token if self._mask_reads_token else self._mask_ids
        return self.reader.read(self._rows.run(self.reader.outputs, mask_ids))

    def commit(self, step: Step) -> None:
        self._rows.commit(step)

    def truncate(self, length: int) -> None:
        self._rows.truncate(length)


class LastFeatureProposer:
    """Drafts with a graph that has no cache (Medusa): it reads `features` f32[1, F] of the last
    committed position and guesses what follows the root."""

    def __init__(self, last: LastFeature, reader: GuessReader = GuessReader()) -> None:
        self.wants_features = last.wants_features
        self.reader = reader
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
        last = LastFeature.open(bundle, info.graphs["drafter"], runtime, target)
        return cls(last, GuessReader.open(info))

    @property
    def run_seconds(self) -> float:
        return self._last.run_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._last.start(prompt, features_TF, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        if budget.is_root_only:
            return TokenTree.root(token)
        return self.reader.grow(token, self.guess(token), budget)

    def guess(self, token: int) -> Guesses:
        """See base.Guesser."""
        return self.reader.read(self._last.run(self.reader.outputs))

    def commit(self, step: Step) -> None:
        self._last.commit(step)

    def truncate(self, length: int) -> None:
        self._last.truncate(length)


def mask_input_ids(base: int, num_masks: int, mask_reads_token: bool) -> list[int]:
    """Returns the input ids of the masks 1 … K: base, base + 1, …; if they read the root's token,
    base, 2 · base, …, to which it is added."""
    return [k * base if mask_reads_token else base + k - 1 for k in range(1, num_masks + 1)]


def open_by_form(
    bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
) -> LastFeatureProposer | OnePassProposer:
    """Opens a drafter of the bundle as one or the other, as its graph is stateless or has a
    cache."""
    info = require_config(info, (), ("drafter",))
    is_stateless = info.graphs["drafter"].form == "stateless"
    proposer = LastFeatureProposer if is_stateless else OnePassProposer
    return proposer.open(bundle, info, runtime, target)
