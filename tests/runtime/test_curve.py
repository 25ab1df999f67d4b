"""What is predicted of trees from how often a drafter's guesses are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tuning import ACCURACY, convex, stepped

from spec_runtime.measure import tune
from spec_runtime.pace.curve import Curve, grown_points, monotone, static_points
from spec_runtime.pace.profile import Costs
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.tree import TokenTree


def costs_of(verify: Callable[[int], float], **others: float) -> Costs:
    values: dict[str, Any] = {
        "draft": 1.0,
        "level": 0.0,
        "host": 0.5,
        "plain": verify(1) + 0.5,
        "prefill": 1.0,
    }
    return Costs(tuple((n, verify(n)) for n in tune.SIZES), **values | others)


@pytest.mark.parametrize("verify", [convex, stepped])
def test_static_predictions(verify: Callable[[int], float]) -> None:
    curve = Curve("run", ACCURACY)
    points = static_points(curve, costs_of(verify, level=0.25), 12)
    assert [point.nodes for point in points] == list(range(2, 13))
    first, second, third = points[:3]
    assert first.budget == Budget(2, growth=Static(((0,),)))
    assert second.budget.growth == Static(((0,), (0, 0)))
    assert third.accepted_length == pytest.approx(1 + 0.6 + 0.3 + 0.15)
    step_ms = verify(3) + 1.0 + 0.25 + 0.5
    assert second.speedup == pytest.approx(1.9 * (verify(1) + 0.5) / step_ms)
    best = max(points, key=lambda point: point.speedup)
    # beyond a step of verify nothing is won before the next one
    assert (best.nodes == 8) if verify is stepped else (2 < best.nodes < 12)


def test_grown_predictions() -> None:
    rows = ((0.1, 0.05, 2.0), (0.4, 0.3, 1.0), (0.9, 0.8, 0.5))
    points = grown_points(Curve("run", ACCURACY, rows), costs_of(convex, level=0.5), 16)
    assert [point.nodes for point in points] == [1.5, 2.5, 4.5]
    lengths = [point.accepted_length for point in points]
    assert lengths == pytest.approx([1.4, 1.7, 1.8])
    assert [point.budget.max_nodes for point in points] == [16, 16, 16]
    assert [point.budget.growth for point in points] == [Grown(0.6), Grown(0.2), Grown(0.05)]
    ms = np.interp(1.5, tune.SIZES, [convex(n) for n in tune.SIZES]) + 1.0 + 2 * 0.5 + 0.5
    assert points[0].speedup == pytest.approx(1.4 * (convex(1) + 0.5) / ms)
    lookup = Curve("run", by_node=((0.5, 0.2), (0.4, 0.1)))
    points = grown_points(lookup, costs_of(convex), 16)
    assert [point.budget for point in points] == [Budget(2), Budget(3)]
    assert [(p.nodes, p.accepted_length) for p in points] == [(1.5, 1.2), (1.9, pytest.approx(1.3))]


def test_observed_in_a_run() -> None:
    def tree(probabilities: list[float]) -> TokenTree:
        parents = np.array([0, 0, 0, 1])  # 5 has 7 and 8; 7 has 9
        return TokenTree(np.array([5, 7, 8, 9]), parents, np.log(np.array([1.0, *probabilities])))

    sure, unsure = tree([0.9, 0.06, 0.5]), tree([0.5, 0.3, 0.1])
    seen = [(sure, [0, 1, 3])] * 8 + [(unsure, [0, 1])] * 4 + [(unsure, [0, 2])] * 4
    curve = Curve.observed(seen)
    # after 7, which came true twelve times of sixteen, 9 did eight times
    assert np.array(curve.accuracy) == pytest.approx(np.array([[12 / 16, 4 / 16], [8 / 16, 0]]))
    found = {round(p, 3): (hit, count) for p, hit, count in curve.reliability}
    expected = {
        0.9: (1.0, 0.5),
        0.5: (12 / 16, 1.0),  # `sure`'s 9 and `unsure`'s 7
        0.3: (0.5, 0.5),
        0.1: (0.0, 0.5),
        0.06: (0.0, 0.5),
    }
    assert found == expected
    no_match = TokenTree.root(5)
    lookups = [(replace(sure, log_prob_N=None), [0, 1, 3])] * 3 + [(no_match, [0])]
    by_node = Curve.observed(lookups).by_node
    assert by_node == ((0.75, 0.75), (0.75, 0.0), (0.75, 0.75))


def test_monotone_pools_what_is_out_of_order() -> None:
    assert monotone([(0.2, 0.1, 3), (0.1, 0.3, 1)]) == (
        (0.1, pytest.approx(0.15)),
        (0.2, pytest.approx(0.15)),
    )
    rng = np.random.default_rng(0)
    rows = [(p, float(rng.uniform()), float(rng.uniform(0, 5))) for p in rng.uniform(size=30)]
    Grown(step_ms=(1.0,), reliability=monotone([*rows, (0.0, 0.5, 1), (0.5, 0.5, 0)]))
