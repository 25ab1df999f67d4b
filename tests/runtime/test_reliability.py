"""How often recorded trees are right, and what they would give at other costs."""

from __future__ import annotations

import numpy as np
import pytest
from tuning import COSTS

from spec_runtime.pace.costs import CERTAIN
from spec_runtime.pace.reliability import monotone, observed, replayed
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree


def tree(probabilities: list[float]) -> TokenTree:
    parents = np.array([0, 0, 0, 1])  # 5 has 7 and 8; 7 has 9
    return TokenTree(np.array([5, 7, 8, 9]), parents, np.log(np.array([1.0, *probabilities])))


def test_a_run_says_how_often_each_probability_is_right() -> None:
    sure, unsure = tree([0.9, 0.06, 0.5]), tree([0.5, 0.3, 0.1])
    seen = [(sure, [0, 1, 3])] * 8 + [(unsure, [0, 1])] * 4 + [(unsure, [0, 2])] * 4
    found = {round(p, 3): hit for p, hit in observed(seen)}
    # 0.5: `sure`'s 9 and `unsure`'s 7
    assert found == {0.9: 1.0, 0.5: 12 / 16, 0.3: 0.5, 0.1: 0.0, 0.06: 0.0}
    assert observed([(TokenTree.chain([5, 7]), [0, 1])]) == ()


def test_recorded_trees_are_cut_as_they_would_be() -> None:
    """A plain step takes 10 ms, one with a node 12 1/3 and one with three 15."""
    whole = TokenTree.chain([5, 7, 8, 9])
    likely = TokenTree(whole.token_N, whole.parent_N, np.log([1.0, 0.9, 0.8, 0.01]))
    seen = [(likely, [0, 1, 2, 3]), (likely, [0])]
    nodes, gain = replayed(seen, Budget(8, growth=Grown(reliability=CERTAIN)), COSTS)
    assert (nodes, gain.accepted_length) == (3, 2.0)
    assert gain.speedup == pytest.approx(2 * 10 / (9 + 4 * 2 / 3 + 2), abs=1e-4)
    doubted = Budget(8, growth=Grown(reliability=((1.0, 0.1),)))
    assert replayed(seen, doubted, COSTS)[0] == 1
    assert replayed(seen, Budget(2), COSTS)[1].accepted_length == 1.5
    assert replayed(seen, Budget(8), COSTS)[0] == 4, "without a reliability they stay whole"
    assert replayed([(whole, [0, 1])], doubted, COSTS)[0] == 4, "without probabilities too"


def test_monotone_pools_what_is_out_of_order() -> None:
    assert monotone([(0.2, 0.1, 3), (0.1, 0.3, 1)]) == (
        (0.1, pytest.approx(0.15)),
        (0.2, pytest.approx(0.15)),
    )
    rng = np.random.default_rng(0)
    rows = [(p, float(rng.uniform()), float(rng.uniform(0, 5))) for p in rng.uniform(size=30)]
    Grown(reliability=monotone([*rows, (0.0, 0.5, 1), (0.5, 0.5, 0)]))
