"""Checks what the modules of all drafters must do; tests/test_contract.py checks whole engines.

The loss of each drafter is compared with its paper's formula in the drafter's own file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import (
    PLUS_PLUS,
    VARIANTS,
    backbone,
    features_of,
    make_batch,
    make_drafter,
    new_drafter,
    width_of,
)
from guessing import check_levels, check_one_pass
from test_bigram_pairs import random_table
from tiny_backbone import TRIMMED, VOCAB

from spec_export import drafters
from spec_export.drafters.layers import Batch
from spec_export.training import recipe

RECIPES = Path(__file__).parents[2] / "recipes"
LEVELS = ("hydra", "redrafter", "semi_autoregressive")
# Whose graphs have a table of bigrams, too.
WITH_BIGRAMS = {
    ("amphista", "full"),
    ("amphista", "no stage"),
    ("medusa", "shared"),
    ("medusa", "own"),
    ("parallelspec", "masks with the root token"),
    ("parallelspec", "eagle"),
}
# The largest difference of a row, in amphista the mean one (measures 0.14 and 0.8; other rows are
# 0.7 away, so that int4 only shows that the graph runs).
TOLERANCES = {
    "amphista": {"int8": 0.3, "int4": 1.5},
    "medusa": {"int8": 0.1, "int4": 1.0},
    "parallelspec": {},
}
every_drafter = pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=name) for name in drafters.trainable()),
        pytest.param("amphista", {"heads": "own"}, id="amphista, own heads"),
        pytest.param("medusa", {"heads": "own", "soft_weight": 0.5}, id="medusa, own heads"),
        pytest.param("redrafter", {"head": "own"}, id="redrafter, own head"),
    ],
)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in VARIANTS.items() for case in cases]
)
def test_the_graphs_guess_as_the_module_does(name: str, case: str, tmp_path: Path) -> None:
    """EAGLE and draft models are checked along trees, in files of their own."""
    vocabulary = None if case in ("default", "hydra", "fixed attention", "eagle") else TRIMMED
    drafter = make_drafter(name, vocabulary, **{"top_k": 5} | VARIANTS[name][case])
    if name in LEVELS:
        check_levels(drafter, tmp_path)
        return
    tolerances = TOLERANCES[name]
    if (name, case) in WITH_BIGRAMS:
        drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
        tolerances = tolerances or {"int8": np.inf, "int4": np.inf}  # the pairs count
    check_one_pass(drafter, tmp_path, tolerances, np.mean if name == "amphista" else np.max)


@every_drafter
def test_padding_and_later_rows_do_not_matter(name: str, options: dict[str, Any]) -> None:
    drafter = make_drafter(name, **options)
    batch = make_batch((9, 5), width_of(drafter))
    feature_BTF = features_of(batch)[1:, :5]
    short = Batch(batch.token_BT[1:, :5], batch.loss_BT[1:, :5], feature_BTF, torch.tensor([5]))
    K = drafter.runtime_config()["num_guesses"]
    padded, whole = (drafter.guesses(each, 5)[1] for each in (batch, short))
    assert whole.shape == (1, 4, K, 5)
    for k in range(min(K, 4)):  # the path of guess k ends in the text
        torch.testing.assert_close(padded[1, : 4 - k, k], whole[0, : 4 - k, k], rtol=0, atol=1e-5)


@every_drafter
def test_bf16_autocast_is_near_float32(name: str, options: dict[str, Any]) -> None:
    drafter = make_drafter(name, **options)
    batch = make_batch((20,), width_of(drafter))
    exact, _ = drafter.loss(batch)
    rounded = dataclasses.replace(batch, feature_BTF=features_of(batch).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = drafter.loss(rounded)
        drafter.guesses(rounded, 3)
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() / exact.item() - 1) < (0.02 if name == "medusa" else 0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())


@every_drafter
def test_a_batch_without_labels_moves_nothing(name: str, options: dict[str, Any]) -> None:
    """Every parameter has a gradient all the same, which distributed training waits for."""
    drafter = make_drafter(name, **options)
    batch = make_batch((8,), width_of(drafter))
    batch.loss_BT[:] = False
    loss, counts = drafter.loss(batch)
    loss.backward()
    assert loss.item() == counts["count_K"].sum() == 0
    for parameter in drafter.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


NO_STAGE: dict[str, Any] = {"staged": "none", "feed_forward": True, "attention_layers": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("medusa", {"num_heads": 3, "heads": "shared"}),
        ("medusa", {"num_heads": 3, "heads": "own"}),
        ("amphista", NO_STAGE | {"heads": "shared"}),
        ("amphista", NO_STAGE | {"heads": "own"}),
        ("hydra", {}),
        ("hydra", PLUS_PLUS),
        ("hydra", PLUS_PLUS | {"first_block": "residual"}),
        *(("redrafter", options) for options in VARIANTS["redrafter"].values()),
    ],
)
def test_an_untrained_drafter_guesses_what_the_target_says_next(
    name: str, options: dict[str, Any]
) -> None:
    drafter, batch = new_drafter(name, **options), make_batch((12,))
    logits = features_of(batch)[0, :-1] @ drafter.head_VD.T
    ids, log_probs = drafter.guesses(batch, 4)
    assert (ids[0, ..., 0] == logits.argmax(-1)[:, None]).all()
    if name in ("medusa", "amphista"):
        best = torch.log_softmax(logits, -1).topk(4)
        for k in range(drafter.config.num_heads):
            assert torch.equal(ids[0, :, k], best.indices)
            torch.testing.assert_close(log_probs[0, :, k], best.values)


LAYER = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
BLOCKS = {f"blocks.{k}.{layer}.weight" for k in range(2) for layer in range(2)}
EAGLE = {"fc", "fc_bias", *(f"layers.0.{name}" for name in LAYER)}


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("eagle", {}, EAGLE),
        ("eagle", {"normalise": True}, EAGLE | {"input_norm"}),
        (
            "parallelspec",
            {"style": "eagle"},
            {"mask_embed", "input_norm", "fc", *(f"layers.0.{name}" for name in LAYER)},
        ),
        (
            "parallelspec",
            {"inputs": "tokens"},
            {"mask_embed", "final_norm", *(f"layers.0.{name}" for name in LAYER)},
        ),
        ("medusa", {"num_heads": 2, "num_layers": 2}, BLOCKS),
        (
            "medusa",
            {"num_heads": 2, "num_layers": 2, "heads": "own"},
            BLOCKS | {"output_heads.0", "output_heads.1"},
        ),
        (
            "hydra",
            {"num_guesses": 1, "num_layers": 1, "prefix_layer": True},
            {
                *("heads.0.first", "heads.0.layers.0", "heads.0.norm"),
                *(f"prefix.{name}" for name in LAYER),
            },
        ),
        (
            "draft_model",
            {},
            {
                *("project_in", "project_out", "final_norm"),
                *(f"layers.{i}.{name}" for i in range(2) for name in LAYER),
            },
        ),
    ],
)
def test_only_its_own_weights_are_saved(name: str, options: Any, names: set[str]) -> None:
    assert set(make_drafter(name, **options).state_dict()) == names


TREES = {"num_guesses": 6, "max_width": 2, "top_k": 7}


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        *((name, TREES, TREES) for name in ("draft_model", "eagle", *LEVELS)),
        ("medusa", {"num_heads": 3, "top_k": 7}, {"num_guesses": 3, "top_k": 7}),
        (
            "amphista",
            {"taps": (1,), "num_heads": 3, "top_k": 7},
            {
                "inputs": "features+tokens",
                "num_masks": 0,
                "num_guesses": 3,
                "mask_token_base": VOCAB,
                "top_k": 7,
            },
        ),
        (
            "parallelspec",
            {"taps": (1,), "num_masks": 3, "top_k": 7, "mask_reads_token": True},
            {
                "inputs": "features+tokens",
                "mask_feature": "zero",
                "num_masks": 3,
                "num_guesses": 4,
                "mask_token_base": VOCAB,
                "style": "medusa",
                "top_k": 7,
                "mask_reads_token": True,
            },
        ),
        ("skip_layer", TREES, TREES | {"layers": 1, "head": "trained"}),
    ],
)
def test_what_the_proposer_is_told(name: str, options: Any, told: dict[str, Any]) -> None:
    assert make_drafter(name, **options).runtime_config() == told


NONE_POSITIVE = {"lambda_soft": 0.0, "lambda_hard": 0.0}
BAD_FIELDS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "amphista": [
        ({"heads": "tied"}, "got heads 'tied', expected 'own' or 'shared'"),
        ({"staged": "three"}, "got staged 'three', expected 'none', 'one' or 'two'"),
        ({"staged": "none", "taps": (1,)}, r"got taps \[1\] without a layer that reads them"),
        ({"num_heads": 1}, 'got one head for two stages: set staged = "one"'),
        ({"num_heads": 0}, "got num_heads 0, expected 1 or more"),
        ({"attention_layers": 0}, "got attention_layers 0, expected 1 or more"),
        ({"lambda_soft": -1.0}, "got lambda_soft -1.0, expected 0 or more"),
        (NONE_POSITIVE, "got lambda_soft 0 and lambda_hard 0, expected one of them positive"),
    ],
    "draft_model": [
        ({"taps": (1,)}, r"got taps \(1,\), expected none"),
        ({"layers": 0}, "got layers 0, expected 1 or more"),
        ({"hidden_size": 0}, "got hidden_size 0"),
        ({"num_heads": 5}, "got num_heads 5, expected a multiple of num_kv_heads, 2"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5, expected at most 1"),
        ({"prompt_weight": -1.0}, "got prompt_weight -1.0, expected 0 or more"),
    ],
    "eagle": [
        ({"taps": (1,)}, r"got taps \(1,\), expected none"),
        ({"layers": 0}, "got layers 0, expected 1 or more"),
        ({"ttt_steps": 0}, "got ttt_steps 0"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5"),
        ({"feature_noise": -0.1}, "got feature_noise -0.1, expected 0 or more"),
    ],
    "hydra": [
        ({"num_layers": -1}, "got num_layers -1, expected 0 or more"),
        ({"num_layers": 0, "first_block": "residual"}, "got num_layers 0, expected 1 or more"),
        ({"taps": (1,)}, r"got taps \(1,\), expected none"),
        ({"soft_weight": -0.1}, "got soft_weight -0.1, expected 0 or more"),
    ],
    "medusa": [
        ({"heads": "tied"}, "got heads 'tied', expected 'own' or 'shared'"),
        ({"taps": (1,)}, r"got taps \(1,\), expected none"),
        ({"num_heads": 0}, "got num_heads 0, expected 1 or more"),
        ({"num_layers": 0}, "got num_layers 0"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5"),
    ],
    "parallelspec": [
        ({"style": "hydra"}, "got style 'hydra', expected 'medusa' or 'eagle'"),
        ({"mask_feature": "last"}, "got mask_feature 'last', expected 'zero' or 'anchor'"),
        ({"inputs": "features"}, "got inputs 'features', expected 'tokens' or"),
        ({"style": "eagle", "inputs": "tokens"}, "style 'eagle' regresses features"),
        ({"inputs": "tokens", "taps": (1,)}, "leave taps empty"),
        ({"num_masks": -1}, "got num_masks -1, expected 0 or more"),
        ({"layers": 0}, "got layers 0"),
        ({"anchor_fraction": 0.0}, "got anchor_fraction 0.0, expected more than 0"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5"),
        ({"loss": "kl"}, "got loss 'kl', expected 'ce', 'tv' or 'lk'"),
        ({"depth_weights": "flat"}, "got depth_weights 'flat', expected 'decay' or 'reach'"),
        ({"tv_weight": 1.5}, "got tv_weight 1.5, expected at most 1"),
        ({"depth_keep": 0.0}, "got depth_keep 0.0, expected more than 0"),
        ({"prompt_weight": -1.0}, "got prompt_weight -1.0, expected 0 or more"),
        ({"feature_noise": 0.1}, "got feature_noise 0.1 with style 'medusa', expected 0"),
    ],
    "redrafter": [
        ({"num_layers": -1}, "got num_layers -1, expected 0 or more"),
        ({"head": "tied"}, "got head 'tied', expected 'own' or 'shared'"),
        ({"taps": (1,)}, r"got taps \(1,\), expected none"),
    ],
    "semi_autoregressive": [
        ({"kind": "gru"}, "got kind 'gru', expected 'fixed_attention', 'lstm', 'rnn' or"),
        ({"head": "tied"}, "got head 'tied', expected 'own' or 'shared'"),
        ({"layers": 7}, "got layers 7, expected at most 6"),
        ({"head_width": 0}, "got head_width 0"),
        ({"alpha_rate": 0.0}, "got alpha_rate 0.0, expected more than 0"),
        ({"soft_weight": 0.5}, "a head of its own learns hard labels"),
    ],
    "skip_layer": [
        ({"head": "own"}, "got head 'own', expected 'target' or 'trained'"),
        ({"layers": 0}, "got layers 0"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5"),
        ({"exit_layers": (1, 4)}, r"got layers 8 and exit_layers \[1, 4\], expected different"),
        ({"layers": 1, "exit_layers": (4,)}, "the loss behind layer 1 has weight 0"),
        ({"exit_layers": (8,)}, r"got layers 8 and exit_layers \[8\], expected different"),
        ({"exit_layers": (9, 9)}, r"exit_layers \[9, 9\], expected different"),
        ({"exit_every": 2}, "got exit_every 2 of 0 exit_layers"),
        ({"exit_layers": (9, 10), "exit_every": 3}, "got exit_every 3 of 2 exit_layers"),
        ({"exit_every": 0}, "got exit_every 0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [(name, *case) for name, cases in BAD_FIELDS.items() for case in cases],
)
def test_what_a_config_refuses(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafters.load(name).Config(**fields)


@pytest.mark.parametrize("name", drafters.trainable())
def test_counts_in_a_config_start_at_1(name: str) -> None:
    config = drafters.load(name).Config
    counts = {field.name for field in dataclasses.fields(config)}
    for field in counts & {"num_guesses", "max_width", "top_k"}:
        with pytest.raises(ValueError, match=f"got {field} 0, expected 1 or more"):
            config(**{field: 0})


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=f"{p.parent.name}/{p.stem}") for p in RECIPES.rglob("*.toml")]
)
def test_every_recipe_can_be_built(path: Path) -> None:
    plan = recipe.load(path, [])
    definition = drafters.load(plan.drafter_name)
    config = recipe.build_config(definition.Config, plan.drafter_fields, str(path))
    assert config.top_k >= 1


def test_a_medusa_graph_has_no_product_too_many() -> None:
    for options in VARIANTS["medusa"].values():
        drafter = make_drafter("medusa", **options)
        config = drafter.config
        model = drafter.export(backbone().config)["drafter"]
        products = sum(node.op_type in ("MatMul", "Gemm") for node in model.graph)
        heads = config.num_heads if config.heads == "own" else 1
        assert products == config.num_heads * config.num_layers + heads
