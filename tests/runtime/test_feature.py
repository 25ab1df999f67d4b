"""Feature-level drafts: which feature each row of a tree reads, and what the cache is left with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import small_manifest
from small_trees import features_of

from spec_runtime.bundle.manifest import Bundle, BundleError
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.step import Step
from spec_runtime.proposers.feature import FeatureProposer
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.trees.budget import Budget, Static


class Successor:
    """A graph that adds: its predicted feature is (feature + token) of the row, its guesses the
    tokens token + 1 and token + 2. It returns the same buffers each time, as a real one does."""

    form = "slots"
    capacity = 64

    def __init__(self) -> None:
        self.calls: list[dict[str, np.ndarray]] = []
        self._hidden = np.zeros((16, 2), np.float32)

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.calls.append(feeds)
        m = feeds["logit_rows"]
        token_M = feeds["input_ids"][0, m]
        self._hidden[:] = np.nan  # what the last run returned is gone
        self._hidden[: len(m)] = feeds["features"][0, m] + token_M[:, None]
        result = {
            "guess_ids": token_M[:, None] + np.array([1, 2]),
            "guess_log_probs": np.log(np.tile([0.6, 0.3], (len(m), 1))),
            "hidden": self._hidden[: len(m)],
        }
        return {name: result[name] for name in outputs}


def make(form: str = "slots", **levels: Any) -> tuple[FeatureProposer, Successor]:
    graph = Successor()
    rows = DrafterRows(graph, open_cache(form, graph.capacity), wants_features=True)
    return FeatureProposer(rows, **({"num_guesses": 3, "max_width": 2} | levels)), graph


@pytest.mark.parametrize("form", ["slots", "contiguous"])
def test_a_node_reads_its_parents_predicted_feature(form: str) -> None:
    proposer, graph = make(form)
    proposer.start([50, 51, 52], features_of([0, 1, 2]), 0)
    tree = proposer.propose(53, Budget(12))
    prompt, root, first, second = graph.calls
    assert prompt["input_ids"].tolist() == [[51, 52]]
    assert root["features"].tolist() == [[[2, 2.5]]]
    assert (root["input_ids"].tolist(), root["position_ids"].tolist()) == ([[53]], [[2]])
    # 53 guesses 54 (.6) and 55 (.3): both are expanded, reading what 53's row predicted
    assert (first["input_ids"].tolist(), first["position_ids"].tolist()) == ([[54, 55]], [[3, 3]])
    assert first["features"].tolist() == [[[55, 55.5], [55, 55.5]]]
    # the best two of .36 (54-55), .18 (54-56, 55-56), .09: one below 54, the other too
    assert second["input_ids"].tolist() == [[55, 56]]
    assert second["position_ids"].tolist() == [[4, 4]]
    assert second["features"].tolist() == [[[109, 109.5], [109, 109.5]]]
    assert tree.num_nodes == 11
    assert int(tree.depth_N.max()) == 3

    # after the verification the target's own features take the place of the predicted ones
    proposer.commit(Step([54, 55, 70], num_accepted=2, features=features_of([3, 4, 5])))
    proposer.propose(70, Budget(12))
    again = graph.calls[4]
    assert again["input_ids"].tolist() == [[54, 55, 70]]
    assert again["position_ids"].tolist() == [[3, 4, 5]]
    assert again["features"].tolist() == [[[3, 3.5], [4, 4.5], [5, 5.5]]]
    assert graph.calls[5]["features"][0, 0].tolist() == [75, 75.5]  # the last row's alone


def test_siblings_of_different_parents_read_different_features() -> None:
    proposer, graph = make()
    paths = ((0,), (1,), (0, 1), (1, 0), (0, 1, 0), (1, 0, 1))
    proposer.start([50], features_of([0]), 0)
    tree = proposer.propose(60, Budget(7, growth=Static(paths)))
    assert tree.token_N.tolist() == [60, 61, 62, 63, 63, 64, 65]
    _, _, level = graph.calls
    assert level["input_ids"].tolist() == [[63, 63]]
    assert level["features"].tolist() == [[[121, 121.5], [122, 122.5]]]  # 0 + 60 + 61, 0 + 60 + 62
    assert level["mask"][0, 0, :, :5].tolist() == [
        [True, True, False, True, False],
        [True, False, True, False, True],
    ]


def test_a_budget_of_the_root_alone_runs_nothing() -> None:
    proposer, graph = make()
    proposer.start([50, 51], features_of([0, 1]), 0)
    runs = len(graph.calls)
    assert proposer.propose(52, Budget(1)).num_nodes == 1
    proposer.commit(Step([53], num_accepted=0, features=features_of([2])))
    assert len(graph.calls) == runs
    assert proposer.propose(53, Budget(9, max_depth=1)).token_N.tolist() == [53, 54, 55]
    assert graph.calls[runs]["input_ids"].tolist() == [[52, 53]]
    assert len(graph.calls) == runs + 1, "depth 1 needs no further level"
    assert proposer.run_seconds > 0


def test_trees_must_fit_the_scratch(tmp_path: Path) -> None:
    manifest = small_manifest()  # a scratch of 128 rows
    info = dataclasses.replace(manifest.drafters[0], config={"num_guesses": 17, "max_width": 8})
    with pytest.raises(BundleError, match=r"got 17 levels of 8 nodes, expected fewer .* 128"):
        FeatureProposer.open(Bundle(tmp_path, manifest), info, 1, None)  # type: ignore[arg-type]
    info = dataclasses.replace(info, config={"num_guesses": 4})
    with pytest.raises(BundleError, match="expected num_guesses, max_width"):
        FeatureProposer.open(Bundle(tmp_path, manifest), info, 1, None)  # type: ignore[arg-type]
