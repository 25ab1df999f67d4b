"""Drafters that run level by level: which state reaches which node, what each level costs, and
that the tree is a beam search's."""

import heapq
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_trees import Recorder, features_of

from spec_runtime.loop.kv import SlotCache
from spec_runtime.loop.step import Step
from spec_runtime.proposers.rows import DrafterRows, LastFeature
from spec_runtime.proposers.sequential import SequentialProposer
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree

WIDTH = 8  # of a state: the feature it began with, then the path's tokens in order


class Start:
    """state = [feature, 0 …]."""

    form, capacity = "stateless", 1

    def __init__(self) -> None:
        self.num_runs = 0
        self._buffer = np.zeros((1, WIDTH), np.float32)  # written again by every run, as ORT's is

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.num_runs += 1
        assert feeds["features"].shape == (1, 2)
        self._buffer[0] = 0
        self._buffer[0, 0] = feeds["features"][0, 0]
        return {"state": self._buffer}


class PairStart(Recorder):
    """The same of the last pair, behind a cache."""

    def answer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        state = np.zeros((len(feeds["logit_rows"]), WIDTH), np.float32)
        state[:, 0] = feeds["features"][0, feeds["logit_rows"], 0]
        return {"state": state}


class StepGraph:
    """Guesses of a path are drawn from a generator seeded by it, so that a node with a state not
    its own guesses otherwise."""

    form, capacity = "stateless", 1

    def __init__(self, num_candidates: int = 3, vocab_size: int = 20) -> None:
        self.num_candidates, self.vocab_size = num_candidates, vocab_size
        self.calls: list[tuple[int, list[list[int]]]] = []  # (level, paths from the root)
        self._buffer = np.zeros((64, WIDTH), np.float32)

    def guesses(self, feature: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([feature, *path])
        ids = random.permutation(self.vocab_size)[: self.num_candidates]
        return ids, np.sort(np.log(random.dirichlet(np.ones(self.num_candidates))))[::-1]

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        token_N, state_NW, (level,) = feeds["input_ids"], feeds["state"], feeds["level"].tolist()
        assert token_N.dtype == np.int64
        assert state_NW.dtype == np.float32
        assert len(token_N) == len(state_NW) >= 1
        out_NW = self._buffer[: len(token_N)]
        out_NW[:] = state_NW
        assert not out_NW[:, level + 1 :].any(), "a state of another level"
        out_NW[:, level + 1] = token_N
        paths = out_NW[:, 1 : level + 2].astype(int).tolist()
        self.calls.append((level, paths))
        pairs = [self.guesses(int(row[0]), path) for row, path in zip(out_NW, paths, strict=True)]
        result = {
            "guess_ids": np.stack([ids for ids, _ in pairs]),
            "guess_log_probs": np.stack([log_probs for _, log_probs in pairs]),
            "state.out": out_NW,
        }
        return {name: result[name] for name in outputs}


def make_proposer(
    num_guesses: int = 4, max_width: int = 3, **graph: Any
) -> tuple[SequentialProposer, StepGraph, Start]:
    start, step = Start(), StepGraph(**graph)
    proposer = SequentialProposer(
        LastFeature(start), step, num_guesses=num_guesses, max_width=max_width
    )
    return proposer, step, start


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, in the tree's order."""
    return [tuple(tree.token_N[tree.path(node)].tolist()) for node in range(tree.num_nodes)]


Scored = tuple[float, tuple[int, ...]]  # log-probability, tokens


def beam_search(
    graph: StepGraph, feature: int, root: int, width: int, levels: int
) -> list[list[Scored]]:
    """Per level the continuations of the `width` best beams of the level before, best first."""
    beams: list[Scored] = [(0.0, (root,))]
    found: list[list[Scored]] = []
    for _ in range(levels):
        candidates: list[Scored] = []
        for log_prob, path in beams:
            ids, log_probs = graph.guesses(feature, path)
            for token, more in zip(ids.tolist(), log_probs.tolist(), strict=True):
                candidates.append((log_prob + more, (*path, token)))
        found.append(sorted(candidates, reverse=True))
        beams = found[-1][:width]
    return found


@pytest.mark.parametrize("feature", range(5))
@pytest.mark.parametrize(("width", "levels"), [(1, 4), (2, 3), (3, 4), (10, 3)])
def test_the_tree_is_a_beam_search_with_equal_prefixes_merged(
    feature: int, width: int, levels: int
) -> None:
    proposer, graph, _ = make_proposer(levels, width)
    proposer.start([7], features_of([feature]), 0)
    found = beam_search(graph, feature, 5, width, levels)
    tree = proposer.propose(5, Budget(1000))
    # level by level, the beams are what the graph was run on, all of a level at once
    beams: list[list[tuple[int, ...]]] = [[(5,)]]
    beams += [[path for _, path in level[:width]] for level in found[:-1]]
    assert [level for level, _ in graph.calls] == list(range(levels))
    for (_, ran), expected in zip(graph.calls, beams, strict=True):
        assert sorted(map(tuple, ran)) == sorted(expected)
    # the tree holds every prefix of every beam once, and each beam's other candidates
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)
    assert set(paths) == {(5,)} | {path for level in found for _, path in level}
    last_beams = [path for _, path in found[-1][:width]]
    assert {path[:n] for path in last_beams for n in range(1, levels + 2)} <= set(paths)


