"""Proposers turn a drafter, or a table of n-grams, into a tree; and the one table of them.

A proposer keeps its own state, in step with the target's committed rows. It never sees logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spec_runtime.proposers.base import PlainProposer, Proposer
from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.proposers.feature import FeatureProposer
from spec_runtime.proposers.heads import LastFeatureProposer, OnePassProposer, open_by_form
from spec_runtime.proposers.lookahead import NUM_NODES, LookaheadProposer
from spec_runtime.proposers.lookup import LookupProposer
from spec_runtime.proposers.sequential import SequentialProposer
from spec_runtime.proposers.skip_layer import SkipLayerProposer

if TYPE_CHECKING:
    from spec_runtime.backends import Runtime
    from spec_runtime.bundle import Bundle, DrafterInfo
    from spec_runtime.target import Target


ProposerFactory = Callable[["Bundle", "DrafterInfo | None", "Runtime", "Target"], Proposer]

# drafter name -> (bundle, its manifest entry, runtime, the target it drafts for) -> proposer
PROPOSERS: dict[str, ProposerFactory] = {
    "none": lambda bundle, info, runtime, target: PlainProposer(),
    "prompt_lookup": lambda bundle, info, runtime, target: (
        LookupProposer(max_matches=1) if target.chains_only else LookupProposer()
    ),
    "lookahead": lambda bundle, info, runtime, target: LookaheadProposer(),
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
