"""Static trees by name and by search: shapes, the search against every other tree, a bundle's."""

import dataclasses
import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from small import ACCURACY, CALIBRATION, small_manifest
from small_trees import budget_of

from spec_runtime.bundle.manifest import BundleError, DrafterInfo
from spec_runtime.errors import UserError
from spec_runtime.load import _budget
from spec_runtime.trees.budget import Budget, Grown, RankPath, Static
from spec_runtime.trees.templates import (
    DEFAULT_NODES,
    cartesian,
    chain,
    expected_accepted_length,
    from_counts,
    parse_tree,
    searched,
)


def test_shapes() -> None:
    assert chain(3) == ((0,), (0, 0), (0, 0, 0))
    assert cartesian([2, 1]) == ((0,), (1,), (0, 0), (1, 0))
    # Medusa: the sum over depths of the product of the widths so far
    assert len(cartesian([4, 3, 2])) == 4 + 4 * 3 + 4 * 3 * 2
    assert from_counts({(): 2, (0,): 1}) == ((0,), (0, 0), (1,))
    assert set(from_counts({(): 2, (0,): 2, (1,): 2})) == set(cartesian([2, 2]))


@pytest.mark.parametrize(
    ("name", "by_depth", "digest"),
    [
        ("medusa64", {1: 10, 2: 28, 3: 23, 4: 2}, "cf80c6f8f8b8d6e6"),
        ("eagle26", {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}, "968783ac5823d413"),
    ],
)
def test_the_papers_trees(name: str, by_depth: dict[int, int], digest: str) -> None:
    """Digests of the sorted paths in the repositories of Medusa and EAGLE."""
    paths = parse_tree(name)
    assert Counter(map(len, paths)) == by_depth
    assert hashlib.sha256(repr(sorted(paths)).encode()).hexdigest()[:16] == digest


def every_tree(widths: list[int], num_paths: int) -> set[frozenset[RankPath]]:
    """All sets of so many paths in which every parent is there too."""
    everything = cartesian(widths)
    trees: set[frozenset[RankPath]] = {frozenset()}
    for _ in range(num_paths):
        trees = {
            tree | {path}
            for tree in trees
            for path in everything
            if path not in tree and (len(path) == 1 or path[:-1] in tree)
        }
    return trees


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("widths", "num_paths"), [([2, 2, 2], 5), ([3, 3], 6), ([2, 2, 2], 1)])
def test_no_other_tree_of_that_size_is_better(widths: list[int], num_paths: int, seed: int) -> None:
    """Accuracies in no order: rank 1 may be right more often than rank 0."""
    rng = np.random.default_rng([seed, num_paths])
    accuracy = rng.dirichlet(np.ones(widths[0] + 1), len(widths))[:, :-1].tolist()
    found = searched(accuracy, num_paths + 1)
    assert len(set(found)) == num_paths
    assert all(len(path) == 1 or path[:-1] in found for path in found)
    best = max(
        expected_accepted_length(sorted(tree), accuracy) for tree in every_tree(widths, num_paths)
    )
    assert expected_accepted_length(found, accuracy) == pytest.approx(best, rel=1e-12)


def test_expected_length_by_hand() -> None:
    paths = ((0,), (1,), (0, 1), (1, 0))
    expected = 1 + 0.5 + 0.2 + 0.15 + 0.08
    assert expected_accepted_length(paths, ACCURACY) == pytest.approx(expected)
    assert expected_accepted_length((), ACCURACY) == 1.0


def test_what_was_never_right_is_left_out() -> None:
    assert searched(ACCURACY, 100) == searched(ACCURACY, 10)
    assert len(searched(ACCURACY, 100)) == 3 + 3 * 2


