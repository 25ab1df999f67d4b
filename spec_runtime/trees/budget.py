"""Says how large a token tree may get, and by which rule a proposer grows it.

A `Budget` is sizes plus one growth: `Grown` (the most probable paths), `Static` (these nodes,
whatever their probability), `Drawn` (children drawn from the drafter) or `AlongTruth` (every
candidate along a known continuation).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.tree import Draws
from spec_runtime.trees.worth import Terms

RankPath = tuple[int, ...]  # a node by its candidates' ranks from the root down


@dataclass(frozen=True)
class Grown:
    """Grows the most probable paths, and cuts the tree where more nodes would not pay.

    min_probability: nodes whose path probability is below it are left out. reliability: how often
    paths are accepted, as points (predicted, observed), ascending in both; without points as often
    as predicted. terms: what nodes cost now, if it is known.
    """

    min_probability: float = 0.0
    reliability: tuple[tuple[float, float], ...] = ()
    terms: Terms | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_probability <= 1.0:
            raise UserError(f"got min_probability {self.min_probability}, expected 0 to 1")
        for (x, y), (next_x, next_y) in itertools.pairwise(((0.0, 0.0), *self.reliability)):
            if not (x < next_x <= 1 and y <= next_y <= 1):
                raise UserError(
                    f"got reliability {self.reliability!r:.80}, expected pairs (predicted, "
                    "observed) from 0 to 1, ascending in both"
                )

    @property
    def log_floor(self) -> float:
        """The logarithm of `min_probability`, minus infinity where that is 0."""
        return math.log(self.min_probability) if self.min_probability > 0 else -math.inf


@dataclass(frozen=True)
class Static:
    """Takes the nodes of `paths`, whatever their probability.

    Example: ((0,), (1,), (0, 0)) is the two best guesses and the best guess after the first.
    """

    paths: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise UserError(
                    f"got path {list(path)}, expected ranks from 0 on, and the path to its parent "
                    "among the others"
                )
        if len(known) <= len(self.paths):
            raise UserError(f"got {len(self.paths)} paths, expected different ones")


@dataclass(frozen=True, eq=False)
class Drawn:
    """Draws children from the drafter, whatever their probability: `widths[d]` for each node at
    depth d.

    Widths (1, 1, 1) are a chain, (3, 2) a tree of SpecInfer's kind. max_nodes limits how many are
    drawn. q is the distribution over the candidates that the drafter returned (and no others),
    tempered and renormalised.
    """

    widths: tuple[int, ...]
    temperature: float
    with_replacement: bool
    rng: np.random.Generator

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise UserError(f"got widths {self.widths}, expected 1 or more at each depth")
        if not self.temperature > 0:
            raise UserError(f"got temperature {self.temperature}, expected above 0")

    def draw(self, id_C: np.ndarray, log_prob_C: np.ndarray, num_draws: int) -> Draws | None:
        """Draws `num_draws` of the candidates `id_C` i64[C] with log-probabilities `log_prob_C`
        f32[C]; without replacement at most as many as there are.

        Returns None if every candidate is impossible.
        """
        scaled = log_prob_C.astype(np.float64) / self.temperature
        if not scaled.max() > -math.inf:
            return None
        q_C = np.exp(scaled - scaled.max())
        q_C /= q_C.sum()
        if self.with_replacement:
            order = self.rng.choice(len(q_C), num_draws, p=q_C)
        else:  # the largest of log q + Gumbel noise come in the order of draws
            possible = np.flatnonzero(q_C)
            score = np.log(q_C[possible]) + self.rng.gumbel(size=len(possible))
            order = possible[np.argsort(-score)[:num_draws]]
        return Draws(id_C.copy(), q_C, tuple(order.tolist()), self.with_replacement)


@dataclass(frozen=True)
class AlongTruth:
    """Takes all candidates after each of `tokens`, which are what really follows the root, down to
    the first token that is not among the candidates.

    Shows how a known continuation is guessed. max_nodes does not limit this tree.
    """

    tokens: tuple[int, ...]


Growth = Grown | Static | Drawn | AlongTruth


@dataclass(frozen=True)
class Budget:
    """Limits one tree: `max_nodes` counts the root, `max_depth` (the root has depth 0) keeps the
    draft inside what may still be generated; `growth` says which nodes to take. With a `coupling`
    the probabilities of grown trees say how likely its noise draws a node."""

    max_nodes: int
    max_depth: int | None = None
    growth: Growth = Grown()
    coupling: Coupling | None = None

    def __post_init__(self) -> None:
        if self.max_nodes < 1:
            raise UserError(f"got max_nodes {self.max_nodes}, expected at least 1 (the root)")
        if self.max_depth is not None and self.max_depth < 0:
            raise UserError(f"got max_depth {self.max_depth}, expected 0 or more")
        match self.growth:
            case Static(paths) if len(paths) >= self.max_nodes:
                raise UserError(
                    f"got {len(paths)} paths, expected different ones, fewer than max_nodes, "
                    f"{self.max_nodes}"
                )

    @property
    def is_root_only(self) -> bool:
        """True if no node fits but the root."""
        return self.max_nodes == 1 or self.max_depth == 0

    def rooted_at(self, position: int) -> Budget:
        """Returns this budget for a root at `position`."""
        if self.coupling is None:
            return self
        return replace(self, coupling=self.coupling.rooted_at(position))

    def at_most(self, max_nodes: int) -> Budget:
        """Returns this budget with trees of at most `max_nodes` nodes; of a static tree it has the
        first paths, shorter ones first."""
        if self.max_nodes <= max_nodes:
            return self
        growth = self.growth
        if isinstance(growth, Static):
            if max_nodes == 1:
                return self.within(0)
            growth = Static(tuple(sorted(growth.paths, key=len)[: max_nodes - 1]))
        return replace(self, max_nodes=max_nodes, growth=growth)

    def within(self, max_depth: int) -> Budget:
        """Returns this budget with trees no deeper than `max_depth`."""
        if self.max_depth is not None and self.max_depth <= max_depth:
            return self
        return replace(self, max_depth=max_depth)
