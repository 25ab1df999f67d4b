"""Says what a step takes on this machine: the cost curve t(n) of one request."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le, Len

from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError

CERTAIN = ((1.0, 1.0),)  # reliability: paths are accepted as often as predicted

# Bounds of what a file may say, so that nothing computed from it is zero or infinite: times of a
# microsecond to three hours, and rates in tokens a second.
Milliseconds = Annotated[float, Ge(1e-3), Le(1e7)]
MoreMilliseconds = Annotated[float, Ge(0), Le(1e7)]
Ratio = Annotated[float, Ge(1e-4), Le(1e6)]
Rate = Annotated[float, Ge(0), Le(1e9)]
NumNodes = Annotated[float, Ge(1), Le(bundles.LARGEST_SIZE)]
Spread = Annotated[float, Ge(1), Le(1e9)]

MOST_POINTS = 1000  # of a curve; each step reads all of them
PassTimes = Annotated[tuple[tuple[NumNodes, Milliseconds], ...], Len(1, MOST_POINTS)]


@dataclass(frozen=True)
class PassCosts:
    """Times in milliseconds after `context` committed rows; see Costs for the others."""

    context: bundles.Index
    verify: PassTimes
    plain: Milliseconds
    spread: Spread = 1.0


@dataclass(frozen=True)
class Costs:
    """Times in milliseconds.

    verify: pairs (nodes, ms of one pass), ascending. draft: drafting one level. level: drafting
    each further level. host: accepting, committing and the rest of a step. plain: a whole step of
    plain decoding. prefill: one prompt token. Passes were measured after `context` committed rows,
    and those of as many nodes after more rows, `far`, if the bundle has room for them. spread: how
    many times the least time of repeated passes their median was, 1 where none was repeated.
    """

    verify: PassTimes
    draft: MoreMilliseconds
    level: MoreMilliseconds
    host: MoreMilliseconds
    plain: Milliseconds
    prefill: MoreMilliseconds
    context: bundles.Index = 0
    far: PassCosts | None = None
    spread: Spread = 1.0

    def __post_init__(self) -> None:
        nodes, far = [n for n, _ in self.verify], self.far
        if any(n >= more for n, more in itertools.pairwise(nodes)):
            raise UserError(f"got verify of {nodes!r:.80} nodes, expected ascending numbers")
        if far is None:
            return
        if [n for n, _ in far.verify] != nodes:
            raise UserError(
                f"got far.verify of {[n for n, _ in far.verify]!r:.80} nodes, expected those of "
                f"verify, {nodes!r:.80}"
            )
        if far.context <= self.context:
            raise UserError(
                f"got far.context {far.context}, expected more than context, {self.context}"
            )

    def at(self, context: int) -> Costs:
        """Returns the costs after so many committed rows: on the line through the two contexts
        that were measured. Before the first of them, at least half of what was measured there: a
        slow moment at the second one would let the line fall below zero."""
        far = self.far
        if far is None:
            return self
        share = (context - self.context) / (far.context - self.context)

        def on_line(near_ms: float, far_ms: float) -> float:
            return max(near_ms / 2, near_ms + share * max(0.0, far_ms - near_ms))

        verify = tuple(
            (n, on_line(near_ms, far_ms))
            for (n, near_ms), (_, far_ms) in zip(self.verify, far.verify, strict=True)
        )
        plain = on_line(self.plain, far.plain)
        return dataclasses.replace(self, verify=verify, plain=plain, far=None)

    def step_ms(self, max_nodes: int) -> np.ndarray:
        """Returns f64[max_nodes]: the time of a step with one level of drafting and 1, 2, … nodes,
        interpolated between the sizes measured."""
        verify_N = np.interp(np.arange(1, max_nodes + 1), *self._verify_2P)
        return verify_N + self.draft + self.host

    def of(self, num_nodes: float, num_levels: float) -> float:
        """Returns the time of a step with trees of `num_nodes` nodes on average, root included, and
        `num_levels` levels of drafting."""
        drafting = self.draft + self.level * (num_levels - 1)
        return float(np.interp(num_nodes, *self._verify_2P)) + drafting + self.host

    @cached_property
    def _verify_2P(self) -> np.ndarray:
        return np.array(self.verify, np.float64).T


@dataclass(frozen=True)
class Gain:
    """Tokens committed a step, and how many times as fast as plain decoding they come."""

    accepted_length: Ratio
    speedup: Ratio
