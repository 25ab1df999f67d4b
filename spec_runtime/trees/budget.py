"""Says what a proposer may spend on one tree, and by which rule the tree is grown."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from spec_runtime.trees.tree import Draws


@dataclass(frozen=True, eq=False)
class DrawRule:
    """Children drawn from the drafter, `widths[d]` of each node at depth d: (1, 1, 1) is a chain,
    (3, 2) a tree of SpecInfer's kind. q is a drafter's candidates (those it returned, no others),
    tempered and renormalised."""

    widths: tuple[int, ...]
    temperature: float
    with_replacement: bool
    rng: np.random.Generator

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"got widths {self.widths}, expected 1 or more at each depth")
        if not self.temperature > 0:
            raise ValueError(f"got temperature {self.temperature}, expected above 0")

    def draw(self, id_C: np.ndarray, log_prob_C: np.ndarray, num_draws: int) -> Draws | None:
        """So many draws (without replacement not more than there are candidates); None if every
        candidate is impossible."""
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
class Budget:
    """What a proposer may spend on one tree.

    max_nodes counts the root; nodes whose path probability is below min_probability are left
    out; max_depth (root = 0) keeps the draft inside what may still be generated. paths: a static
    tree, these nodes whatever their probability, each by its candidates' ranks from the root down:
    ((0,), (1,), (0, 0)) is the two best guesses and the best one behind the first. truth: what
    really follows the root, to see how it is guessed; the tree is all candidates behind each of
    these tokens, however many nodes, down to the first that is not among them. draw: children are
    drawn, as many as max_nodes has room for, whatever their probability.

    step_ms: the time t(n) of a step with n = 1, 2, … max_nodes nodes; a grown tree is then cut
    where most tokens are expected a millisecond (payoff.py). level_ms: what each level of drafting
    after the first adds, for a drafter that runs them one by one. reliability: what a path's
    probability is worth, as points (predicted, observed), ascending; none = itself.
    """

    max_nodes: int
    min_probability: float = 0.0
    max_depth: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    truth: tuple[int, ...] | None = None
    step_ms: tuple[float, ...] = ()
    level_ms: float = 0.0
    reliability: tuple[tuple[float, ...], ...] = ()
    draw: DrawRule | None = None

    def __post_init__(self) -> None:
        if self.max_nodes < 1:
            raise ValueError(f"got max_nodes {self.max_nodes}, expected at least 1 (the root)")
        if not 0.0 <= self.min_probability <= 1.0:
            raise ValueError(f"got min_probability {self.min_probability}, expected 0 to 1")
        if self.max_depth is not None and self.max_depth < 0:
            raise ValueError(f"got max_depth {self.max_depth}, expected 0 or more")
        if self.paths is not None:
            self._check_paths(self.paths)
        if self.step_ms:
            self._check_times()
        self._check_reliability()

    def _check_times(self) -> None:
        if len(self.step_ms) < self.max_nodes or min(self.step_ms) <= 0 or self.level_ms < 0:
            raise ValueError(
                f"got {len(self.step_ms)} step times from {min(self.step_ms)} ms and level_ms "
                f"{self.level_ms}, expected positive ones for 1 to {self.max_nodes} nodes"
            )

    def _check_reliability(self) -> None:
        for (x, y), (next_x, next_y) in itertools.pairwise(((0.0, 0.0), *self.reliability)):
            if not (x < next_x <= 1 and y <= next_y <= 1):
                raise ValueError(
                    f"got reliability {self.reliability!r:.80}, expected pairs (predicted, "
                    "observed) from 0 to 1, ascending in both"
                )

    def _check_paths(self, paths: tuple[tuple[int, ...], ...]) -> None:
        known = {(), *paths}
        for path in paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise ValueError(
                    f"got path {list(path)}, expected ranks from 0 on, and the path to its parent "
                    "among the others"
                )
        if len(known) <= len(paths) or len(paths) >= self.max_nodes:
            raise ValueError(
                f"got {len(paths)} paths, expected different ones, fewer than max_nodes, "
                f"{self.max_nodes}"
            )

    @property
    def is_grown(self) -> bool:
        """By path probability; else the budget says which nodes, or how they are drawn."""
        return self.paths is None and self.truth is None and self.draw is None

    @property
    def is_root_only(self) -> bool:
        return self.max_nodes == 1 or self.max_depth == 0

    def within(self, max_depth: int) -> Budget:
        """The same budget, no deeper than `max_depth`."""
        if self.max_depth is not None and self.max_depth <= max_depth:
            return self
        return replace(self, max_depth=max_depth)

    def behind(self, num_nodes: int) -> Budget:
        """What is left where the tree has so many drafted nodes of another proposer already."""
        if not (self.step_ms and self.is_grown and num_nodes):
            return self
        return replace(self, max_nodes=self.max_nodes - num_nodes, step_ms=self.step_ms[num_nodes:])
