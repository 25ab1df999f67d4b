"""The Markov bias: the formula, what validation sees of it, and the exported graphs' pairs, which a
table of bigrams gives too.

Tolerance between eager and ONNX Runtime: 1e-4 absolute on log-probabilities, both float32 with
other orders of summation.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from formulas import make_batch
from graphs import Runner, graph_of, open_model
from tiny_backbone import HEAD_DIM, HEADS, TRIMMED, VOCAB, backbone_of, chain, tiny
from torch import Tensor

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters import amphista, medusa, parallelspec
from spec_export.drafters.layers import Batch
from spec_export.drafters.losses import IGNORED
from spec_export.drafters.markov import CandidateTables, MarkovBias, conditioned_log_probs
from spec_export.graphs.half import narrow
from spec_export.graphs.quantize import quantize
from spec_export.graphs.slots import to_slots
from spec_export.training.validate import validate

TOLERANCE = 1e-4
D, RANK = HEADS * HEAD_DIM, 96
# The drafter, and how many guesses it makes.
DRAFTERS: dict[str, tuple[ModuleType, dict[str, Any], int]] = {
    "parallelspec": (parallelspec, {"num_masks": 3}, 4),
    "parallelspec, row": (parallelspec, {"num_masks": 2, "markov_reads_hidden": True}, 3),
    "parallelspec, eagle": (parallelspec, {"num_masks": 1, "style": "eagle"}, 2),
    "medusa": (medusa, {"num_heads": 3, "markov_reads_hidden": True}, 3),
    "medusa, own heads": (medusa, {"num_heads": 3, "heads": "own"}, 3),
    "amphista": (amphista, {"num_heads": 4}, 4),
    "amphista, own heads": (
        amphista,
        {"num_heads": 3, "heads": "own", "markov_reads_hidden": True},
        3,
    ),
    "amphista, no stage": (amphista, {"staged": "none"}, 4),
}
every_drafter = pytest.mark.parametrize("name", DRAFTERS)
# Those that have a table of bigrams in place of a bias.
WITH_TABLE = ("parallelspec, table", "medusa, table", "amphista, table")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"), taps=(1,))


def make_drafter(
    backbone: Backbone, name: str, vocabulary: Tensor | None = None, **config: Any
) -> Any:
    module, options, _ = DRAFTERS[name.removesuffix(", table")]
    torch.manual_seed(1)
    has_table = name in WITH_TABLE
    none = {"markov_rank": 0, "markov_reads_hidden": False}
    options = {"markov_rank": RANK} | options | (none if has_table else {}) | config
    drafter = module.Drafter(module.Config(**options), target.ends(backbone), vocabulary)
    with torch.no_grad():  # so that every weight matters, and the bias as much as the row
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if drafter.markov is not None:
            drafter.markov.write.mul_(3)
    if has_table:
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


# ---- the formula ----


@pytest.mark.parametrize("reads_hidden", [False, True])
def test_the_bias_is_the_formula(backbone: Backbone, reads_hidden: bool) -> None:
    """h' = h + W_B · a, row by row; a guess without one before it keeps its row."""
    drafter = make_drafter(backbone, "parallelspec", markov_reads_hidden=reads_hidden)
    rows, token = torch.randn(2, 3, D), torch.tensor([[4, IGNORED, 7], [0, 9, IGNORED]])
    got = drafter.condition(rows, token)
    bias = drafter.markov
    for i, j in np.ndindex(2, 3):
        expected = rows[i, j]
        if token[i, j] != IGNORED:
            a = bias.read.T @ drafter.embed_VD[token[i, j]]
            if reads_hidden:
                a = a + bias.read_hidden.T @ rows[i, j]
                a = a / (1 + torch.exp(-a))
            expected = expected + bias.write.T @ a
        torch.testing.assert_close(got[i, j], expected, rtol=0, atol=1e-5)


