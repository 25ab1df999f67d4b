"""A drafter's rows: trees level by level behind the committed ones, in scratch rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from small_trees import features_of

from spec_runtime.backends import run_at_once
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.step import Step
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.trees.grow import TreeBuilder


class Recorder:
    """A graph that writes down its feeds and gives each row its own number."""

    form = "slots"
    capacity = 64

    def __init__(self) -> None:
        self.calls: list[dict[str, np.ndarray]] = []

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.calls.append(feeds)
        return dict.fromkeys(outputs, feeds["logit_rows"][:, None] + 0.5)


def grid(feeds: dict[str, np.ndarray], width: int) -> list[str]:
    return ["".join("x" if cell else "." for cell in row[:width]) for row in feeds["mask"][0, 0]]


def nodes_of(tokens: Sequence[int], parents: Sequence[int]) -> TreeBuilder:
    nodes = TreeBuilder(tokens[0])
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        nodes.add(parent, token)
    return nodes


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("pairs", [True, False])
def test_levels_of_a_tree_behind_the_committed_rows(form: str, pairs: bool) -> None:
    """Pairs: two rows of the prompt, one of the root; a draft model: three and one."""
    graph = Recorder()
    rows = DrafterRows(
        graph,
        open_cache(form, graph.capacity),
        wants_features=pairs,
        first_token=1 if pairs else 0,
    )
    rows.start([50, 51, 52], features_of([0, 1, 2]) if pairs else None, 0)
    rows.tokens.append(53)
    #  53 ─┬─ 7 ─┬─ 9 ── 5
    #      │     └─ 6
    #      └─ 8 ─── 4
    tokens, parents = [53, 7, 8, 9, 6, 4, 5], [0, 0, 0, 1, 1, 2, 3]
    feature = features_of([90, 91, 92, 93, 94, 95])  # of the nodes below the root
    for first, end in ((0, 1), (1, 3), (3, 6), (6, 7)):
        nodes = nodes_of(tokens[:end], parents[:end])
        features = {"features": feature[None, first - 1 : end - 1]} if pairs and first else None
        run_at_once(rows.run_level(["guess_ids"], nodes, first, features))
    prompt, root, *levels = graph.calls
    done = 2 if pairs else 3  # rows of the prompt; the root's comes next
    assert prompt["input_ids"].tolist() == [[50, 51, 52][1 if pairs else 0 :]]
    assert (root["input_ids"].tolist(), root["position_ids"].tolist()) == ([[53]], [[done]])
    ids = [feeds["input_ids"][0].tolist() for feeds in levels]
    assert ids == [[7, 8], [9, 6, 4], [5]]
    depth = [(feeds["position_ids"][0] - done).tolist() for feeds in levels]
    assert depth == [[1, 1], [2, 2, 2], [3]]
    seen = [row[done + 1 :] for feeds in levels for row in grid(feeds, done + 7)]
    assert all(
        row.startswith("x" * (done + 1)) for feeds in levels for row in grid(feeds, done + 7)
    )
    assert seen == ["x.....", ".x....", "x.x...", "x..x..", ".x..x.", "x.x..x"]
    assert [feeds["logit_rows"].tolist() for feeds in levels] == [[0, 1], [0, 1, 2], [0]]
    if pairs:
        assert root["features"].tolist() == [[[2, 2.5]]]
        taken = np.concatenate([feeds["features"][0] for feeds in levels])
        assert (taken == feature).all()
    else:
        assert not any("features" in feeds for feeds in graph.calls)

    # the next step: nothing of the tree was kept, its rows are written again
    rows.commit(Step([7, 60], num_accepted=1, features=features_of([3, 4]) if pairs else None))
    rows.tokens.append(60)
    run_at_once(rows.run(["guess_ids"]))
    step = graph.calls[-1]
    assert step["input_ids"].tolist() == [[7, 60]]
    assert step["position_ids"].tolist() == [[done + 1, done + 2]]
    assert grid(step, done + 4) == ["x" * (done + 2) + "..", "x" * (done + 3) + "."]
    if pairs:  # with the target's features, not the ones the drafter had guessed
        assert step["features"].tolist() == [[[3, 3.5], [4, 4.5]]]


def test_nodes_give_one_row_of_outputs_each() -> None:
    graph = Recorder()
    rows = DrafterRows(graph, open_cache("slots", 64), wants_features=False, first_token=0)
    rows.start([50, 51], None, 0)
    runs = rows.run_nodes(["guess_ids"], np.array([7, 8, 9]), np.array([0, 1, 1]), 0)
    result = run_at_once(runs)
    assert result["guess_ids"].tolist() == [[0.5], [1.5], [2.5]]
    assert grid(graph.calls[-1], 6) == ["xxx...", "xx.x..", "xx.xx."]
    assert graph.calls[-1]["position_ids"].tolist() == [[2, 2, 3]]
    with pytest.raises(AssertionError):
        rows.run_nodes(["guess_ids"], np.array([7]), np.array([0, 1, 1]), 2)
    assert rows.run_seconds > 0


def test_a_draft_model_loses_and_repeats_no_token() -> None:
    graph = Recorder()
    rows = DrafterRows(graph, open_cache("slots", 64), wants_features=False, first_token=0)
    rows.start([50], None, 0)
    rows.tokens.append(51)  # a step without a run
    rows.commit(Step([52, 53], num_accepted=1))
    rows.tokens.append(53)
    run_at_once(rows.run(["guess_ids"]))
    assert graph.calls[-1]["input_ids"].tolist() == [[51, 52, 53]]
    assert graph.calls[-1]["logit_rows"].tolist() == [2]
    rows.commit(Step([54, 55], num_accepted=1))  # 54 waits
    rows.truncate(4)
    rows.start([50, 51, 52, 53, 70], None, 4)
    assert graph.calls[-1]["input_ids"].tolist() == [[70]]
    rows.truncate(2)
    rows.start([50, 51, 80], None, 2)
    assert graph.calls[-1]["input_ids"].tolist() == [[80]]
    assert graph.calls[-1]["position_ids"].tolist() == [[2]]
    rows.truncate(0)
    rows.start([60], None, 0)
    assert graph.calls[-1]["slots"].tolist() == [0]
