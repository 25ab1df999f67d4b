"""Lookahead: the window's mask, what is harvested from it, budgets, and that no token changes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy_engine import make_engine, random_prompt

from spec_runtime.engine import Engine
from spec_runtime.loop.step import Step
from spec_runtime.proposers.lookahead import NUM_NODES, LookaheadProposer
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree, ancestors

WIDE = Budget(100)


def make(level_JW: list[list[int]], pool: dict[int, list[tuple[int, ...]]]) -> LookaheadProposer:
    """In the middle of a generation, G = 2."""
    width, num_levels = len(level_JW[0]), len(level_JW)
    proposer = LookaheadProposer(level=num_levels + 1, window=width, pool=2)
    proposer._level_JW, proposer._pool = level_JW, pool
    return proposer


def answered(proposer: LookaheadProposer, tree: TokenTree, answers: dict[int, int]) -> None:
    """One step in which the target's argmax after a node is `answers[its token]`."""
    argmax_N = np.array([answers.get(token, 0) for token in tree.token_N.tolist()])
    verified: Any = SimpleNamespace(argmax_N=argmax_N)
    proposer.commit(Step([int(argmax_N[0])], 0, [0], verified=verified))


def test_the_mask_is_the_papers() -> None:
    """W = 3, N = 3: every row sees level 0 up to its column, then its own column; the pool's
    n-gram sees the root alone."""
    proposer = make([[9, 11, 12], [20, 21, 22]], {10: [(30, 31)]})
    tree = proposer.propose(10, WIDE)
    assert tree.token_N.tolist() == [10, 11, 12, 20, 21, 22, 30, 31]
    expected = """
        1 . . . . . . .
        1 1 . . . . . .
        1 1 1 . . . . .
        1 . . 1 . . . .
        1 1 . . 1 . . .
        1 1 1 . . 1 . .
        1 . . . . . 1 .
        1 . . . . . 1 1
    """
    rows = [[mark == "1" for mark in line.split()] for line in expected.split("\n")[1:-1]]
    assert ancestors(tree.parent_N).tolist() == rows
    assert tree.depth_N.tolist() == [0, 1, 2, 1, 2, 3, 1, 2]


def test_a_step_harvests_every_column_and_moves_the_levels_up() -> None:
    proposer = make([[9, 11, 12], [20, 21, 22]], {})
    answered(proposer, proposer.propose(10, WIDE), {20: 40, 21: 41, 22: 42, 11: 99})
    assert proposer._pool == {10: [(20, 40)], 11: [(21, 41)], 12: [(22, 42)]}
    tree = proposer.propose(11, WIDE)
    # the new root takes column 0; 21 and 22 follow it, the answers hang below, then the n-gram
    assert tree.token_N.tolist() == [11, 21, 22, 40, 41, 42]
    assert tree.parent_N.tolist() == [0, 0, 1, 0, 1, 2]


def test_levels_fill_one_a_step_before_anything_is_harvested() -> None:
    proposer = LookaheadProposer(level=4, window=2, pool=2)
    proposer.start([5], None, 0)
    for num_levels in (1, 2, 3):
        tree = proposer.propose(7, WIDE)
        assert len(proposer._level_JW) == num_levels
        assert proposer._pool == {}
        answered(proposer, tree, {7: 1, 5: 2, 1: 3, 2: 4, 3: 6, 4: 8})
    assert proposer._pool == {7: [(1, 3, 6)], 5: [(2, 4, 8)]}


def test_equal_tokens_of_window_and_pool_are_one_node() -> None:
    # 11 is column 1 of level 0, column 0 of level 1, and the beginning of an n-gram
    proposer = make([[9, 11, 12], [11, 21, 22]], {10: [(11, 12)]})
    tree = proposer.propose(10, WIDE)
    assert tree.token_N.tolist() == [10, 11, 12, 21, 22]
    answered(proposer, tree, {11: 40, 21: 41, 22: 42})
    assert proposer._pool[10][-1] == (11, 40)  # read at the merged node
    assert proposer._pool[11] == [(21, 41)]
    assert proposer._pool[12] == [(22, 42)]


