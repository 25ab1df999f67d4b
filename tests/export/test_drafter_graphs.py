"""Each drafter's graph guesses as its module does, or as its published forward pass.

One graph has several of a drafter's switches: tests/export/test_formulas.py compares each one alone
with its formula.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from formulas import PLUS_PLUS, backbone, features_of, make_batch, make_drafter, width_of
from graphs import Runner
from guessing import (
    TOLERANCE,
    check_along_trees,
    check_guesses,
    check_levels,
    check_one_pass,
    check_pairs,
    every_log_q,
    guesses_by_chunk,
    random_table,
)
from published_eagle3 import Published
from tiny_backbone import LAYERS, TRIMMED, VOCAB, backbone_of, chain, tiny
from torch import Tensor
from torch.nn import functional as F

from spec_export.drafters.draft_model import Config, Pretrained
from spec_export.drafters.layers import Batch
from spec_export.graphs import trace
from spec_export.graphs.quantize import quantize
from spec_export.graphs.slots import to_slots
from spec_export.model.hidden_states import features_and_taps

TAPS = (2, 0, LAYERS)  # in an order of their own; the last is the last layer's output
OWN = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "num_kv_heads": 2},
    **{"head_dim": 24, "norm_eps": 1e-3, "own_embedding": True},
    "rope": {"rope_type": "default", "rope_theta": 100.0},
}
EAGLES_OWN = {  # as EAGLE's files have them
    **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24},
    **{"rope": {"rope_theta": 90.0}, "norm_eps": 1e-3, "input_norm": False},
}


def inputs_of(model: ir.Model) -> set[str]:
    return {str(value.name) for value in model.graph.inputs}


def count(model: ir.Model, *kinds: str) -> int:
    return sum(node.op_type in kinds for node in model.graph)


# ---- one pass ----

AMPHISTA: dict[str, tuple[dict[str, Any], int, int]] = {  # options, caches, products of attention
    "full": ({}, 4, 1),
    "own heads": ({"attention_layers": 2, "taps": (1,), "heads": "own", "num_heads": 3}, 4, 2),
    "one stage": ({"staged": "one", "sampled_token": False, "position_table": False}, 2, 1),
    "no stage": ({"staged": "none"}, 0, 1),
    "no auto-embedding": ({"staged": "none", "auto_embedding": False}, 0, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", AMPHISTA)
def test_amphista(case: str, tmp_path: Path) -> None:
    """The mean difference counts: measures 0.14 and 0.8 in int8 and int4, other rows are 0.7 apart,
    so that int4 only shows that the graph runs."""
    options, caches, attentions = AMPHISTA[case]
    drafter = make_drafter("amphista", TRIMMED, top_k=5, **options)
    if case in ("full", "no stage"):
        drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
    model = check_one_pass(drafter, tmp_path, {"int8": 0.3, "int4": 1.5}, np.mean)
    names = inputs_of(model)
    assert sum(name.startswith("kv.") for name in names) == caches
    assert count(model, "Softmax") == attentions
    assert caches or names == {"features"}
    unused = [v.name for v in model.graph.inputs if not v.uses()]
    assert unused == (["input_ids"] if case == "one stage" else [])


@pytest.mark.parametrize(
    "options",
    [{}, {"heads": "own", "num_layers": 2, "num_heads": 3, "bias": True}, {"num_heads": 1}],
)
def test_medusa(options: dict[str, Any], tmp_path: Path) -> None:
    """No graph has a product too many."""
    drafter = make_drafter("medusa", TRIMMED, top_k=5, **options)
    config = drafter.config
    heads = config.num_heads if config.heads == "own" else 1
    if config.num_heads > 1:
        drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
    model = check_one_pass(drafter, tmp_path, {"int8": 0.1, "int4": 1.0})
    assert count(model, "MatMul", "Gemm") == config.num_heads * config.num_layers + heads


@pytest.mark.parametrize(
    ("options", "has_bigrams"),
    [
        ({"mask_feature": "anchor", "taps": (1,), "layers": 2}, True),
        ({"inputs": "tokens", "num_masks": 2}, False),
        ({"style": "eagle", "num_masks": 3, "taps": (1,)}, True),
        ({"num_masks": 0}, False),
    ],
)
def test_parallelspec(options: dict[str, Any], has_bigrams: bool, tmp_path: Path) -> None:
    """In 8 and 4 bits only the pairs count. A chunk of the prompt has no masks and asks for one row
    of logits; the shape of the pairs stays, and nobody reads them."""
    drafter = make_drafter("parallelspec", TRIMMED, top_k=5, **options)
    if has_bigrams:
        drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
    precisions = ("int8", "int4") if has_bigrams else ()
    model = check_one_pass(drafter, tmp_path, dict.fromkeys(precisions, np.inf))
    if has_bigrams:
        features = np.zeros((1, 2, width_of(drafter)), np.float32)
        outputs, runner = ["guess_ids", "pair_log_probs"], Runner(model, tmp_path / "prompt")
        got = runner.step([3, 4], chain(2), outputs, [1], features=features)
        K = drafter.config.num_masks
        assert (got["guess_ids"].shape, got["pair_log_probs"].shape) == ((1, 5), (K, 5, 5))


# ---- level by level ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hydra", {}),
        ("hydra", {"num_guesses": 1}),
        ("hydra", PLUS_PLUS | {"num_guesses": 2}),
        ("redrafter", {}),
        ("redrafter", {"num_guesses": 2, "num_layers": 0}),
        ("redrafter", {"width": "both", "head": "own", "num_guesses": 3}),
        ("semi_autoregressive", {}),
        ("semi_autoregressive", {"kind": "lstm", "head": "shared"}),
        ("semi_autoregressive", {"kind": "rnn", "head": "shared"}),
        (
            "semi_autoregressive",
            {"kind": "transformer", "layers": 2, "num_guesses": 4, "head": "shared"},
        ),
    ],
)
def test_levels(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_levels(make_drafter(name, TRIMMED, top_k=5, **options), tmp_path)


# ---- along trees ----


@pytest.mark.parametrize(
    ("options", "vocabulary"),
    [({"normalise": True}, None), ({"layers": 2, "qkv_bias": True} | EAGLES_OWN, TRIMMED)],
)
def test_eagle(options: dict[str, Any], vocabulary: Tensor | None, tmp_path: Path) -> None:
    """Each node against the module's rollout along its own path."""
    drafter = make_drafter("eagle", vocabulary, top_k=5, num_guesses=4, **options)
    model = drafter.export(backbone().config)["drafter"]
    feature_TD = features_of(make_batch((24,)))[0]

    def expected_of(token_T: Tensor, length: int) -> tuple[Tensor, Tensor]:
        T, t = len(token_T), length - 1
        feature = F.pad(feature_TD[None, :length], (0, 0, 0, T - length))
        text = Batch(token_T[None], torch.ones(1, T) > 0, feature, torch.tensor([T]))
        with torch.no_grad():
            hidden_D = drafter.rollout(text, feature, T - 1 - t)[T - 2 - t][0, t]
        log_q_V = torch.full((VOCAB,), -torch.inf)
        log_q_V[drafter.draft_token_ids] = torch.log_softmax(drafter.head_VD @ hidden_D, -1)
        return log_q_V, hidden_D

    features = feature_TD.numpy()
    check_along_trees(model, tmp_path / "contiguous", "contiguous", expected_of, features)
    check_along_trees(to_slots(model), tmp_path / "slots", "slots", expected_of, features)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), [("qwen3", "slots"), ("phi3", "contiguous")])
