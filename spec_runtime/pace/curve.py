"""Predicts how long and how fast trees of each size are, from how often a drafter's guesses are
right.

The speed-up of trees of n nodes over plain decoding is Medusa's acceleration rate over its overhead
(figure 4b there),

    speedup(n) = L(n) / (t(n) / t_plain),    t(n) = draft + verify(n) + host

with the accepted length L of the bundle's calibration, or of a short run if it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spec_runtime.pace.profile import Costs
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.templates import path_probabilities, searched
from spec_runtime.trees.tree import TokenTree

MIN_VISITS = 8  # of a depth, for its accuracies to count
# a path probability falls into one of these bins; the ratio of neighbours is about 1.4
EDGES = (*(0.7**k for k in range(20)), 0.0)

CERTAIN = ((1.0, 1.0),)  # reliability: every probability is worth itself

Seen = tuple[TokenTree, list[int]]  # a tree and the path in it (node ids) that came true


@dataclass(frozen=True)
class Curve:
    """Says how often the nodes of a drafter's trees are right.

    source: "calibration" (the bundle's) or "run". accuracy[k][r]: see templates. reliability: rows
    (predicted path probability, observed acceptance, such nodes per position). A proposer that
    gives no probabilities has `by_node` instead: for the n-th drafted node, the share of trees that
    have it and the share of trees in which it is accepted.
    """

    source: str
    accuracy: tuple[tuple[float, ...], ...] = ()
    reliability: tuple[tuple[float, float, float], ...] = ()
    by_node: tuple[tuple[float, float], ...] = ()

    @classmethod
    def from_calibration(cls, calibration: dict[str, Any]) -> Curve:
        """Returns the curve of a bundle's calibration, see DrafterInfo."""
        positions = calibration["positions"]
        return cls(
            "calibration",
            tuple(tuple(row) for row in calibration["accuracy"]),
            tuple((p, seen, n / positions) for p, seen, n in calibration["reliability"]),
        )

    @classmethod
    def observed(cls, seen: Sequence[Seen]) -> Curve:
        """Returns the curve of the trees of a run and the paths in them that came true."""
        trees = [tree for tree, _ in seen]
        num_nodes = max((tree.num_nodes for tree in trees), default=1)
        if num_nodes == 1 or any(t.log_prob_N is None and t.num_nodes > 1 for t in trees):
            return cls("run", by_node=_shares_by_node(seen, num_nodes))
        return cls("run", _observed_accuracy(seen), _observed_reliability(seen))


def _shares_by_node(seen: Sequence[Seen], num_nodes: int) -> tuple[tuple[float, float], ...]:
    has_N, hit_N = np.zeros(num_nodes), np.zeros(num_nodes)
    for tree, path in seen:
        has_N[: tree.num_nodes] += 1
        hit_N[path] += 1
    shares = np.stack([has_N, hit_N], axis=1)[1:] / max(1, len(seen))
    return tuple((has, hit) for has, hit in shares.tolist())


def _observed_accuracy(seen: Sequence[Seen]) -> tuple[tuple[float, ...], ...]:
    """Returns the accuracies down to the last depth that was visited often enough."""
    trees = [tree for tree, _ in seen]
    depth = max(int(tree.depth_N.max()) for tree in trees)
    width = max(len(tree.children(node)) for tree in trees for node in range(tree.num_nodes))
    visits_K, hits_KC = np.zeros(depth), np.zeros((depth, width))
    for tree, path in seen:
        # siblings come best first; one that was not drafted counts as never right
        for k, node in enumerate(path[:depth]):
            visits_K[k] += 1
            if k + 1 < len(path):
                hits_KC[k, tree.children(node).index(path[k + 1])] += 1
    enough = int(np.argmin(np.append((visits_K >= MIN_VISITS) & (hits_KC.sum(axis=1) > 0), False)))
    accuracy_KC = hits_KC[:enough] / visits_K[:enough, None]
    return tuple(tuple(row) for row in accuracy_KC.tolist())


def _observed_reliability(seen: Sequence[Seen]) -> tuple[tuple[float, float, float], ...]:
    count_B, predicted_B, hit_B = np.zeros((3, len(EDGES)))
    for tree, path in seen:
        if tree.log_prob_N is None:
            continue
        p_N = np.exp(tree.log_prob_N[1:])
        bin_N = np.searchsorted(-np.array(EDGES), -p_N)
        np.add.at(count_B, bin_N, 1)
        np.add.at(predicted_B, bin_N, p_N)
        np.add.at(hit_B, bin_N, np.isin(np.arange(1, tree.num_nodes), path))
    used = count_B > 0
    rows = np.stack([predicted_B, hit_B, count_B * count_B / len(seen)], axis=1)[used]
    return tuple((p, hit, n) for p, hit, n in (rows / count_B[used, None]).tolist())


def monotone(rows: Iterable[tuple[float, float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns rows (predicted, observed, weight) as points (predicted, observed) ascending in both:
    neighbours in the wrong order get their common mean.

    Example: (.1, .3, 1), (.2, .1, 3) -> (.1, .15), (.2, .15).
    """
    blocks: list[tuple[float, float, list[float]]] = []
    by_predicted = {min(row[0], 1.0): row for row in rows if row[0] > 0 and row[2] > 0}
    for predicted, (_, observed, weight) in sorted(by_predicted.items()):
        block = (observed, weight, [predicted])
        while blocks and blocks[-1][0] >= block[0]:
            seen, w, members = blocks.pop()
            total = w + block[1]
            block = ((seen * w + block[0] * block[1]) / total, total, members + block[2])
        blocks.append(block)
    return tuple((p, seen) for seen, _, members in blocks for p in members)


@dataclass(frozen=True)
class Point:
    """Predicts one size of tree: its nodes (on average, root included), the accepted length to be
    expected and the speed-up that follows."""

    budget: Budget
    nodes: float
    accepted_length: float
    speedup: float

    @classmethod
    def predicted(
        cls, budget: Budget, nodes: float, accepted_length: float, num_levels: int, costs: Costs
    ) -> Point:
        """Returns the point whose speed-up follows from the costs of `nodes` and `num_levels`."""
        speedup = accepted_length * costs.plain / costs.of(nodes, num_levels)
        return cls(budget, nodes, accepted_length, speedup)


def static_points(curve: Curve, costs: Costs, max_nodes: int) -> list[Point]:
    """Returns the best static tree of each size from 2 nodes on, by the accuracies."""
    if not curve.accuracy:
        return []
    paths = searched(curve.accuracy, max_nodes)
    worth = path_probabilities(paths, curve.accuracy)
    points, length = [], 1.0
    for n, path in enumerate(paths, 2):
        length += worth[path]
        kept = paths[: n - 1]
        points.append(Point.predicted(Budget.static(kept), n, length, max(map(len, kept)), costs))
    return points


def grown_points(curve: Curve, costs: Costs, max_nodes: int) -> list[Point]:
    """Returns grown trees of each size, or, for a curve with reliability, grown down to a least
    probability between each two of its rows."""
    points: list[Point] = []
    nodes = length = 1.0
    for n, (has, hit) in enumerate(curve.by_node[: max_nodes - 1], 2):
        nodes, length = nodes + has, length + hit
        points.append(Point.predicted(Budget(n), nodes, length, 1, costs))
    rows = sorted(curve.reliability, reverse=True)
    lower = [*(row[0] for row in rows[1:]), 0.0]
    num_levels = max(1, len(curve.accuracy))
    for (predicted, seen, count), below in zip(rows, lower, strict=False):
        if predicted > 0 and nodes + count <= max_nodes:
            nodes, length = nodes + count, length + seen * count
            least = (predicted * below) ** 0.5 or predicted / 2
            budget = Budget(max_nodes, growth=Grown(round(least, 5)))
            points.append(Point.predicted(budget, nodes, length, num_levels, costs))
    return points


def cut_budget(budget: Budget, costs: Costs) -> Budget:
    """Returns a grown budget whose trees are cut at each step where more nodes do not pay, with
    every probability worth itself."""
    assert isinstance(budget.growth, Grown), budget.growth
    step_ms = costs.step_ms(budget.max_nodes)
    growth = replace(budget.growth, step_ms=step_ms, level_ms=costs.level, reliability=CERTAIN)
    return replace(budget, growth=growth)


def paying_budget(curve: Curve, costs: Costs, max_nodes: int) -> Budget:
    """Returns the budget whose trees are cut at each step where more nodes do not pay.

    Its least probability leaves out only nodes that never could pay: a node pays if it adds more
    than the rate of the lone root times the least slope of t.
    """
    reliability = monotone(curve.reliability)
    step_ms = costs.step_ms(max_nodes)
    t_N = np.array(step_ms)
    later, sooner = np.tril_indices(len(t_N), -1)
    slope = ((t_N[later] - t_N[sooner]) / (later - sooner)).min(initial=np.inf)
    longest = t_N[0] + costs.level * max(0, len(curve.accuracy) - 1)
    least = min(1.0, max(0.0, slope / longest))
    if reliability:
        predicted, seen = np.array([(0.0, 0.0), *reliability]).T
        least = float(np.interp(least, seen, predicted))
    # a little less than the bound, because of rounding
    return Budget(max_nodes, growth=Grown(0.999 * least, step_ms, costs.level, reliability))
