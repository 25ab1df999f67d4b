"""One-pass drafter: the rows it feeds its graph, pair by pair. The toy drafter checks them too."""

from typing import Any

import numpy as np
import pytest
from small_trees import Recorder, features_of
from toy_backend import ToyDrafter, ToyTarget
from toy_engine import make_engine, random_prompt

from spec_runtime.bundle.manifest import BundleError, DrafterInfo, Graph, TensorSpec
from spec_runtime.loop.kv import SlotCache
from spec_runtime.loop.step import Step
from spec_runtime.proposers.heads import OnePassProposer, read_pairs
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.trees.budget import Budget

MASK = 900


class Guesses(Recorder):
    """Guesses 10, 11 … at each position."""

    def answer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        m = len(feeds["logit_rows"])
        log_probs = np.log(np.tile([0.6, 0.3], (m, 1)))
        return {"guess_ids": np.arange(10, 10 + 2 * m).reshape(m, 2), "guess_log_probs": log_probs}


def recorded(repeat_feature: bool = False) -> tuple[OnePassProposer, Recorder]:
    graph = Guesses()
    rows = DrafterRows(
        graph, SlotCache(graph.capacity), wants_features=True, repeat_feature=repeat_feature
    )
    return OnePassProposer(rows, range(MASK, MASK + 2)), graph


def test_rows_of_prefill_and_of_a_step() -> None:
    proposer, graph = recorded()
    # positions 0 1 2 carry tokens 50 51 52; the pair of position 2 waits for the root
    proposer.start([50, 51, 52], features_of([0, 1, 2]), 0)
    (prefill,) = graph.calls
    assert prefill["input_ids"].tolist() == [[51, 52]]
    assert prefill["position_ids"].tolist() == [[0, 1]]
    assert prefill["features"][0].tolist() == [[0, 0.5], [1, 1.5]]

    tree = proposer.propose(53, Budget(4))
    step = graph.calls[1]
    assert step["input_ids"].tolist() == [[53, MASK, MASK + 1]]
    assert step["position_ids"].tolist() == [[2, 3, 4]]
    assert step["features"][0].tolist() == [[2, 2.5], [0, 0], [0, 0]]
    assert step["logit_rows"].tolist() == [0, 1, 2]
    assert tree.token_N.tolist() == [53, 10, 12, 11]

    # two rows committed at positions 3 and 4: tokens 53 and 10, bonus 60
    proposer.commit(Step([10, 60], num_accepted=1, features=features_of([3, 4])))
    proposer.propose(60, Budget(4))
    step = graph.calls[2]
    assert step["input_ids"].tolist() == [[10, 60, MASK, MASK + 1]]
    assert step["position_ids"].tolist() == [[3, 4, 5, 6]]
    assert step["features"][0].tolist() == [[3, 3.5], [4, 4.5], [0, 0], [0, 0]]
    assert step["logit_rows"].tolist() == [1, 2, 3]
    # mask rows of the step before are gone: their slots are used again
    assert step["slots"].tolist() == [3, 4, 5, 6]
    rows = ["".join("x" if cell else "." for cell in row[:8]) for row in step["mask"][0, 0]]
    assert rows == ["xxxx....", "xxxxx...", "xxxxxx..", "xxxxxxx."]


def test_mask_rows_may_have_the_feature_of_the_row_before_them() -> None:
    proposer, graph = recorded(repeat_feature=True)
    proposer.start([50, 51, 52], features_of([0, 1, 2]), 0)
    proposer.propose(53, Budget(4))
    assert graph.calls[1]["features"][0, :, 0].tolist() == [2, 2, 2]
    proposer.commit(Step([10, 60], num_accepted=1, features=features_of([3, 4])))
    proposer.propose(60, Budget(4))
    assert graph.calls[2]["features"][0, :, 0].tolist() == [3, 4, 4, 4]


