"""Lists the proposers: what turns a drafter, or a table of n-grams, into trees.

A proposer keeps its own state, in step with the target's committed rows. It never sees logits. This
table imports every kind of proposer, so nothing that it imports may import this package itself.
"""

from collections.abc import Callable

from spec_runtime.backends import Runtime
from spec_runtime.bundle.manifest import Bundle, DrafterInfo
from spec_runtime.loop.proposer import PlainProposer, Proposer
from spec_runtime.loop.target import Target
from spec_runtime.proposers.block import BlockProposer
from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.proposers.feature import FeatureProposer
from spec_runtime.proposers.heads import OnePassProposer
from spec_runtime.proposers.lookahead import NUM_NODES, LookaheadProposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.sequential import SequentialProposer
from spec_runtime.proposers.skip_layer import SkipLayerProposer

ProposerFactory = Callable[[Bundle, DrafterInfo | None, Runtime, Target], Proposer]

# drafter name -> what makes its proposer of (bundle, the drafter's manifest entry, runtime, the
# target to draft for)
PROPOSERS: dict[str, ProposerFactory] = {
    "none": lambda bundle, info, runtime, target: PlainProposer(),
    "prompt_lookup": lambda bundle, info, runtime, target: MergedProposer(PlainProposer()),
    "lookahead": lambda bundle, info, runtime, target: LookaheadProposer(),
    "parallelspec": OnePassProposer.open,
    "eagle": FeatureProposer.open,
    "eagle3": FeatureProposer.open,
    "peagle": OnePassProposer.open,
    "pard": OnePassProposer.open,
    "dflash": BlockProposer.open,
    "draft_model": DraftModelProposer.open,
    "medusa": OnePassProposer.open,
    "amphista": OnePassProposer.open,
    "hydra": SequentialProposer.open,
    "semi_autoregressive": SequentialProposer.open,
    "redrafter": SequentialProposer.open,
    "skip_layer": SkipLayerProposer.open,
}
# These need no trained drafter, so every bundle has them.
BUILT_IN = ("prompt_lookup", "lookahead", "none")
# The nodes of their trees, where the default budget is too small.
BUILT_IN_NODES = {"lookahead": NUM_NODES}
