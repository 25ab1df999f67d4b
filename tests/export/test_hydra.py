"""Hydra: its heads by the formula, and what a guess reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formulas import (
    D,
    attend,
    check_loss_of_paths,
    features_of,
    make_batch,
    make_drafter,
    rms,
    variants,
)
from tiny_backbone import TRIMMED, VOCAB
from torch import Tensor
from torch.nn import functional as F

from spec_export.drafters.hydra import Drafter


@variants("hydra")
def test_the_loss_and_its_gradient_are_the_formulas(options: dict[str, Any]) -> None:
    drafter = make_drafter("hydra", TRIMMED, **options)

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

    check_loss_of_paths(drafter, logits_of)


def prefixed(drafter: Drafter, x_TD: Tensor) -> Tensor:
    """One pre-norm decoder layer."""
    layer = drafter.prefix
    x_TD = x_TD + attend(drafter, layer, x_TD, range(len(x_TD))) @ layer.out
    gate, up = (rms(x_TD) * layer.mlp_norm @ layer.gate_up).chunk(2, -1)
    return x_TD + (F.silu(gate) * up) @ layer.down


@pytest.mark.parametrize("prefix", [False, True])
def test_what_a_guess_reads(prefix: bool) -> None:
    """Guess k of row 4: tokens 5 … 5 + k; feature 4, or with a prefix layer features up to 4."""
    drafter = make_drafter("hydra", prefix_layer=prefix, num_guesses=3)
    batch = make_batch((12,))
    feature_TD = features_of(batch)[0]

    def rows() -> Tensor:
        with torch.no_grad():
            context, paths = drafter.context(batch), drafter.paths(batch)
            return drafter.path_rows(context[:, 4], paths[:, 4])[0]

    def changed() -> list[bool]:
        return ((rows() - before).abs().amax(-1) > 1e-4).tolist()

    before = rows()
    for position in range(12):
        kept = feature_TD[position].clone()
        feature_TD[position] = torch.randn(D)
        assert changed() == [position in (range(5) if prefix else [4])] * 3
        feature_TD[position] = kept
        token = batch.token_BT[0, position].item()
        batch.token_BT[0, position] = (token + 1) % VOCAB
        assert changed() == [5 <= position <= 5 + k for k in range(3)]
        batch.token_BT[0, position] = token
