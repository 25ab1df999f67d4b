"""ReDrafter: the recurrence and its head by the formulas. Its beam search is tested in
tests/runtime/test_sequential.py."""

from __future__ import annotations

from typing import Any

import torch
from formulas import D, check_loss_of_paths, make_drafter, rms, variants
from tiny_backbone import TRIMMED
from torch import Tensor
from torch.nn import functional as F


@variants("redrafter")
def test_the_loss_and_its_gradient_are_the_formulas(options: dict[str, Any]) -> None:
    drafter = make_drafter("redrafter", TRIMMED, **options)

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

    check_loss_of_paths(drafter, logits_of)


def test_sizes_are_the_authors() -> None:
    """After [h ; s] of width 2d come the blocks and the output matrix, with nothing between."""
    drafter = make_drafter("redrafter", TRIMMED, width="both", head="own", num_layers=2)
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
