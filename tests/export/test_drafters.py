"""Checks what the modules of all drafters must do; tests/test_contract.py checks whole engines.

test_formulas.py compares their losses with the papers' formulas, test_drafter_graphs.py their
graphs with the modules.
"""

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from formulas import (
    PLUS_PLUS,
    SMALL,
    VARIANTS,
    features_of,
    make_batch,
    make_drafter,
    new_drafter,
    width_of,
)
from tiny_backbone import LAYERS, VOCAB, backbone_of, tiny

from spec_export import drafters
from spec_export.drafters.layers import Batch
from spec_export.training import recipe
from spec_runtime.errors import UserError

LEVELS = ("hydra", "redrafter", "semi_autoregressive")
every_drafter = pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=name) for name in drafters.trainable()),
        pytest.param("amphista", {"heads": "own"}, id="amphista, own heads"),
        pytest.param("medusa", {"heads": "own", "soft_weight": 0.5}, id="medusa, own heads"),
        pytest.param("redrafter", {"head": "own"}, id="redrafter, own head"),
    ],
)


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


NO_STAGE: dict[str, Any] = {"staged": "none", "attention_layers": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("medusa", {"num_heads": 3, "heads": "shared"}),
        ("medusa", {"num_heads": 3, "heads": "own"}),
        ("amphista", NO_STAGE | {"heads": "shared"}),
        ("amphista", NO_STAGE | {"heads": "own"}),
        ("hydra", {}),
        ("hydra", PLUS_PLUS),
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
STAGE = {f"layers.{i}.{name}" for i in range(2) for name in LAYER} | {
    name
    for i in range(2)
    for name in (
        f"final_norms.{i}",
        *(f"mixers.{i}.{part}" for part in ("fc", "norms.0", "norms.1")),
    )
}
MUTUAL = {f"attention.0.{name}" for name in ("norm", "qkv", "out")}
WHOLE = STAGE | MUTUAL | {"position_table"} | {f"blocks.{k}.0.weight" for k in range(4)}
SECOND = {name for name in STAGE if name.startswith(("layers.1", "mixers.1"))} | {"final_norms.1"}
# Of each switch of Amphista, what it leaves out and adds.
AMPHISTA: list[tuple[dict[str, Any], set[str]]] = [
    ({}, WHOLE),
    ({"auto_embedding": False}, WHOLE - MUTUAL - {"position_table"}),
    ({"position_table": False}, WHOLE - {"position_table"}),
    ({"staged": "one"}, WHOLE - SECOND),
    ({"staged": "none"}, WHOLE - STAGE),
    ({"sampled_token": False}, WHOLE - {"mixers.0.norms.1", "mixers.1.norms.1"}),
    ({"attention_layers": 2}, WHOLE | {name.replace("0", "1") for name in MUTUAL}),
    ({"heads": "own"}, WHOLE | {f"output_heads.{k}" for k in range(4)}),
]
EAGLE = {"fc", "fc_bias", *(f"layers.0.{name}" for name in LAYER)}


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        *(("amphista", options, names) for options, names in AMPHISTA),
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
            {"num_guesses": 1, "num_layers": 2, "prefix_layer": True},
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
            {"taps": (1,), "num_masks": 3, "top_k": 7},
            {
                "inputs": "features+tokens",
                "mask_feature": "zero",
                "num_masks": 3,
                "num_guesses": 4,
                "mask_token_base": VOCAB,
                "style": "medusa",
                "top_k": 7,
            },
        ),
        ("skip_layer", TREES, TREES | {"layers": 1, "head": "trained"}),
    ],
)
def test_what_the_proposer_is_told(name: str, options: Any, told: dict[str, Any]) -> None:
    assert make_drafter(name, **options).runtime_config() == told


# Whole numbers whose least value is not 1; floats without bounds, at most 1, more than 0.
LEAST = {
    **{"dflash.block_size": 2, "dflash.conv_size": 0},
    **{"dflash.markov_rank": 0, "dflash.mask_token_id": 0},
    **{"pard.mask_token_id": 0, "pard.num_masks": 0, "parallelspec.num_masks": 0},
    **{"peagle.mask_token_id": 0, "peagle.num_masks": 0, "redrafter.num_layers": 0},
    "semi_autoregressive.layers": 0,
}
UNBOUND = ("decay", "w_reg", "w_cls")
SHARES = ("soft_weight", "anchor_fraction")
POSITIVE = ("alpha_rate", "pard.anchor_fraction", "parallelspec.anchor_fraction")
READS_TAPS = ("amphista", "dflash", "eagle3", "parallelspec", "peagle")


