"""Keeps any drafter's trees inside a grammar."""

from dataclasses import replace

from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.loop.proposer import Drafting, Proposer
from spec_runtime.loop.step import Step
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import Budget


class ConstrainedProposer(ProposerWrapper):
    """Restricts the trees of `proposer` to a grammar, see PathMasks.restrict; `room` is the largest
    tree that the target takes.

    A proposer that reads the target's answers to its own nodes (lookahead) gets them only for trees
    that the grammar left as they were.
    """

    def __init__(self, proposer: Proposer, masks: PathMasks, room: int) -> None:
        super().__init__(proposer)
        self._masks, self._room = masks, room
        self._is_changed = False

    def drafting(self, token: int, budget: Budget) -> Drafting:
        tree = yield from super().drafting(token, budget)
        max_depth = self._room if budget.max_depth is None else budget.max_depth
        restricted = self._masks.restrict(tree, budget.max_nodes, max_depth, self._room)
        self._is_changed = restricted is not tree
        return restricted

    def commit(self, step: Step) -> None:
        super().commit(replace(step, verified=None) if self._is_changed else step)
