"""A drafter's rows: trees level by level behind the committed ones, in scratch rows."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import small_manifest
from small_trees import Recorder, features_of
from toy_backend import ToyTarget
from toy_engine import make_engine, random_prompt

from spec_runtime.backends import run_at_once
from spec_runtime.bundle.manifest import Bundle, BundleError
from spec_runtime.engine import Engine
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.step import Step
from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.proposers.feature import FeatureProposer
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.trees.budget import Budget, Static
from spec_runtime.trees.grow import TreeBuilder


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
        graph, open_cache(form, graph.capacity), wants_features=pairs, first_token=1 if pairs else 0
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


# ---- feature-level drafts: which feature each row of a tree reads ----


class Successor(Recorder):
    """A graph that adds: its predicted feature is (feature + token) of the row, its guesses the
    tokens token + 1 and token + 2. It returns the same buffers each time, as a real one does."""

    hidden = np.zeros((16, 2), np.float32)

    def answer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        m = feeds["logit_rows"]
        token_M = feeds["input_ids"][0, m]
        self.hidden[:] = np.nan  # what the last run returned is gone
        self.hidden[: len(m)] = feeds["features"][0, m] + token_M[:, None]
        return {
            "guess_ids": token_M[:, None] + np.array([1, 2]),
            "guess_log_probs": np.log(np.tile([0.6, 0.3], (len(m), 1))),
            "hidden": self.hidden[: len(m)],
        }


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


# ---- a draft model: rows of tokens, chains and trees, nothing lost between steps ----


VOCAB, MAX_LENGTH, SCRATCH = 64, 160, 32
QUIET: dict[str, Any] = {"peak": 9.0, "noise": 3.0}


class ToyModel:
    """The toy target's own network as a draft model: top 3 of its logits. Quiet, so that it is
    often right; what a row attends decides its guesses, so a misplaced row changes them."""

    def __init__(self, form: str) -> None:
        self.form, self.capacity = form, MAX_LENGTH + SCRATCH
        self.target = ToyTarget(vocab_size=VOCAB, capacity=self.capacity, form=form, **QUIET)

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        logits = self.target.run(feeds, ["logits"])["logits"]
        log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = np.argsort(-log_q, axis=-1)[:, :3]
        return {"guess_ids": ids, "guess_log_probs": np.take_along_axis(log_q, ids, -1)}


def make_engines(form: str, max_width: int = 3) -> tuple[Engine, Engine]:
    """With a draft model that is the target itself, and plain."""
    model = ToyModel(form)
    rows = DrafterRows(model, open_cache(form, model.capacity), wants_features=False, first_token=0)
    drafter = DraftModelProposer(rows, num_guesses=4, max_width=max_width)
    first, plain = (
        make_engine(vocab_size=VOCAB, max_length=MAX_LENGTH, scratch=SCRATCH, form=form, **QUIET)
        for _ in range(2)
    )
    return first.observed(lambda _: drafter, Budget(9)), plain


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("max_width", [1, 3])
def test_the_target_as_its_own_draft_model_is_always_right(form: str, max_width: int) -> None:
    """Each step accepts the whole depth: a row that is missing, misplaced or left over from the
    last tree would change what the model says."""
    drafted, plain = make_engines(form, max_width)
    for seed in range(3):
        prompt = random_prompt(seed, 20 + seed, VOCAB)
        result = drafted.generate(prompt, max_new_tokens=51, ignore_eos=True)
        expected = plain.generate(prompt, max_new_tokens=51, ignore_eos=True)
        assert result.token_ids == expected.token_ids
        assert result.stats.accepted_length == 5.0  # 4 guesses and the bonus


def test_rows_of_a_conversation() -> None:
    drafted, plain = make_engines("slots")
    prompt = random_prompt(7, 20, VOCAB)
    for more in ([], [3, 4, 5], [9]):
        prompt = prompt + more
        result = drafted.generate(prompt, max_new_tokens=13, ignore_eos=True)
        expected = plain.generate(prompt, max_new_tokens=13, ignore_eos=True, reuse=False)
        assert result.token_ids == expected.token_ids
        assert result.stats.accepted_length >= 4.0
        prompt = prompt + result.token_ids
    assert result.stats.reused_tokens > 30