@pytest.mark.parametrize("name", drafters.trainable())
def test_every_field_of_a_config_has_bounds(name: str) -> None:
    config, known = drafters.load(name).Config, SMALL.get(name, {})

    def refused(field: str, value: Any, expected: str) -> None:
        with pytest.raises(UserError, match=rf"got {field} {value!r}.*expected {expected}"):
            config(**known | {field: value})

    for field, kind in get_type_hints(config).items():
        kinds = get_args(kind) or (kind,)
        least = LEAST.get(f"{name}.{field}", 1)
        if get_origin(kind) is Literal:
            refused(field, "other", f"'{kinds[0]}'")
        elif int in kinds and get_origin(kind) is not tuple:
            refused(field, least - 1, f"{least} or more")
        elif float in kinds and field not in UNBOUND:
            is_positive = field in POSITIVE or f"{name}.{field}" in POSITIVE
            refused(field, *((0.0, "more than 0") if is_positive else (-0.1, "0 or more")))
            if field in SHARES:
                refused(field, 1.5, "at most 1")
        elif field == "taps" and name not in READS_TAPS:
            with pytest.raises(UserError, match=r"got taps \(1,\), expected none"):
                config(**known | {"taps": (1,)})


SMALL_MODEL = SMALL["pard"]["model"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("amphista", {"staged": "none", "taps": (1,)}, r"got taps \[1\] without a layer that reads"),
    ("amphista", {"num_heads": 1}, 'got one head for two stages: set staged = "one"'),
    ("amphista", {"lambda_soft": 0.0, "lambda_hard": 0.0}, "and lambda_hard 0, expected one of"),
    ("dflash", {"taps": ()}, "got no taps, expected the target layers"),
    ("dflash", {"mask_token_id": VOCAB}, f"mask_token_id {VOCAB}, expected one below {VOCAB}"),
    ("dflash", {"hidden_size": 48}, "hidden_size 48 with the target's embedding and head"),
    (
        "draft_model",
        {"num_heads": 5, "num_kv_heads": 2},
        "num_heads 5, expected a multiple of num_",
    ),
    ("eagle3", {"hidden_size": 48}, "hidden_size 48 with the target's embedding, expected its 64"),
    ("eagle3", {"head_dim": 8}, "head_dim 8 with the target's rotary embedding, expected its 16"),
    ("eagle3", {"rope": {"rope_type": "spiral"}}, "got rotary embedding 'spiral'"),
    ("eagle3", {"sliding_layers": (0,)}, r"got sliding_layers \[0\] and no window, expected its"),
    ("eagle3", {"sliding_layers": (1,), "window": 9}, r"got sliding_layers \[1\], expected some"),
    ("eagle3", {"num_kv_heads": 3}, "got 4 heads over 3 key/value heads"),
    (
        "pard",
        {"model": SMALL_MODEL | {"model_type": "gpt2"}},
        "got a model of model_type 'gpt2', e",
    ),
    ("pard", {"model": SMALL_MODEL | {"vocab_size": VOCAB}}, f"got a model of {VOCAB} tokens, exp"),
    ("pard", {"model": SMALL_MODEL | {"hidden_size": "x"}}, "got a faulty model config: "),
    ("parallelspec", {"style": "eagle", "inputs": "tokens"}, "style 'eagle' regresses features"),
    ("parallelspec", {"inputs": "tokens", "taps": (1,)}, "leave taps empty"),
    ("parallelspec", {"feature_noise": 0.1}, "feature_noise 0.1 with style 'medusa', expected 0"),
    ("peagle", {"mask_token_id": VOCAB}, f"got mask_token_id {VOCAB}, expected one of the targ"),
    ("semi_autoregressive", {"layers": 7}, "got layers 7, expected at most 6"),
    ("semi_autoregressive", {"soft_weight": 0.5}, "a head of its own learns hard labels"),
    ("skip_layer", {"layers": 8, "exit_layers": (1, 4)}, r"exit_layers \[1, 4\], expected differe"),
    ("skip_layer", {"layers": 1, "exit_layers": (4,)}, "the loss behind layer 1 has weight 0"),
    ("skip_layer", {"layers": 8, "exit_layers": (8,)}, r"got layers 8 and exit_layers \[8\], exp"),
    ("skip_layer", {"exit_layers": (9, 9)}, r"exit_layers \[9, 9\], expected different"),
    ("skip_layer", {"layers": 8, "exit_every": 2}, "got exit_every 2 of 0 exit_layers"),
    ("skip_layer", {"layers": 8, "exit_layers": (9, 10), "exit_every": 3}, "got exit_every 3 of 2"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter(name, **options)


def test_taps_beyond_the_target_are_refused() -> None:
    fusion = make_drafter("eagle3", taps=(1, LAYERS + 1)).fusion
    with pytest.raises(ValueError, match=r"got taps \[1, 4\], expected distinct layer ids from 0"):
        backbone_of(tiny("llama")).add_fusion("eagle3", fusion)


@pytest.mark.parametrize("name", recipe.shipped())
def test_every_recipe_can_be_built(name: str) -> None:
    plan = recipe.load(name)
    definition = drafters.load(plan.drafter_name)
    config = recipe.build_config(definition.Config, plan.drafter_fields, name)
    assert config.top_k >= 1
