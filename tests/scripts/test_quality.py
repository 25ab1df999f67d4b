"""Scores of texts under a target, by which the scripts that measure compare them."""

import dataclasses

import numpy as np
import pytest
from small import small_manifest
from toy_engine import make_engine, random_prompt

from tools.measure import quality


@pytest.mark.parametrize("num_tokens", [3, 2 * quality.SCORED_ROWS + 6])
def test_a_text_is_as_likely_as_its_tokens_one_by_one(num_tokens: int) -> None:
    target = make_engine("none").target
    prompt_ids, answer = [7], random_prompt(3, length=num_tokens)
    expected = 0.0
    for i, token in enumerate(answer):
        target.truncate(0)
        logits_V = target.prefill([*prompt_ids, *answer[:i]])[0].row(0).astype(float)
        expected += logits_V[token] - np.log(np.exp(logits_V).sum())
    assert quality.log_prob(target, prompt_ids, answer) == pytest.approx(expected)


def test_what_a_reference_must_be() -> None:
    ours = small_manifest()
    quality.check_reference(ours, ours)
    reduced = dataclasses.replace(ours, target=dataclasses.replace(ours.target, precision="int8"))
    with pytest.raises(ValueError, match="got a reference of int8, expected an fp32 one"):
        quality.check_reference(ours, reduced)
    other = dataclasses.replace(ours, tokenizer=dataclasses.replace(ours.tokenizer, sha256="x"))
    with pytest.raises(ValueError, match="another tokenizer"):
        quality.check_reference(ours, other)
    shorter = dataclasses.replace(ours, target=dataclasses.replace(ours.target, max_length=16))
    with pytest.raises(ValueError, match="got a reference with a context of 16, expected 32"):
        quality.check_reference(ours, shorter)