def test_names_of_trees() -> None:
    assert parse_tree("chain:4") == chain(4)
    assert parse_tree("cartesian:3,2") == cartesian([3, 2])
    assert budget_of(parse_tree("medusa64")).max_nodes == 64
    assert parse_tree("searched:5", ACCURACY) == searched(ACCURACY, 5)
    assert parse_tree("searched", ACCURACY, 7) == searched(ACCURACY, 7)
    wide = [[1 / 64] * 64]
    assert budget_of(parse_tree("searched", wide)).max_nodes == DEFAULT_NODES


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tree", "got tree 'tree', expected one of chain:DEPTH, cartesian"),
        ("chain", "expected one of"),
        ("chain:0", "expected one of"),
        ("chain:-1", "expected one of"),
        ("chain:2,2", "expected one of"),
        ("chain:", "expected one of"),
        ("chain:9999", "of 1024 nodes at most"),
        ("cartesian", "expected one of"),
        ("cartesian:2,x", "expected one of"),
        ("cartesian:100,100", "of 1024 nodes at most"),
        ("medusa64:3", "expected one of"),
        ("searched", "without calibration: run spec-export calibrate"),
    ],
)
def test_bad_names_are_one_line(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse_tree(text)


def entry(calibration: dict[str, Any] | None = CALIBRATION, **trees: Any) -> DrafterInfo:
    return dataclasses.replace(
        small_manifest().drafters[0], calibration=calibration, trees=trees, config={"top_k": 10}
    )


def test_a_bundle_names_its_tree() -> None:
    budget, lookup_nodes = _budget(entry(template="chain:3", lookup_nodes=2))
    assert (budget, lookup_nodes) == (budget_of(parse_tree("chain:3")), 2)
    budget, _ = _budget(entry(template="searched", max_nodes=5))
    assert budget == Budget(5, growth=Static(searched(ACCURACY, 5)))
    budget, _ = _budget(entry(paths=[[0], [0, 1]]))
    assert budget.growth == Static(((0,), (0, 1)))
    assert _budget(entry(max_nodes=9))[0].growth == Grown()
    assert _budget(entry(min_probability=0.5))[0] == Budget(12, growth=Grown(0.5))
    uncalibrated = _budget(entry(None, template="searched", max_nodes=9))[0]
    assert (uncalibrated.max_nodes, uncalibrated.growth) == (9, Grown())


@pytest.mark.parametrize(
    ("trees", "why"),
    [
        ({"template": "medusa"}, "drafter 'parallelspec': got tree 'medusa', expected"),
        ({"template": 3}, "got tree '3'"),
        ({"template": "chain:2", "paths": [[0]]}, "got trees paths and template, expected one"),
        ({"template": "cartesian:11"}, "ranks below its top_k, 10"),
        ({"templates": "chain:2"}, r"trees: got unknown key 'templates' \(meant: template\)"),
    ],
)
def test_a_bundle_with_a_bad_tree(trees: dict[str, Any], why: str) -> None:
    with pytest.raises(BundleError, match=why):
        _budget(entry(**trees))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"accuracy": []}, "accuracy: got list .., expected rows of equal length"),
        ({"accuracy": [[0.5, 0.2], [0.1]]}, "accuracy: got list .*, expected rows"),
        ({"accuracy": [[0.9, 0.2]]}, "accuracy: got .*, of shares whose sum is at most 1"),
        ({"accuracy": [["x"]]}, r"accuracy\[0\]\[0\]: got str 'x', expected float"),
        ({"reliability": [[0.1, 0.2]]}, r"reliability\[0\]: got list .*, expected more items"),
        (
            {"reliability": [[0.1, 1.2, 3]]},
            r"reliability\[0\]\[1\]: got float 1.2, expected at most 1",
        ),
        ({"accepted_length": {"a": 1.0}}, "accepted_length: got .*, expected a number of nodes"),
        ({"accepted_length": [1.0]}, "accepted_length: got list .*, expected a mapping"),
        ({"more": 1}, ": got unknown key 'more'; expected keys prompts, positions"),
    ],
)
def test_a_calibration_is_validated(change: dict[str, Any], why: str) -> None:
    assert entry().calibration == CALIBRATION
    with pytest.raises(BundleError, match=f"drafter 'parallelspec': calibration.?{why}"):
        entry(CALIBRATION | change)
