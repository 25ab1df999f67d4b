"""A draft model on the toy target: rows of tokens, chains and trees, nothing lost between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from toy_backend import ByteTokenizer, ToyTarget
from toy_engine import random_prompt

from spec_runtime.engine import Engine, OpenedDrafter
from spec_runtime.kv import open_cache
from spec_runtime.proposers.base import PlainProposer, Proposer
from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.step import Step
from spec_runtime.target import Target
from spec_runtime.trees.budget import Budget

VOCAB, MAX_LENGTH, SCRATCH = 64, 160, 32


class ToyModel:
    """The toy target's own network as a draft model: top 3 of its logits. Quiet, so that it is
    often right; what a row attends decides its guesses, so a misplaced row changes them."""

    def __init__(self, form: str) -> None:
        self.target = ToyTarget(
            vocab_size=VOCAB, capacity=MAX_LENGTH + SCRATCH, form=form, peak=9.0, noise=3.0
        )
        self.form, self.capacity = form, self.target.capacity
        self.calls: list[dict[str, np.ndarray]] = []

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.calls.append(feeds)
        logits = self.target.run(feeds, ["logits"])["logits"]
        log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = np.argsort(-log_q, axis=-1)[:, :3]
        return {
            "guess_ids": ids,
            "guess_log_probs": np.take_along_axis(log_q, ids, -1),
        }


def make_engine(form: str, **levels: Any) -> tuple[Engine, Engine, ToyModel]:
    """With a draft model that is the target itself, and plain."""
    engines: list[Engine] = []
    model = ToyModel(form)
    rows = DrafterRows(model, open_cache(form, model.capacity), wants_features=False, first_token=0)
    drafter = DraftModelProposer(rows, **({"num_guesses": 4, "max_width": 3} | levels))
    proposers: list[Proposer] = [drafter, PlainProposer()]
    for proposer in proposers:
        backend = ToyTarget(
            vocab_size=VOCAB, capacity=MAX_LENGTH + SCRATCH, form=form, peak=9.0, noise=3.0
        )
        cache = open_cache(form, backend.capacity)
        target = Target(backend, cache, vocab_size=VOCAB, max_length=MAX_LENGTH)
        engines.append(Engine(target, ByteTokenizer(), OpenedDrafter("toy", proposer, Budget(9))))
    return engines[0], engines[1], model


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("max_width", [1, 3])
def test_the_target_as_its_own_draft_model_is_always_right(form: str, max_width: int) -> None:
    """Each step accepts the whole depth: a row that is missing, misplaced or left over from the
    last tree would change what the model says."""
    drafted, plain, _ = make_engine(form, max_width=max_width)
    for seed in range(3):
        prompt = random_prompt(seed, 20 + seed, VOCAB)
        result = drafted.generate(prompt, max_new_tokens=51, ignore_eos=True)
        expected = plain.generate(prompt, max_new_tokens=51, ignore_eos=True)
        assert result.token_ids == expected.token_ids
        assert result.stats.accepted_length == 5.0  # 4 guesses and the bonus


def test_rows_of_a_conversation() -> None:
    drafted, plain, _ = make_engine("slots")
    prompt = random_prompt(7, 20, VOCAB)
    for more in ([], [3, 4, 5], [9]):
        prompt = prompt + more
        result = drafted.generate(prompt, max_new_tokens=13, ignore_eos=True)
        expected = plain.generate(prompt, max_new_tokens=13, ignore_eos=True, reuse=False)
        assert result.token_ids == expected.token_ids
        assert result.stats.accepted_length >= 4.0
        prompt = prompt + result.token_ids
    assert result.stats.reused_tokens > 30


def test_a_chain_is_a_width_of_one() -> None:
    model = ToyModel("slots")
    rows = DrafterRows(
        model, open_cache("slots", model.capacity), wants_features=False, first_token=0
    )
    proposer = DraftModelProposer(rows, num_guesses=4, max_width=1)
    proposer.start([1, 2, 3], None, 0)
    tree = proposer.propose(4, Budget(20))
    ids = [call["input_ids"][0].tolist() for call in model.calls]
    assert ids[:2] == [[1, 2, 3], [4]]
    assert [len(row) for row in ids[2:]] == [1, 1, 1]
    assert [call["position_ids"][0].tolist() for call in model.calls[1:]] == [[3], [4], [5], [6]]
    assert int(tree.depth_N.max()) == 4
    proposer.commit(Step([5], num_accepted=0))
    assert proposer.propose(5, Budget(1)).num_nodes == 1
    assert len(model.calls) == 5
    with pytest.raises(AssertionError):
        DraftModelProposer(
            DrafterRows(model, open_cache("slots", 8), wants_features=True),
            num_guesses=4,
            max_width=1,
        )