def test_a_pretrained_models_graph(family: str, form: str, tmp_path: Path) -> None:
    """Its table has more rows than the target has tokens: the rest is never guessed."""
    model = tiny(family, tie_word_embeddings=family == "qwen3")
    ids = torch.arange(VOCAB - 7)
    drafter = Pretrained(backbone_of(model), VOCAB - 7, Config(top_k=5))
    graph = drafter.export(backbone_of(model).config)["drafter"]

    def expected_of(token_T: Tensor, length: int) -> tuple[Tensor, None]:
        with torch.no_grad():
            logits_V = model(token_T[None]).logits[0, -1]
        log_q_V = torch.full_like(logits_V, -torch.inf)
        log_q_V[ids] = torch.log_softmax(logits_V[ids], -1)
        return log_q_V, None

    graph = to_slots(graph) if form == "slots" else graph
    check_along_trees(graph, tmp_path, form, expected_of, vocab=VOCAB - 7)


# ---- EAGLE-3 and P-EAGLE, as they are published ----

EAGLE3: dict[str, dict[str, Any]] = {
    "native": {},
    "speculators": {**{"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "Qwen3 layers": {"qk_norms": True, "layers": 2, "taps": (0, 1, 2, 3)},
    "sizes of its own": OWN,
    "windows": {"layers": 2, "sliding_layers": (1,), "window": 4, "norm_before_residual": True},
    "one tap": {"taps": (1,), "norm_before_residual": True, "layers": 2},
    "all at once": {**{"norm_before_residual": True, "norm_output": True, "qk_norms": True}}
    | {"layers": 2, "sliding_layers": (0,), "window": 4},
}
PEAGLE: dict[str, dict[str, Any]] = {
    "as it is trained": {"layers": 4, "own_embedding": True},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "num_masks": 2},
    "Qwen3 layers": {"qk_norms": True, "layers": 2, "fc_norm": True, "taps": (0, LAYERS)},
    "sizes of its own": OWN,
    "no masks": {"num_masks": 0},
    "windows": {"layers": 3, "sliding_layers": (0, 2), "window": 5},
    "all at once": {**{"norm_before_residual": True, "qk_norms": True, "num_masks": 3}}
    | {"layers": 2, "sliding_layers": (0,), "window": 5},
}
IN_GRAPHS = ("sizes of its own", "all at once")


def published(name: str, options: dict[str, Any]) -> tuple[Any, Published]:
    """Returns a drafter and its published form."""
    known: dict[str, Any] = {"taps": TAPS, "top_k": 5}
    known |= {"mask_token_id": 7} if name == "peagle" else {"num_guesses": 3}
    drafter = make_drafter(name, TRIMMED, **known | options)
    rope = options.get("rope") or backbone().config.rope
    return drafter, Published(drafter, rope["rope_theta"])


@pytest.mark.slow
@pytest.mark.parametrize("case", EAGLE3)
def test_eagle_3(case: str, tmp_path: Path) -> None:
    """Levels of the module and, of some, nodes of trees in the graph."""
    drafter, theirs = published("eagle3", EAGLE3[case])
    batch = make_batch((9,), width_of(drafter))
    tokens, log_q_RKV = batch.token_BT[0].tolist(), every_log_q(drafter, batch)[..., TRIMMED]
    with torch.no_grad():
        fused_TD = theirs.fused_of(features_of(batch)[0])
        for t in range(6):
            rows = theirs.levels(fused_TD[: t + 1], tokens, 3)
            expected_KV = torch.stack([theirs.log_q(row) for row in rows])
            torch.testing.assert_close(log_q_RKV[t], expected_KV, rtol=0, atol=1e-4)
    if case not in IN_GRAPHS:
        return
    model = drafter.export(backbone().config)["drafter"]
    with torch.no_grad():
        fused_TD = theirs.fused_of(features_of(make_batch((24,), width_of(drafter)))[0])

    def expected_of(token_T: Tensor, length: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            row = theirs.levels(fused_TD[:length], token_T.tolist(), len(token_T) - length)[-1]
            log_q_V = torch.full((VOCAB,), -torch.inf)
            log_q_V[TRIMMED] = theirs.log_q(row)
            return log_q_V, theirs.norm(row, "norm") if drafter.config.norm_output else row

    for form, graph in (("contiguous", model), ("slots", to_slots(model.clone()))):
        check_along_trees(graph, tmp_path / form, form, expected_of, fused_TD.numpy())


def test_the_targets_graph_fuses_its_taps(tmp_path: Path) -> None:
    """Also in 8 bits, where the fusion's product stays in float."""
    hf_model, token_N = tiny("llama"), torch.arange(9) * 5
    whole, expected = backbone_of(hf_model), dict[str, np.ndarray]()
    with torch.no_grad():
        _, *taps = features_and_taps(hf_model.model, token_N[None], TAPS)
    for kind, case in enumerate(("native", "speculators", "EAGLE-3.1")):
        drafter, theirs = published("eagle3", EAGLE3[case])
        whole.add_fusion(f"eagle3{kind}", drafter.fusion)
        with torch.no_grad():
            expected[f"fused.eagle3{kind}"] = theirs.fused([tap[0] for tap in taps]).numpy()
    model = to_slots(trace.export_backbone(whole))
    for precision, tolerance in (("fp32", 1e-5), ("int8", 0.2)):
        graph = quantize(model.clone(), precision)
        assert "fusions.eagle30.fc" in graph.graph.initializers
        got = Runner(graph, tmp_path / precision).step(token_N.numpy(), chain(9), [*expected])
        for name, fused in expected.items():
            assert np.abs(got[name] - fused).max() <= tolerance * np.abs(fused).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("case", PEAGLE)
def test_p_eagle(case: str, tmp_path: Path) -> None:
    """Groups of the module and, of some, of the graph, which a table of bigrams conditions."""
    drafter, theirs = published("peagle", PEAGLE[case])
    batch, K = make_batch((24,), width_of(drafter)), drafter.config.num_masks
    tokens, expected_RKV = batch.token_BT[0].tolist(), torch.full((23, K + 1, VOCAB), -torch.inf)
    with torch.no_grad():
        fused_TD = theirs.fused_of(features_of(batch)[0])
        for t in range(23):
            group = theirs.group(fused_TD[: t + 1], tokens, K)
            expected_RKV[t, :, TRIMMED] = theirs.log_q(group)
    torch.testing.assert_close(every_log_q(drafter, batch), expected_RKV, rtol=0, atol=1e-4)
    if case not in (*IN_GRAPHS, "no masks"):
        return
    if case == "all at once":
        drafter.add_bigrams(random_table(TRIMMED.numpy()))
    model = drafter.export(backbone().config)["drafter"]
    for form, graph in (("contiguous", model), ("slots", to_slots(model.clone()))):
        found = guesses_by_chunk(drafter, graph, tmp_path / form, form, batch, fused_TD.numpy())
        for t, got in found:
            assert got["guess_log_probs"].shape == (K + 1, 5)
            apart = check_guesses(got["guess_ids"], got["guess_log_probs"], expected_RKV[t])
            assert apart.max() <= TOLERANCE, (form, t)
            check_pairs(drafter, got)


# ---- DFlash ----

DFLASH: dict[str, dict[str, Any]] = {  # without these, see test_import_dflash.py
    "DFlash 2": {"markov_rank": 8, "selector": True, "conv_size": 3, "conv_group": 8, "layers": 1},
    "a Markov head, fill-in, windows": {"markov_rank": 8, "qk_norms": False, "window": 5}
    | {"sliding_layers": (0,), "causal_layers": (0, 1)},
    "DSpark of its own sizes": OWN
    | {"own_head": True, "sample_from_anchor": True, "markov_rank": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DFLASH)
def test_dflash(case: str, tmp_path: Path) -> None:
    """Context comes in chunks; the block after each one is scratch, and sees all of it."""
    drafter = make_drafter("dflash", TRIMMED, **DFLASH[case])
    config, outputs = drafter.config, drafter.output_names()
    if config.markov_rank:  # which starts as zeros
        torch.nn.init.normal_(drafter.markov_write)
        torch.nn.init.normal_(drafter.markov_read)
    batch = make_batch((24,), width_of(drafter))
    with torch.no_grad():
        _, *taps = features_of(batch)[0].split(drafter.target_width, -1)
        fused_TD = drafter.fusion(taps).numpy()
    log_q_RKV = every_log_q(drafter, batch)
    ids_RKC, log_prob_RKC, pair_RKCC = drafter.guesses_with_pairs(batch, config.top_k)
    first, size = config.first_row, config.block_size
    model = drafter.export(backbone().config)["drafter"]
    for form, graph in (("contiguous", model), ("slots", to_slots(model.clone()))):
        runner, t = Runner(graph, tmp_path / form, form, 64), -1
        for c in (7, 1, 3, 1, 6):
            context_CD, t = fused_TD[t + 1 : t + 1 + c], t + c
            root = int(batch.token_BT[0, t + 1])
            tokens = np.array([0] * c + [VOCAB + root] + [2 * VOCAB] * (size - 1))
            features = np.concatenate([context_CD, np.zeros((size, len(fused_TD[0])), np.float32)])
            rows, runner.block = range(c + first, c + size), c
            got = runner.step(tokens, chain(c + size), outputs, rows, features=features[None])
            if config.selector:  # its probabilities are among the candidates
                apart = np.abs(got["guess_log_probs"] - log_prob_RKC[0, t].numpy())
            else:
                apart = check_guesses(got["guess_ids"], got["guess_log_probs"], log_q_RKV[t])
            assert apart.max() <= TOLERANCE
            if pair_RKCC is not None:
                assert got["guess_ids"].tolist() == ids_RKC[0, t].tolist()
                assert np.abs(got["pair_log_probs"] - pair_RKCC[0, t].numpy()).max() <= TOLERANCE
            runner.cache.commit(range(c))