def test_without_a_rank_rows_stay_and_nothing_is_saved(backbone: Backbone) -> None:
    rows, token = torch.randn(3, D), torch.tensor([1, 2, 3])
    for name in DRAFTERS:
        drafter = make_drafter(backbone, name, markov_rank=0, markov_reads_hidden=False)
        assert drafter.condition(rows, token) is rows
        assert not [key for key in drafter.state_dict() if "markov" in key]
        assert drafter.guesses_with_pairs(make_batch((5,)), 3)[2] is None


def test_an_untrained_bias_changes_nothing_and_learns(backbone: Backbone) -> None:
    drafter = parallelspec.Drafter(parallelspec.Config(markov_rank=8), target.ends(backbone))
    rows = torch.randn(5, D)
    out = drafter.condition(rows, torch.arange(5))
    assert torch.equal(out, rows)
    out.sum().backward()
    assert drafter.markov is not None
    assert drafter.markov.write.grad is not None
    assert drafter.markov.write.grad.any()


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


@every_drafter
def test_over_the_whole_vocabulary_pairs_are_the_conditioned_distribution(
    backbone: Backbone, name: str
) -> None:
    """Candidates that leave no tail: the log-softmax of the conditioned row, behind every token."""
    drafter, batch = make_drafter(backbone, name, TRIMMED), make_batch((6,))
    with torch.no_grad():
        ids, log_probs, pairs = drafter.guesses_with_pairs(batch, len(TRIMMED))
        rows = hidden_rows(drafter, batch)
        K = DRAFTERS[name][2]
        assert pairs.shape == (1, 5, K - 1, len(TRIMMED), len(TRIMMED))
        moved = 0.0
        for t, k in [(0, 1), (3, K - 1)]:
            for p in (0, 1, 17):
                row = drafter.condition(rows[t, k], ids[0, t, k - 1, p])
                expected = log_q(drafter, row, k)[drafter.draft_index_V[ids[0, t, k]]]
                torch.testing.assert_close(pairs[0, t, k - 1, p], expected, rtol=0, atol=1e-4)
                moved = max(moved, (expected - log_probs[0, t, k]).abs().max().item())
    assert moved > 0.5, "the bias has to matter"


