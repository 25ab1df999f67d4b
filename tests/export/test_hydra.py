"""Hydra: its heads by the formula, what the prefix layer sees, the exported graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from levels import D, check_configuration, check_graphs, check_loss, make_batch, rms
from levels import make_drafter as make
from tiny_backbone import TRIMMED, VOCAB, backbone_of, tiny
from torch import Tensor
from torch.nn import functional as F

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters import hydra
from spec_export.drafters.hydra import Config, Drafter


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"))


def make_drafter(backbone: Backbone, vocabulary: Tensor | None = None, **config: Any) -> Drafter:
    return make(hydra, backbone, vocabulary, **config)


PLUS_PLUS: dict[str, Any] = {"prefix_layer": True, "num_layers": 4, "soft_weight": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "hydra": {},
    "hydra++": PLUS_PLUS | {"num_guesses": 3},
    "one head, no layer": {"num_guesses": 1, "num_layers": 0},
    "mixed labels": {"num_guesses": 2, "num_layers": 2, "soft_weight": 0.3},
    "the authors' first block": {"first_block": "residual", "num_guesses": 3},
    "the authors' hydra++": PLUS_PLUS | {"first_block": "residual", "num_guesses": 2},
}
variants = pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in VARIANTS.items()])


@variants
def test_the_loss_and_its_gradient_are_the_formulas(
    backbone: Backbone, options: dict[str, Any]
) -> None:
    drafter = make_drafter(backbone, TRIMMED, **options)

    def logits_of(feature_TD: Tensor, path: list[int]) -> Tensor:
        h = rms(feature_TD)
        if drafter.config.prefix_layer:
            h = rms(prefixed(drafter, h))
        chunks = [h[-1], *(rms(drafter.embed_VD[token]) for token in path)]
        head = drafter.heads[len(path) - 1]
        is_residual = drafter.config.first_block == "residual"
        assert head.first.shape == ((len(path) + 1) * D, (1 + is_residual) * D)
        z = torch.cat(chunks) @ head.first[:, :D]
        if is_residual:
            z = z + F.silu(torch.cat(chunks) @ head.first[:, D:])
        assert len(head.layers) == drafter.config.num_layers - is_residual
        for weight in head.layers:
            y = z @ weight
            z = z + y * torch.sigmoid(y)
        return drafter.head_VD @ (rms(z) * head.norm)

    check_loss(drafter, logits_of)


def prefixed(drafter: Drafter, x_TD: Tensor) -> Tensor:
    """One pre-norm decoder layer, head by head and row by row."""
    layer, T = drafter.prefix, len(x_TD)
    H, G, Dh = layer.dims.num_heads, layer.dims.num_kv_heads, layer.dims.head_dim
    heads = (rms(x_TD) * layer.attention_norm @ layer.qkv).view(T, H + 2 * G, Dh)
    first, second = heads[:, : H + G].chunk(2, -1)
    cos, sin = drafter.cos[:T, None], drafter.sin[:T, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    out = torch.zeros(T, H, Dh)
    for t in range(T):
        for h in range(H):
            g = h // (H // G)
            weight = torch.softmax(turned[: t + 1, H + g] @ turned[t, h] * Dh**-0.5, 0)
            out[t, h] = weight @ heads[: t + 1, H + G + g]
    x_TD = x_TD + out.flatten(1) @ layer.out
    gate, up = (rms(x_TD) * layer.mlp_norm @ layer.gate_up).chunk(2, -1)
    return x_TD + (F.silu(gate) * up) @ layer.down


@pytest.mark.parametrize("prefix", [False, True])
def test_what_a_guess_reads(backbone: Backbone, prefix: bool) -> None:
    """Guess k of row 4: tokens 5 … 5 + k; feature 4, or with a prefix layer features up to 4."""
    drafter = make_drafter(backbone, prefix_layer=prefix, num_guesses=3)
    batch = make_batch((12,))
    assert batch.feature_BTF is not None

    def rows() -> Tensor:
        with torch.no_grad():
            context, paths = drafter.context(batch), drafter.paths(batch)
            return drafter.path_rows(context[:, 4], paths[:, 4])[0]

    def changed() -> list[bool]:
        return ((rows() - before).abs().amax(-1) > 1e-4).tolist()

    before = rows()
    for position in range(12):
        kept = batch.feature_BTF[0, position].clone()
        batch.feature_BTF[0, position] = torch.randn(D)
        assert changed() == [position in (range(5) if prefix else [4])] * 3
        batch.feature_BTF[0, position] = kept
        token = batch.token_BT[0, position].item()
        batch.token_BT[0, position] = (token + 1) % VOCAB
        assert changed() == [5 <= position <= 5 + k for k in range(3)]
        batch.token_BT[0, position] = token


def test_untrained_heads_guess_what_the_target_says_next(backbone: Backbone) -> None:
    for options in ({}, PLUS_PLUS, PLUS_PLUS | {"first_block": "residual"}):
        drafter = Drafter(Config(**options), target.ends(backbone))
        batch = make_batch((12,))
        assert batch.feature_BTF is not None
        ids, _ = drafter.guesses(batch, 1)
        own = (batch.feature_BTF[:, :-1] @ drafter.head_VD.T).argmax(-1)
        assert (ids[..., 0] == own[..., None]).all()


def test_only_its_own_weights_are_saved(backbone: Backbone) -> None:
    names = set(make_drafter(backbone, num_guesses=2, num_layers=1).state_dict())
    assert names == {f"heads.{k}.{name}" for k in (0, 1) for name in ("first", "layers.0", "norm")}
    assert "prefix.qkv" in make_drafter(backbone, prefix_layer=True).state_dict()


@variants
def test_the_graphs_guess_as_the_module_does(
    backbone: Backbone, options: dict[str, Any], tmp_path: Path
) -> None:
    vocabulary = None if options == {} else TRIMMED
    drafter = make_drafter(backbone, vocabulary, **({"top_k": 5} | options))
    check_graphs(drafter, backbone, tmp_path)
    check_configuration(drafter, backbone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": -1}, "got num_layers -1, expected 0 or more"),
        ({"num_layers": 0, "first_block": "residual"}, "got num_layers 0, expected 1 or more"),
        ({"num_guesses": 0}, "got num_guesses 0"),
        ({"max_width": 0}, "max_width 0"),
        ({"top_k": 0}, "top_k 0"),
        ({"taps": (1,)}, r"got taps \[1\], expected none"),
        ({"soft_weight": -0.1}, "got soft_weight -0.1, expected 0 to 1"),
    ],
)
def test_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