def test_the_pool_keeps_the_newest_of_each_first_token() -> None:
    proposer = make([[0]], {})
    for answer in (1, 2, 3, 2, 4):
        answered(proposer, proposer.propose(10, WIDE), {10: answer})
        answered(proposer, proposer.propose(11, WIDE), {11: answer + 100})
    assert proposer._pool == {10: [(2,), (4,)], 11: [(102,), (104,)]}
    assert proposer.propose(10, WIDE).token_N.tolist() == [10, 4, 2]
    assert proposer.propose(12, WIDE).token_N.tolist() == [12]


def full(window: int = 7) -> LookaheadProposer:
    """All tokens different, seven n-grams of four tokens."""
    proposer = LookaheadProposer()
    proposer._level_JW = [[100 * j + i for i in range(window)] for j in range(4)]
    proposer._pool = {0: [tuple(1000 + 10 * g + i for i in range(4)) for g in range(7)]}
    return proposer


def test_a_full_tree_has_the_default_number_of_nodes() -> None:
    assert full().propose(0, WIDE).num_nodes == full().propose(0, Budget(NUM_NODES)).num_nodes
    assert full().propose(0, WIDE).num_nodes == NUM_NODES == 56


@pytest.mark.parametrize("max_nodes", range(1, NUM_NODES + 1))
def test_any_budget_is_kept_and_used(max_nodes: int) -> None:
    tree = full().propose(0, Budget(max_nodes))
    assert max_nodes - 3 <= tree.num_nodes <= max_nodes
    tokens = tree.token_N.tolist()
    num_columns = tokens.count(0) + sum(token in tokens for token in range(1, 7))
    from_pool = [token for token in tokens if token >= 1000]
    if max_nodes >= 8:
        # whole columns of four nodes, and room for the pool's n-grams, the newest first
        assert sum(token < 1000 for token in tokens) == 4 * num_columns >= max_nodes // 2 - 3
        assert from_pool[:4] == [1060, 1061, 1062, 1063]


@pytest.mark.parametrize("max_depth", range(10))
def test_no_node_lies_deeper_than_allowed(max_depth: int) -> None:
    proposer = full()
    tree = proposer.propose(0, Budget(100, max_depth=max_depth))
    assert int(tree.depth_N.max()) == min(max_depth, 9)
    # where only the root is asked for, the window waits for better times
    assert len(proposer._level_JW[0]) == (max(0, min(7, max_depth - 2)) if max_depth else 7)
    argmax_N = np.arange(tree.num_nodes)
    verified: Any = SimpleNamespace(argmax_N=argmax_N)
    proposer.commit(Step([0], 0, [0], verified=verified))
    assert proposer.propose(0, Budget(100, max_depth=max_depth)).depth_N.max() <= max_depth


def lookahead_engine(budget: Budget | None = None, **model: Any) -> Engine:
    plain = make_engine("none", scratch=NUM_NODES + 2, **model)
    return plain.observed(lambda _: LookaheadProposer(), budget or Budget(NUM_NODES))


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_token_changes(form: str, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": temperature, "seed": 3}
    for seed in range(3):
        model: dict[str, Any] = {"form": form, "num_successors": 97, "seed": seed}
        prompt = random_prompt(seed)
        expected = make_engine("none", **model).generate(prompt, **options).token_ids
        for max_nodes in (1, 2, 5, 12, NUM_NODES):
            engine = lookahead_engine(Budget(max_nodes), **model)
            for _ in range(2):  # the second time with most of the prompt reused
                assert engine.generate(prompt, **options).token_ids == expected, max_nodes


def test_loops_are_guessed() -> None:
    """After one round every n-gram of a loop has been seen in the window."""
    steps, trees = 0, 0
    for seed in range(4):
        engine = lookahead_engine(peak=9.0, num_successors=4, seed=seed)
        stats = engine.generate(random_prompt(seed), max_new_tokens=150, ignore_eos=True).stats
        assert stats.accepted_length > 1.3
        assert stats.committed_tokens == 149
        steps += stats.steps
        trees += stats.drafted_tokens
    assert trees / steps > 30


def test_a_generation_repeats_whatever_was_reused() -> None:
    engine, prompt = lookahead_engine(num_successors=97), random_prompt(4)
    runs = []
    for reuse in (False, True, False):
        steps = engine.steps(prompt, max_new_tokens=40, reuse=reuse)
        runs.append([step.tree.token_N.tolist() for step in steps if step.tree is not None])
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]) > 3