@every_drafter
def test_of_a_few_candidates_pairs_are_the_formula(backbone: Backbone, name: str) -> None:
    drafter, batch, C = make_drafter(backbone, name, TRIMMED), make_batch((6,)), 4
    with torch.no_grad():
        ids, log_probs, pairs = drafter.guesses_with_pairs(batch, C)
        rows = hidden_rows(drafter, batch)
        for t, k, p in [(0, 1, 0), (3, DRAFTERS[name][2] - 1, 2)]:
            row = rows[t, k]
            own = getattr(drafter, "output_heads", None)
            head_VD = own[k] if own else drafter.head_VD
            b_V = head_VD @ (drafter.condition(row, ids[0, t, k - 1, p]) - row)
            e_m = b_V.exp().mean()
            if drafter.config.markov_reads_hidden:  # of the bias that does not read the row
                a_R = drafter.embed_VD[ids[0, t, k - 1, p]] @ drafter.markov.read
                a_R = a_R / (1 + torch.exp(-a_R))
                alone_V = head_VD @ (drafter.markov.write.T @ a_R)
                # all biases are centred first, each its own way
                e_m = (alone_V - alone_V.mean() + b_V.mean()).exp().mean()
            b_C = b_V[drafter.draft_index_V[ids[0, t, k]]]
            q_C = log_probs[0, t, k].exp()
            expected = q_C * b_C.exp() / ((q_C * b_C.exp()).sum() + (1 - q_C.sum()) * e_m)
            torch.testing.assert_close(pairs[0, t, k - 1, p], expected.log(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_constant_on_all_biases_changes_nothing(backbone: Backbone, num_heads: int) -> None:
    """The constant is each head's own, and as large as the biases."""
    torch.manual_seed(0)
    embed_VD = torch.randn(40, D)
    bias = MarkovBias(RANK, False, embed_VD)
    torch.nn.init.normal_(bias.write)
    head_VD, moved = torch.randn(num_heads, 40, D), torch.randn(num_heads, 1, D)
    rows, index = torch.randn(3, D), torch.arange(15).view(3, 5)
    log_prob = torch.log(torch.rand(3, 5) / 5)
    shifted = head_VD + moved
    assert (moved @ bias.write.T).abs().mean() > 1
    with torch.no_grad():
        expected, got = (
            CandidateTables(bias, embed_VD, head.flatten(0, 1))(rows, index, log_prob)
            for head in (head_VD, shifted)
        )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)


# ---- training ----


@pytest.mark.parametrize(
    "name", ["parallelspec", "parallelspec, row", "medusa", "medusa, own heads", "amphista"]
)
def test_the_loss_conditions_on_the_true_token_before(backbone: Backbone, name: str) -> None:
    """Guess k of row t is about token t + 2 + k and reads token t + 1 + k, but for guess 0."""
    soft: dict[str, Any] = {"lambda_soft": 0.0} if name == "amphista" else {"decay": 1.0}
    drafter, batch = make_drafter(backbone, name, **soft), make_batch((7,))
    K = DRAFTERS[name][2]
    rows, token_T = hidden_rows(drafter, batch), batch.token_BT[0]
    expected = 0.0
    for k in range(K):
        losses = []
        for t in range(7 - 2 - k):
            row = rows[t, k] if k == 0 else drafter.condition(rows[t, k], token_T[t + 1 + k])
            losses.append(-log_q(drafter, row, k)[token_T[t + 2 + k]].item())
        expected += float(np.mean(losses))
    loss, _ = drafter.loss(batch)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    for parameter in drafter.markov.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()


def test_a_trained_bias_knows_what_features_do_not_tell(backbone: Backbone) -> None:
    """Tokens go round a cycle of 12 and all features are equal: guess 0 is any of 12, and each
    later one follows from the guess before it."""
    torch.manual_seed(4)
    cycle = torch.randperm(VOCAB)[:12]
    token_BT = cycle[(torch.randint(12, (8, 1)) + torch.arange(20)) % 12]
    batch = Batch(
        token_BT, torch.ones(8, 20, dtype=torch.bool), torch.ones(8, 20, D), torch.full((8,), 20)
    )
    results = {}
    for rank in (0, 16):
        torch.manual_seed(5)
        config = medusa.Config(num_heads=3, markov_rank=rank, top_k=VOCAB)
        drafter = medusa.Drafter(config, target.ends(backbone))
        optimizer = torch.optim.Adam(drafter.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            drafter.loss(batch)[0].backward()
            optimizer.step()
        results[rank] = validate([batch], partial(drafter.guesses_with_pairs, top_k=VOCAB))
    for k in (1, 2):
        assert results[0].top1_K[k] < 0.2
        assert results[16].top1_K[k] > 0.9
        assert results[16].ece_K[k] < results[0].ece_K[k]
    assert results[16].top1_K[0] == results[0].top1_K[0] < 0.2
    assert results[16].accepted_length > results[0].accepted_length + 0.2


# ---- the exported graphs ----


def check_pairs(drafter: Any, model: ir.Model, folder: Path, form: str, tolerance: float) -> None:
    """The graph's pairs are the module's of the same candidates, over chunks of uneven size."""
    batch, t = make_batch((18,)), -1
    assert batch.feature_BTF is not None
    token_T, feature_TF = batch.token_BT[0].numpy(), batch.feature_BTF[0].numpy()
    num_masks = getattr(drafter.config, "num_masks", 0)
    K, C = drafter.runtime_config()["num_guesses"], drafter.config.top_k
    rows_RKD, tables = hidden_rows(drafter, batch), drafter.candidate_tables()
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
        log_prob_KV = torch.stack([log_q(drafter, row, k) for k, row in enumerate(rows_RKD[t])])
        with torch.no_grad():
            expected = tables(rows_RKD[t], index_KC, log_prob_KV.gather(1, index_KC)).numpy()
        assert got["pair_log_probs"].shape == (K - 1, C, C)
        apart = np.abs(got["pair_log_probs"] - expected)
        assert (np.max if tolerance == TOLERANCE else np.mean)(apart) <= tolerance


# the largest difference in fp32; the mean one in int8 and int4, whose rows round too (measures 0.19
# and 1.1 at most)
TOLERANCES = {"fp32": TOLERANCE, "int8": 0.3, "int4": 1.5}


@pytest.mark.parametrize("name", [*DRAFTERS, *WITH_TABLE])
def test_the_graph_has_the_modules_pairs(backbone: Backbone, name: str, tmp_path: Path) -> None:
    """In both forms, then in each precision."""
    drafter = make_drafter(backbone, name, TRIMMED, top_k=5)
    model = drafter.export(backbone.config)["drafter"]
    form = "slots"
    if any(value.name == "position_ids" for value in model.graph.inputs):
        check_pairs(drafter, model, tmp_path / "contiguous", "contiguous", TOLERANCE)
        to_slots(model)
    else:
        form = "stateless"
    for precision, tolerance in TOLERANCES.items():
        graph = quantize(model.clone(), precision)
        check_pairs(drafter, graph, tmp_path / precision, form, tolerance)


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


@pytest.mark.parametrize("name", ["parallelspec, row", "medusa", "amphista, own heads"])
def test_in_half_precision_pairs_are_summed_in_float32(
    backbone: Backbone, name: str, tmp_path: Path
) -> None:
    """Tables and their product are narrow, sums over candidates are not; CUDA has every operator
    that the pairs add."""
    drafter = make_drafter(backbone, name, top_k=5, markov_rank=8)
    exported = drafter.export(backbone.config)["drafter"]
    plain = make_drafter(backbone, name, top_k=5, markov_rank=0, markov_reads_hidden=False)
    known = {node.op_type for node in plain.export(backbone.config)["drafter"].graph}
    added = {node.op_type for node in exported.graph} - known
    assert added <= {
        *("Clip", "Concat", "Exp", "Expand", "Log", "MatMul", "Mul", "ReduceSum", "Sigmoid"),
        *("Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    }
    for precision, type in (("fp16", ir.DataType.FLOAT16), ("bf16", ir.DataType.BFLOAT16)):
        model = exported.clone()
        narrow(model, precision)
        tables = [v for name, v in model.graph.initializers.items() if "_VR" in name]
        assert [value.dtype for value in tables] == [type] * 2
        sums = [n for n in model.graph if n.op_type in ("LogSoftmax", "ReduceSum", "Exp", "Log")]
        assert len(sums) == 5
        assert {node.inputs[0].dtype for node in sums if node.inputs[0]} == {ir.DataType.FLOAT}
        spec = next(s for s in graph_of(model, "slots").outputs if s.name == "pair_log_probs")
        assert spec.dtype == "float32"
        if name == "medusa" and precision == "fp16":  # the CPU computes this graph by casts
            check_pairs(drafter, model, tmp_path, "stateless", 0.02)


@pytest.mark.parametrize("name", WITH_TABLE)
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


# ---- config ----


@pytest.mark.parametrize("module", [parallelspec, medusa, amphista])
def test_config_errors(module: ModuleType) -> None:
    one: dict[str, Any] = {"num_masks": 0} if module is parallelspec else {"num_heads": 1}
    one |= {"staged": "one"} if module is amphista else {}
    for fields, message in (
        ({"markov_rank": -1}, "got markov_rank -1, expected 0"),
        ({"markov_rank": 8} | one, "got markov_rank 8 with one guess, expected two"),
        ({"markov_reads_hidden": True}, "got markov_reads_hidden without a markov_rank"),
    ):
        with pytest.raises(ValueError, match=message):
            module.Config(**fields)


def test_the_proposer_is_told_the_rank(backbone: Backbone) -> None:
    for name in DRAFTERS:
        assert make_drafter(backbone, name, markov_rank=5).runtime_config()["markov_rank"] == 5
