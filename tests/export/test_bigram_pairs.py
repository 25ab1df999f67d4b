"""The table of bigrams in a drafter: where its pairs lie, the formula, and the exported graphs.

Tolerance between eager and ONNX Runtime: 1e-4 absolute on log-probabilities, both float32 with
other orders of summation.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from formulas import make_batch
from graphs import Runner, open_model
from this_cpu import SATURATES
from tiny_backbone import HEAD_DIM, HEADS, TRIMMED, VOCAB, backbone_of, chain, tiny
from torch import Tensor

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters import amphista, eagle, medusa, parallelspec
from spec_export.drafters.bigram_pairs import NO_KEY, BigramPairs, conditioned_log_probs, hashed
from spec_export.drafters.layers import Batch
from spec_export.graphs.half import narrow
from spec_export.graphs.quantize import quantize
from spec_export.graphs.slots import to_slots

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


def test_a_table_is_no_weight_of_the_drafter(backbone: Backbone) -> None:
    drafter = parallelspec.Drafter(parallelspec.Config(), target.ends(backbone))
    assert not drafter.has_pairs
    assert drafter.guesses_with_pairs(make_batch((5,)), 3)[2] is None
    before = set(drafter.state_dict())
    drafter.add_bigrams(table())
    assert drafter.has_pairs
    assert set(drafter.state_dict()) == before


def test_a_table_that_does_not_fit_is_refused(backbone: Backbone) -> None:
    for name in ("previous", "next", "token"):
        with pytest.raises(ValueError, match="tokens outside the draft vocabulary"):
            BigramPairs(table(**{name: table()[name] + VOCAB}), DRAFTED)
    with pytest.raises(ValueError, match="tokens outside the draft vocabulary"):
        BigramPairs(table(), DRAFTED[1:])
    drafter = eagle.Drafter(eagle.Config(), target.ends(backbone))
    with pytest.raises(ValueError, match="got a table of bigrams, expected a drafter that"):
        drafter.add_bigrams(table())


# ---- the exported graphs ----

TOLERANCE = 1e-4
D = HEADS * HEAD_DIM
DRAFTERS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "parallelspec": (parallelspec, {"num_masks": 3}),
    "parallelspec, eagle": (parallelspec, {"num_masks": 1, "style": "eagle"}),
    "medusa": (medusa, {"num_heads": 3}),
    "medusa, own heads": (medusa, {"num_heads": 3, "heads": "own"}),
    "amphista": (amphista, {"num_heads": 4}),
    "amphista, no stage": (amphista, {"staged": "none"}),
}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"), taps=(1,))


def make_drafter(
    backbone: Backbone, name: str, vocabulary: Tensor | None = None, **config: Any
) -> Any:
    module, options = DRAFTERS[name]
    torch.manual_seed(1)
    drafter = module.Drafter(module.Config(**options, **config), target.ends(backbone), vocabulary)
    with torch.no_grad():  # so that every weight matters
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
    return drafter


def random_table(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a table of bigrams that has a third of all pairs."""
    rng = np.random.default_rng(3)
    ids = np.sort(ids)
    previous, behind = np.nonzero(rng.random((len(ids), len(ids))) < 1 / 3)
    return {
        "previous": ids[previous].astype(np.int32),
        "next": ids[behind].astype(np.int32),
        "bias": rng.normal(size=len(behind)).astype(np.float32),
        "token": ids[::2].astype(np.int32),
        "unseen": -rng.random(len(ids[::2])).astype(np.float32),
    }


def hidden_rows(drafter: Any, batch: Batch) -> Tensor:
    """What the heads read without a bias, [T-1, K, D], of one sequence."""
    rows = torch.arange(batch.token_BT.shape[1] - 1)
    with torch.no_grad():
        if hasattr(drafter, "head_rows"):
            head_rows: Tensor = drafter.head_rows(batch, (torch.zeros_like(rows), rows))
            return head_rows
        real, masks = drafter.hidden_rows(batch, rows[None])
        out: Tensor = drafter.output_rows(torch.cat((real[0, :, None], masks[0]), 1))
        return out


def log_q(drafter: Any, row_D: Tensor, k: int) -> Tensor:
    """log q of guess k over the draft vocabulary."""
    own = getattr(drafter, "output_heads", None)
    return torch.log_softmax((own[k] if own else drafter.head_VD) @ row_D, -1).detach()


