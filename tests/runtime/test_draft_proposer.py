"""A draft model on the toy target: rows of tokens, chains and trees, nothing lost between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from toy_backend import ToyTarget
from toy_engine import make_engine, random_prompt

from spec_runtime.engine import Engine
from spec_runtime.loop.kv import open_cache
from spec_runtime.proposers.draft_model import DraftModelProposer
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.trees.budget import Budget

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
        return {
            "guess_ids": ids,
            "guess_log_probs": np.take_along_axis(log_q, ids, -1),
        }


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