def test_a_root_only_budget_runs_nothing_and_loses_nothing() -> None:
    proposer, graph = recorded()
    proposer.start([50, 51], features_of([0, 1]), 0)
    assert proposer.propose(52, Budget(1)).num_nodes == 1
    proposer.commit(Step([53], num_accepted=0, features=features_of([2])))
    assert proposer.propose(53, Budget(4, max_depth=0)).num_nodes == 1
    proposer.commit(Step([54], num_accepted=0, features=features_of([3])))
    assert len(graph.calls) == 1
    proposer.propose(54, Budget(4))
    assert graph.calls[1]["input_ids"].tolist() == [[52, 53, 54, MASK, MASK + 1]]
    assert graph.calls[1]["features"][0, :3, 0].tolist() == [1, 2, 3]


def test_toy_drafter_refuses_a_misplaced_feature() -> None:
    """The referee itself: a feature of another position must not pass."""
    target = ToyTarget(vocab_size=32)
    drafter = ToyDrafter(target)
    rows = DrafterRows(drafter, SlotCache(drafter.capacity), wants_features=True)
    proposer = OnePassProposer(rows, range(32, 35))
    wrong = np.zeros((3, 4), np.float32)
    wrong[:, 1] = [1, 2, 3]  # positions shifted by one
    with pytest.raises(AssertionError, match="misplaced"):
        proposer.start([1, 2, 3], wrong, 0)


@pytest.mark.parametrize("with_features", [True, False])
def test_its_guesses_are_mostly_right_on_a_peaked_target(with_features: bool) -> None:
    engine = make_engine("parallelspec", peak=9.0, noise=4.5, with_features=with_features)
    result = engine.generate(random_prompt(0), max_new_tokens=100, ignore_eos=True)
    assert result.stats.accepted_length > 3.5  # of at most 5: 3 masks, 4 guesses, the bonus


# ---- what a manifest promises of the graph


def drafter_entry(outputs: dict[str, tuple[int | str, ...]], **config: Any) -> DrafterInfo:
    """Returns the entry of a drafter whose graph has these outputs."""
    specs = tuple(TensorSpec(name, "float32", shape) for name, shape in outputs.items())
    graph = Graph("drafter.onnx", "slots", (), specs)
    return DrafterInfo("x", config, {"drafter": graph}, None, None, {}, None)


GUESSES: dict[str, tuple[int | str, ...]] = {"guess_ids": (3, 5), "guess_log_probs": (3, 5)}
FREE: dict[str, tuple[int | str, ...]] = {"guess_ids": ("M", 5), "guess_log_probs": ("M", 5)}
PAIRS: dict[str, tuple[int | str, ...]] = {"pair_log_probs": (2, 5, 5)}


def test_pairs_that_fit_are_read() -> None:
    assert not read_pairs(drafter_entry(GUESSES, num_guesses=3))
    assert not read_pairs(drafter_entry({}, num_masks=3))
    for outputs, masks in ((GUESSES, {}), (FREE, {"num_masks": 2})):
        assert read_pairs(drafter_entry(outputs | PAIRS, num_guesses=3, **masks))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (drafter_entry(GUESSES, num_guesses=4), r"got guess_ids as \[3, 5\] and num_masks 0 "),
        (drafter_entry(FREE, num_guesses=3, num_masks=3), r"as \['M', 5\] and num_masks 3 for"),
        (drafter_entry({"guess_ids": (3,)}, num_guesses=3), r"got guess_ids as \[3\] and num_"),
        (
            drafter_entry(GUESSES | {"guess_log_probs": (3, 4)}, num_guesses=3),
            r"got guess_log_probs as \[3, 4\], expected \[3, 5\]",
        ),
        (
            drafter_entry(GUESSES | {"pair_log_probs": (3, 5, 5)}, num_guesses=3),
            r"got pair_log_probs as \[3, 5, 5\], expected \[2, 5, 5\]",
        ),
        (drafter_entry(GUESSES | PAIRS), "expected num_guesses and drafter"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_each_other_are_one_line(entry: DrafterInfo, why: str) -> None:
    with pytest.raises(BundleError, match=why):
        read_pairs(entry)