def check_pairs(drafter: Any, model: ir.Model, folder: Path, form: str, precision: str) -> None:
    """The graph's pairs are the module's of the same candidates, over chunks of uneven size."""
    batch, t = make_batch((18,)), -1
    assert batch.feature_BTF is not None
    token_T, feature_TF = batch.token_BT[0].numpy(), batch.feature_BTF[0].numpy()
    num_masks = getattr(drafter.config, "num_masks", 0)
    K, C = drafter.runtime_config()["num_guesses"], drafter.config.top_k
    rows_RKD = hidden_rows(drafter, batch)
    outputs = ["guess_ids", "guess_log_probs", "pair_log_probs"]
    if form == "stateless":
        backend = open_model(model, folder, form, 1)
    else:
        runner = Runner(model, folder, form, 64)
    for c in (5, 1, 4, 3):
        rows = slice(t + 1, t + 1 + c)
        t += c
        if form == "stateless":
            got = backend.run({"features": feature_TF[t : t + 1]}, outputs)
        else:
            masks = VOCAB + np.arange(num_masks)
            features = np.concatenate([feature_TF[rows], np.zeros((num_masks, D), np.float32)])
            got = runner.step(
                np.concatenate([token_T[1:][rows], masks]),
                chain(c + num_masks),
                outputs,
                range(c - 1, c + num_masks),
                features=features[None],
            )
            runner.cache.commit(range(c))
        index_KC = drafter.draft_index_V[torch.from_numpy(got["guess_ids"])]
        if precision == "fp32":
            log_prob_KV = torch.stack([log_q(drafter, row, k) for k, row in enumerate(rows_RKD[t])])
            mine = log_prob_KV.gather(1, index_KC).numpy()
            assert np.abs(got["guess_log_probs"] - mine).max() <= TOLERANCE
        with torch.no_grad():
            expected = drafter.bigrams(index_KC, torch.tensor(got["guess_log_probs"])).numpy()
        assert got["pair_log_probs"].shape == (K - 1, C, C)
        assert np.abs(got["pair_log_probs"] - expected).max() <= TOLERANCE


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_graph_has_the_modules_pairs(backbone: Backbone, name: str, tmp_path: Path) -> None:
    """In both forms, then in each precision."""
    drafter = make_drafter(backbone, name, TRIMMED, top_k=5)
    model = drafter.export(backbone.config)["drafter"]
    form = "slots"
    if any(value.name == "position_ids" for value in model.graph.inputs):
        check_pairs(drafter, model, tmp_path / "contiguous", "contiguous", "fp32")
        to_slots(model)
    else:
        form = "stateless"
    for precision in ("fp32", "int8", "int4"):
        graph = quantize(model.clone(), precision, SATURATES)
        check_pairs(drafter, graph, tmp_path / precision, form, precision)


def test_a_run_without_masks_has_pairs_that_nobody_reads(
    backbone: Backbone, tmp_path: Path
) -> None:
    """A chunk of the prompt asks for one row of logits; the shape of the pairs stays."""
    drafter = make_drafter(backbone, "parallelspec", top_k=5)
    model = to_slots(drafter.export(backbone.config)["drafter"])
    runner = Runner(model, tmp_path, "slots", 64)
    features = np.zeros((1, 2, D), np.float32)
    got = runner.step([3, 4], chain(2), ["guess_ids", "pair_log_probs"], [1], features=features)
    assert got["guess_ids"].shape == (1, 5)
    assert got["pair_log_probs"].shape == (3, 5, 5)


@pytest.mark.parametrize("name", ["parallelspec", "medusa", "amphista"])
def test_in_half_precision_a_table_keeps_its_keys(
    backbone: Backbone, name: str, tmp_path: Path
) -> None:
    """CUDA has every operator that the table adds, by the types that it has here."""
    drafter = make_drafter(backbone, name, TRIMMED, top_k=5)
    model = drafter.export(backbone.config)["drafter"]
    drafter.bigrams = None
    known = {node.op_type for node in drafter.export(backbone.config)["drafter"].graph}
    added = {node.op_type for node in model.graph} - known
    assert added <= {
        *("Cast", "Clip", "Concat", "Equal", "Exp", "Expand", "Log", "Mod", "Mul", "ReduceSum"),
        *("Slice", "Sub", "Unsqueeze"),
    }
    narrow(model, "fp16")
    weights = {str(v.name).rpartition(".")[2]: v.dtype for v in model.graph.initializers.values()}
    halves = ("bias_HB", "unseen_V1")
    assert weights["key_HB"] == ir.DataType.INT64
    found = [v for name, v in weights.items() if name in halves or name == "float16"]
    assert found
    assert set(found) == {ir.DataType.FLOAT16}
