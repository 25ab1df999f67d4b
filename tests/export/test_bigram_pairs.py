"""The table of bigrams in a drafter: where its pairs lie, and the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_backbone import VOCAB, backbone_of, tiny

from spec_export import target
from spec_export.drafters import eagle, parallelspec
from spec_export.drafters.bigram_pairs import NO_KEY, BigramPairs, hashed

DRAFTED = torch.tensor([9, 7, 1, 4, 8, 5, 6])
BIAS = {(7, 4): 2.0, (7, 6): -1.0, (8, 5): 1.5, (9, 4): 0.25}
UNSEEN = {7: -0.5, 8: -3.0}


def table(**changes: np.ndarray) -> dict[str, np.ndarray]:
    previous, following = zip(*BIAS, strict=True)
    return {
        "previous": np.array(previous, np.int32),
        "next": np.array(following, np.int32),
        "bias": np.array(list(BIAS.values()), np.float32),
        "token": np.array(list(UNSEEN), np.int32),
        "unseen": np.array(list(UNSEEN.values()), np.float32),
    } | changes


def bias_of(previous: int, following: int) -> float:
    return BIAS.get((previous, following), UNSEEN.get(previous, 0.0))


@pytest.mark.parametrize("count", [0, 1, 7, 500, 20_000])
def test_each_key_lies_in_its_bucket_once(count: int) -> None:
    rng = np.random.default_rng(count)
    key_P = np.sort(rng.choice(10_000**2, count, replace=False))
    value_P = rng.normal(size=count).astype(np.float32)
    key_HB, value_HB = hashed(key_P, value_P)
    bucket, place = np.nonzero(key_HB != NO_KEY)
    found = key_HB[bucket, place]
    assert (found % len(key_HB) == bucket).all()
    order = found.argsort()
    assert np.array_equal(found[order], key_P)
    assert np.array_equal(value_HB[bucket, place][order], value_P)
    assert not value_HB[key_HB == NO_KEY].any()
    assert key_HB.size <= 5 * count + 5


def test_the_bias_of_a_pair_is_its_own_or_that_of_its_first_token() -> None:
    pairs = BigramPairs(table(), DRAFTED)
    rows = torch.arange(len(DRAFTED))
    tokens = DRAFTED.tolist()
    expected = [[bias_of(p, c) for c in tokens] for p in tokens]
    assert pairs.bias(rows, rows).tolist() == expected
    nothing = {name: array[:0] for name, array in table().items()}
    assert not BigramPairs(nothing, DRAFTED).bias(rows, rows).any()


def test_probabilities_below_a_parent_follow_the_formula() -> None:
    """Of the second guess 4, 5 and 6 have probability .5, .2 and .1, and all others .2."""
    token_KC = torch.tensor([[7, 8, 9], [4, 5, 6], [7, 4, 1]])
    row_KC = (token_KC[..., None] == DRAFTED).int().argmax(-1)
    q = np.array([[0.6, 0.3, 0.1], [0.5, 0.2, 0.1], [0.4, 0.3, 0.2]])
    log_prob = torch.from_numpy(np.log(q).astype(np.float32))
    pair_KCC = BigramPairs(table(), DRAFTED)(torch.zeros(3, 1), row_KC, log_prob)
    for k in range(2):
        for i, parent in enumerate(token_KC[k].tolist()):
            raised = q[k + 1] * np.exp([bias_of(parent, c) for c in token_KC[k + 1].tolist()])
            expected = raised / (raised.sum() + 1 - q[k + 1].sum())
            assert pair_KCC[k, i].exp().tolist() == pytest.approx(expected, rel=1e-5)


def make_drafter(module: Any, **config: Any) -> Any:
    return module.Drafter(module.Config(**config), target.ends(backbone_of(tiny("llama"))))


def test_a_table_is_no_weight_of_the_drafter() -> None:
    drafter = make_drafter(parallelspec)
    assert drafter.candidate_tables() is None
    before = set(drafter.state_dict())
    drafter.add_bigrams(table())
    assert drafter.has_pairs
    assert drafter.candidate_tables() is drafter.bigrams
    assert set(drafter.state_dict()) == before


def test_a_table_that_does_not_fit_is_refused() -> None:
    for name in ("previous", "next", "token"):
        with pytest.raises(ValueError, match="tokens outside the draft vocabulary"):
            BigramPairs(table(**{name: table()[name] + VOCAB}), DRAFTED)
    with pytest.raises(ValueError, match="tokens outside the draft vocabulary"):
        BigramPairs(table(), DRAFTED[1:])
    for drafter in (make_drafter(eagle), make_drafter(parallelspec, markov_rank=4)):
        with pytest.raises(ValueError, match="got a table of bigrams, expected a drafter that"):
            drafter.add_bigrams(table())
