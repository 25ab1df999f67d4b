"""ReDrafter: the recurrence and its head by the formulas, the exported graphs. Its beam search is
tested in tests/runtime/test_sequential.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from levels import D, check_configuration, check_graphs, check_loss, make_batch, rms
from levels import make_drafter as make
from tiny_backbone import TRIMMED, backbone_of, tiny
from torch import Tensor
from torch.nn import functional as F

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters import redrafter
from spec_export.drafters.redrafter import Config, Drafter


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"))


def make_drafter(backbone: Backbone, vocabulary: Tensor | None = None, **config: Any) -> Drafter:
    return make(redrafter, backbone, vocabulary, **config)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "five levels, soft labels": {"num_guesses": 5, "num_layers": 1, "soft_weight": 0.5},
    "no layer": {"num_guesses": 2, "num_layers": 0},
    "the authors'": {"width": "both", "head": "own", "num_guesses": 3, "soft_weight": 0.3},
    "the authors' width": {"width": "both", "num_guesses": 3},
    "a head of its own": {"head": "own", "num_guesses": 2, "num_layers": 1},
}
variants = pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in VARIANTS.items()])


@variants
def test_the_loss_and_its_gradient_are_the_formulas(
    backbone: Backbone, options: dict[str, Any]
) -> None:
    drafter = make_drafter(backbone, TRIMMED, **options)

    def logits_of(feature_TD: Tensor, path: list[int]) -> Tensor:
        s = torch.zeros(D)
        for token in path:
            s = F.silu(rms(drafter.embed_VD[token]) @ drafter.w + s @ drafter.u + drafter.b)
        z = torch.cat((rms(feature_TD[-1]), s))
        if drafter.config.width == "target":
            z = z @ torch.cat((drafter.project_h, drafter.project_s))
        for weight, bias in zip(drafter.layers, drafter.biases, strict=True):
            z = z + F.silu(z @ weight + bias)
        if drafter.config.head == "own":
            return drafter.own_head @ z
        if drafter.config.width == "both":
            z = z @ drafter.narrow
        return drafter.head_VD @ (rms(z) * drafter.norm)

    check_loss(drafter, logits_of)


@variants
def test_an_untrained_drafter_guesses_what_the_target_says_next(
    backbone: Backbone, options: dict[str, Any]
) -> None:
    drafter, batch = Drafter(Config(**options), target.ends(backbone)), make_batch((12,))
    assert batch.feature_BTF is not None
    ids, _ = drafter.guesses(batch, 1)
    own = (batch.feature_BTF[:, :-1] @ drafter.head_VD.T).argmax(-1)
    assert (ids[..., 0] == own[..., None]).all()


def test_sizes_are_the_authors(backbone: Backbone) -> None:
    """Behind [h ; s] of width 2d come the blocks and the output matrix, with nothing between."""
    drafter = make_drafter(backbone, TRIMMED, width="both", head="own", num_layers=2)
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert shapes == {
        "w": (D, D),
        "u": (D, D),
        "b": (D,),
        "layers.0": (2 * D, 2 * D),
        "layers.1": (2 * D, 2 * D),
        "biases.0": (2 * D,),
        "biases.1": (2 * D,),
        "own_head": (len(TRIMMED), 2 * D),
    }


@variants
def test_the_graphs_guess_as_the_module_does(
    backbone: Backbone, options: dict[str, Any], tmp_path: Path
) -> None:
    vocabulary = None if options == {} else TRIMMED
    check_graphs(make_drafter(backbone, vocabulary, **({"top_k": 5} | options)), backbone, tmp_path)


def test_what_the_proposer_is_told(backbone: Backbone) -> None:
    check_configuration(make_drafter(backbone, max_width=2, top_k=7), backbone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": -1}, "got num_layers -1, expected 0 or more"),
        ({"max_width": 0}, "max_width 0"),
        ({"head": "tied"}, "got head 'tied', expected one of own, shared"),
        ({"taps": (1,)}, r"got taps \[1\], expected none"),
    ],
)
def test_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
