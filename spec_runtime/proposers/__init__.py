"""Proposers turn a drafter, or a table of n-grams, into a tree; and the one table of them.

A proposer keeps its own state, in step with the target's committed rows. It never sees logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.proposers.feature import FeatureProposer
from spec_runtime.proposers.heads import LastFeatureProposer, OnePassProposer, open_by_form
from spec_runtime.proposers.lookahead import NUM_NODES, LookaheadProposer
from spec_runtime.proposers.lookup import LookupProposer
from spec_runtime.proposers.sequential import SequentialProposer
from spec_runtime.proposers.skip_layer import SkipLayerProposer
from spec_runtime.tree import Budget, TokenTree

if TYPE_CHECKING:
    from spec_runtime.bundle import Bundle, DrafterInfo
    from spec_runtime.generate import Step
    from spec_runtime.target import Target


class Proposer(Protocol):
    """What the loop sees of a drafter.

    Between calls a proposer has seen as many tokens as the target has committed rows; the root
    of the next tree comes with `propose`.
    """

    wants_features: bool

    @property
    def run_seconds(self) -> float:
        """Spent in engine runs so far; 0.0 without an engine."""

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        """After prefill. `reused` prompt tokens were there before; features are of the others."""

    def propose(self, token: int, budget: Budget) -> TokenTree:
        """A tree rooted at `token`, the last committed token."""

    def commit(self, step: Step) -> None:
        """What became of the tree last proposed."""

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; 0 must work from any state."""


class PlainProposer:
    """Plain decoding: every tree is its root."""

    wants_features = False
    run_seconds = 0.0

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        pass

    def propose(self, token: int, budget: Budget) -> TokenTree:
        return TokenTree.root(token)

    def commit(self, step: Step) -> None:
        pass

    def truncate(self, length: int) -> None:
        pass


ProposerFactory = Callable[["Bundle", "DrafterInfo | None", "int | None", "Target"], Proposer]

# drafter name -> (bundle, its manifest entry, threads, the target it drafts for) -> proposer
PROPOSERS: dict[str, ProposerFactory] = {
    "none": lambda bundle, info, threads, target: PlainProposer(),
    "prompt_lookup": lambda bundle, info, threads, target: (
        LookupProposer(max_matches=1) if target.chains_only else LookupProposer()
    ),
    "lookahead": lambda bundle, info, threads, target: LookaheadProposer(),
    "parallelspec": OnePassProposer.open,
    "eagle": FeatureProposer.open,
    "draft_model": DraftModelProposer.open,
    "medusa": LastFeatureProposer.open,
    "amphista": open_by_form,
    "hydra": SequentialProposer.open,
    "semi_autoregressive": SequentialProposer.open,
    "redrafter": SequentialProposer.open,
    "skip_layer": SkipLayerProposer.open,
}
# those that need no trained drafter: every bundle has them
BUILT_IN = ("prompt_lookup", "lookahead", "none")
# their trees, where the default of the engine is too small
BUILT_IN_NODES = {"lookahead": NUM_NODES}
