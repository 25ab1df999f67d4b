"""The table of bigrams in a drafter: where its pairs lie, the formula, and what its graph adds.

tests/export/test_drafter_graphs.py compares the pairs of graphs with those of their modules.
"""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from formulas import backbone, make_batch, make_drafter
from guessing import random_table
from tiny_backbone import TRIMMED, VOCAB

from spec_export.drafters.bigram_pairs import NO_KEY, BigramPairs, conditioned_log_probs, hashed
from spec_export.graphs.half import narrow

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
    pair_KCC = BigramPairs(table(), DRAFTED)(row_KC, log_prob)
    for k in range(2):
        for i, parent in enumerate(token_KC[k].tolist()):
            raised = q[k + 1] * np.exp([bias_of(parent, c) for c in token_KC[k + 1].tolist()])
            expected = raised / (raised.sum() + 1 - q[k + 1].sum())
            assert pair_KCC[k, i].exp().tolist() == pytest.approx(expected, rel=1e-5)


def test_what_the_candidates_leave_has_no_bias() -> None:
    """P(c|p) by its formula, in a loop; with the tail the probabilities behind p sum to 1."""
    rng = np.random.default_rng(3)
    q_C = np.array([0.5, 0.2, 0.1])
    bias_CC = rng.normal(size=(3, 3)) * 2
    log_prob, bias = torch.tensor(q_C).log(), torch.tensor(bias_CC)
    got_CC = conditioned_log_probs(log_prob, bias).exp().numpy()
    for p in range(3):
        whole = sum(q_C[c] * np.exp(bias_CC[p, c]) for c in range(3)) + 1 - sum(q_C)
        for c in range(3):
            assert got_CC[p, c] == pytest.approx(q_C[c] * np.exp(bias_CC[p, c]) / whole)
        assert got_CC[p].sum() + (1 - sum(q_C)) / whole == pytest.approx(1)


def test_a_table_is_no_weight_of_the_drafter() -> None:
    drafter = make_drafter("parallelspec")
    assert drafter.guesses_with_pairs(make_batch((5,)), 3)[2] is None
    before = set(drafter.state_dict())
    drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
    assert drafter.guesses_with_pairs(make_batch((5,)), 3)[2] is not None
    assert set(drafter.state_dict()) == before


def test_a_table_that_does_not_fit_is_refused() -> None:
    for name in ("previous", "next", "token"):
        with pytest.raises(ValueError, match="tokens outside the draft vocabulary"):
            BigramPairs(table(**{name: table()[name] + VOCAB}), DRAFTED)
    with pytest.raises(ValueError, match="tokens outside the draft vocabulary"):
        BigramPairs(table(), DRAFTED[1:])
    drafter = make_drafter("eagle")
    with pytest.raises(ValueError, match="got a table of bigrams, expected a drafter that"):
        drafter.add_bigrams(table())


def test_in_half_precision_a_table_keeps_its_keys() -> None:
    """CUDA has every operator that the table adds, by the types that it has here."""
    drafter = make_drafter("medusa", TRIMMED, top_k=5)
    known = {node.op_type for node in drafter.export(backbone().config)["drafter"].graph}
    drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
    model = drafter.export(backbone().config)["drafter"]
    assert {node.op_type for node in model.graph} - known <= {
        *("Cast", "Clip", "Concat", "Equal", "Exp", "Expand", "Log", "Mod", "Mul", "ReduceSum"),
        *("Slice", "Sub", "Unsqueeze"),
    }
    narrow(model, "fp16")
    weights = {str(v.name).rpartition(".")[2]: v.dtype for v in model.graph.initializers.values()}
    assert weights["key_HB"] == ir.DataType.INT64
    found = {weights.get(name) for name in ("bias_HB", "unseen_V1", "float16")} - {None}
    assert found == {ir.DataType.FLOAT16}
