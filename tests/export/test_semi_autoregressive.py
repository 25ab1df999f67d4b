"""Semi-autoregressive drafting: h_q and the head by the formulas, α, the paper's sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formulas import SMALL, D, attend, check_loss_of_paths, make_drafter, new_drafter, rms, variants
from tiny_backbone import TRIMMED
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters import losses, semi_autoregressive
from spec_export.drafters.semi_autoregressive import Drafter

WIDTH = SMALL["semi_autoregressive"]["head_width"]


def naive_h_q(drafter: Drafter, path: list[int]) -> Tensor:
    """h_q of a whole path at once, by the paper's formulas."""
    x, h_q = rms(drafter.embed_VD[path]), drafter.h_q
    if isinstance(h_q, semi_autoregressive._FixedAttention):
        alpha = torch.sigmoid(h_q.alpha[: len(path)])
        y = F.silu(F.silu(x @ h_q.first + h_q.bias[0]) @ h_q.second + h_q.bias[1])
        return (alpha[:, None] * y).sum(0) / alpha.sum()
    if isinstance(h_q, semi_autoregressive._Rnn):
        h = torch.zeros(D // 2)
        for row in x:
            h = torch.tanh(row @ h_q.w + h @ h_q.u + h_q.bias)
        return h
    if isinstance(h_q, semi_autoregressive._Lstm):
        names = {}
        for i, parts in enumerate(zip(h_q.w, h_q.u, h_q.bias, strict=True)):
            for name, tensor in zip(("weight_ih", "weight_hh", "bias_ih"), parts, strict=True):
                names[f"{name}_l{i}"] = tensor.t()
            names[f"bias_hh_l{i}"] = torch.zeros(2 * D)
        lstm = nn.LSTM(D, D // 2, num_layers=2)
        return torch.func.functional_call(lstm, names, (x,))[0][-1]
    for layer in h_q.layers:
        x = layer.finish(x, attend(drafter, layer, x, range(len(path))))
    return x[-1]


@variants("semi_autoregressive")
def test_the_loss_and_its_gradient_are_the_formulas(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 2)
    drafter = make_drafter("semi_autoregressive", TRIMMED, **options)

    def logits_of(feature_TD: Tensor, path: list[int]) -> Tensor:
        both = (rms(feature_TD[-1]) @ drafter.w_p, naive_h_q(drafter, path) @ drafter.w_q)
        row = F.silu(torch.cat(both))
        if drafter.config.head == "own":
            return drafter.w3 @ row + drafter.b3
        return drafter.head_VD @ (rms(row @ drafter.w3) * drafter.norm)

    check_loss_of_paths(drafter, logits_of)


def test_alpha_ascends_and_learns_at_a_rate_of_its_own() -> None:
    """Before training the newest of four tokens weighs four times as much as the first."""
    drafter = new_drafter("semi_autoregressive", num_guesses=4, alpha_rate=30.0)
    alpha_K = torch.sigmoid(drafter.h_q.alpha)
    torch.testing.assert_close(alpha_K, torch.tensor([0.2, 0.4, 0.6, 0.8]))
    (one, others), (factor, (alpha,)) = drafter.trained_groups()
    assert (one, factor) == (1.0, 30.0)
    assert alpha is drafter.h_q.alpha
    assert {id(p) for p in [*others, alpha]} == {id(p) for p in drafter.parameters()}
    assert len(others) + 1 == len(list(drafter.parameters()))
    other_kind = new_drafter("semi_autoregressive", kind="rnn")
    assert [factor for factor, _ in other_kind.trained_groups()] == [1.0]


def test_sizes_are_the_papers() -> None:
    drafter = make_drafter("semi_autoregressive", head_width=1024)
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    V = len(drafter.draft_token_ids)
    assert shapes["w_p"] == (D, 1024)
    assert shapes["w_q"] == (D // 2, 1024)
    assert shapes["w3"] == (V, 2048)
    assert shapes["b3"] == (V,)
    assert shapes["h_q.first"] == (D, D // 2)
    assert shapes["h_q.second"] == (D // 2, D // 2)
    assert make_drafter("semi_autoregressive", kind="transformer", layers=0).w_q.shape == (D, WIDTH)
    assert make_drafter("semi_autoregressive", kind="lstm").w_q.shape == (D // 2, WIDTH)


def test_an_untrained_layer_passes_its_input_on() -> None:
    """At every level, whatever the keys and values of the path before it."""
    torch.manual_seed(3)
    h_q = new_drafter("semi_autoregressive", kind="transformer", layers=2, num_guesses=3).h_q
    x, state = torch.randn(4, D), torch.randn(4, h_q.state_width)
    for level in range(3):
        y, state = h_q(x, state, torch.tensor([level]))
        assert torch.equal(y, x)