@pytest.mark.parametrize("feature", range(5))
@pytest.mark.parametrize("num_nodes", [2, 5, 9, 14])
def test_a_smaller_budget_takes_its_most_probable_nodes(feature: int, num_nodes: int) -> None:
    proposer, graph, _ = make_proposer(4, 3)
    proposer.start([7], features_of([feature]), 0)
    every = [entry for level in beam_search(graph, feature, 5, 3, 4) for entry in level]
    best = heapq.nlargest(num_nodes - 1, every)
    tree = proposer.propose(5, Budget(num_nodes))
    assert set(paths_of(tree)) == {(5,)} | {path for _, path in best}
    # nothing is run that could not have been kept
    ran = [tuple(path) for _, paths in graph.calls for path in paths]
    log_prob = {path: value for value, path in every}
    for path in ran[1:]:
        shorter = [value for value, other in every if len(other) <= len(path)]
        assert log_prob[path] >= heapq.nlargest(num_nodes - 1, shorter)[-1]


@pytest.mark.parametrize(
    "budget", [Budget(1), Budget(9, max_depth=0), Budget(1, growth=Grown(0.5))]
)
def test_a_root_only_budget_runs_nothing(budget: Budget) -> None:
    proposer, graph, start = make_proposer()
    proposer.start([7], features_of([0]), 0)
    assert proposer.propose(5, budget).token_N.tolist() == [5]
    assert (graph.calls, start.num_runs) == ([], 0)
    assert proposer.run_seconds == 0.0


@pytest.mark.parametrize("max_depth", [1, 2, 3])
def test_no_level_is_run_for_nodes_too_deep(
    max_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    proposer, graph, _ = make_proposer(4)
    proposer.start([7], features_of([0]), 0)
    tree = proposer.propose(5, Budget(40, max_depth=max_depth))
    assert [level for level, _ in graph.calls] == list(range(max_depth))
    assert tree.depth_N.max() == max_depth
    assert proposer.run_seconds == 1 + max_depth  # the start graph's second, and one a level


def test_improbable_nodes_are_neither_kept_nor_expanded() -> None:
    proposer, graph, _ = make_proposer(4, 3)
    proposer.start([7], features_of([3]), 0)
    every = [entry for level in beam_search(graph, 3, 5, 3, 4) for entry in level]
    tree = proposer.propose(5, Budget(40, growth=Grown(0.2)))
    likely = {path for value, path in every if value >= np.log(0.2)}
    assert set(paths_of(tree)) == {(5,)} | likely
    assert {tuple(path) for _, paths in graph.calls for path in paths} <= {(5,)} | likely


def test_each_step_begins_at_the_last_committed_feature() -> None:
    proposer, graph, _ = make_proposer()
    proposer.start([7, 8, 9], features_of([10, 11, 12]), 0)

    def begins_with(root: int) -> int:
        tree = proposer.propose(root, Budget(4, max_depth=1))
        (feature,) = [
            f for f in range(40) if set(graph.guesses(f, [root])[0]) == set(tree.token_N[1:])
        ]
        return feature

    assert begins_with(5) == 12
    proposer.commit(Step([1, 2, 3], num_accepted=2, features=features_of([13, 14, 15])))
    assert begins_with(3) == 15
    proposer.commit(Step([4], num_accepted=0, features=features_of([16])))
    assert begins_with(4) == 16
    proposer.truncate(2)
    with pytest.raises(AssertionError, match="run before start"):
        proposer.propose(4, Budget(4))
    proposer.start([7, 8, 9], features_of([30]), 2)
    assert begins_with(5) == 30
    proposer.truncate(0)
    proposer.start([6], features_of([31]), 0)
    assert begins_with(5) == 31


def test_pairs_wait_in_a_cached_start() -> None:
    """Every pair goes through the start graph once, in order, also past steps without a draft."""
    start, step = PairStart(), StepGraph()
    rows = DrafterRows(start, SlotCache(start.capacity), wants_features=True)
    proposer = SequentialProposer(rows, step, num_guesses=2, max_width=2)
    proposer.start([50, 51, 52], features_of([0, 1, 2]), 0)
    tree = proposer.propose(9, Budget(6))
    assert set(tree.token_N[tree.parent_N == 0][1:]) <= set(step.guesses(2, [9])[0])
    proposer.commit(Step([1, 4], num_accepted=1, features=features_of([3, 4])))
    proposer.propose(4, Budget(1))
    proposer.commit(Step([5], num_accepted=0, features=features_of([5])))
    proposer.propose(5, Budget(6))
    assert step.calls[-1][1]
    assert [int(call["features"][0, -1, 0]) for call in start.calls] == [1, 2, 5]
    fed = [token for call in start.calls for token in call["input_ids"][0].tolist()]
    assert fed == [51, 52, 9, 1, 4, 5]
    assert start.calls[-1]["position_ids"].tolist() == [[3, 4, 5]]
    proposer.truncate(4)
    proposer.start([50, 51, 52, 9, 70], features_of([4]), 4)
    proposer.propose(11, Budget(6))
    assert start.calls[-1]["input_ids"].tolist() == [[11]]
    assert start.calls[-1]["position_ids"].tolist() == [[4]]
    assert proposer.run_seconds > 0.0
