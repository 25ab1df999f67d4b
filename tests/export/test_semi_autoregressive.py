"""Semi-autoregressive drafting: h_q and the head by the formulas, the exported graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from levels import D, check_configuration, check_graphs, check_loss, rms
from levels import make_drafter as make
from tiny_backbone import TRIMMED, backbone_of, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters import semi_autoregressive
from spec_export.drafters.layers import DecoderLayer
from spec_export.drafters.semi_autoregressive import Config, Drafter

SMALL = 128  # head_width; large enough for every product to be quantised


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"))


def make_drafter(backbone: Backbone, vocabulary: Tensor | None = None, **config: Any) -> Drafter:
    return make(semi_autoregressive, backbone, vocabulary, **({"head_width": SMALL} | config))


VARIANTS: dict[str, dict[str, Any]] = {
    "fixed attention": {},
    "lstm": {"kind": "lstm", "head": "shared", "soft_weight": 0.5},
    "rnn": {"kind": "rnn", "head": "shared"},
    "no layer": {"kind": "transformer", "layers": 0, "num_guesses": 2},
    "two layers": {"kind": "transformer", "layers": 2, "num_guesses": 4, "head": "shared"},
}
variants = pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in VARIANTS.items()])


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
        assert isinstance(layer, DecoderLayer)
        q, k, v = (y.transpose(0, 1) for y in layer.project_qkv(x))  # [heads, T, Dh]
        angle = (drafter.cos[: len(path)], drafter.sin[: len(path)])
        q, k = turned(q, *angle), turned(k, *angle)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = layer.finish(x, y.transpose(0, 1).flatten(1))
    return x[-1]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@variants
def test_the_loss_and_its_gradient_are_the_formulas(
    backbone: Backbone, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semi_autoregressive, "CHUNK_ROWS", 5)
    drafter = make_drafter(backbone, TRIMMED, **options)

    def logits_of(feature_TD: Tensor, path: list[int]) -> Tensor:
        both = (rms(feature_TD[-1]) @ drafter.w_p, naive_h_q(drafter, path) @ drafter.w_q)
        row = F.silu(torch.cat(both))
        if drafter.config.head == "own":
            return drafter.w3 @ row + drafter.b3
        return drafter.head_VD @ (rms(row @ drafter.w3) * drafter.norm)

    check_loss(drafter, logits_of)


def test_alpha_ascends_and_learns_at_a_rate_of_its_own(backbone: Backbone) -> None:
    """Before training the newest of four tokens weighs four times as much as the first."""
    drafter = Drafter(Config(num_guesses=4, alpha_rate=30.0), target.ends(backbone))
    assert isinstance(drafter.h_q, semi_autoregressive._FixedAttention)
    alpha_K = torch.sigmoid(drafter.h_q.alpha)
    torch.testing.assert_close(alpha_K, torch.tensor([0.2, 0.4, 0.6, 0.8]))
    (one, others), (factor, (alpha,)) = drafter.trained_groups()
    assert (one, factor) == (1.0, 30.0)
    assert alpha is drafter.h_q.alpha
    assert {id(p) for p in [*others, alpha]} == {id(p) for p in drafter.parameters()}
    assert len(others) + 1 == len(list(drafter.parameters()))
    other_kind = Drafter(Config(kind="rnn"), target.ends(backbone))
    assert [factor for factor, _ in other_kind.trained_groups()] == [1.0]


def test_sizes_are_the_papers(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, head_width=1024)
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    V = len(drafter.draft_token_ids)
    assert shapes["w_p"] == (D, 1024)
    assert shapes["w_q"] == (D // 2, 1024)
    assert shapes["w3"] == (V, 2048)
    assert shapes["b3"] == (V,)
    assert shapes["h_q.first"] == (D, D // 2)
    assert shapes["h_q.second"] == (D // 2, D // 2)
    assert make_drafter(backbone, kind="transformer", layers=0).w_q.shape == (D, SMALL)
    assert make_drafter(backbone, kind="lstm").w_q.shape == (D // 2, SMALL)


@variants
def test_the_graphs_guess_as_the_module_does(
    backbone: Backbone, options: dict[str, Any], tmp_path: Path
) -> None:
    vocabulary = None if options == {} else TRIMMED
    drafter = make_drafter(backbone, vocabulary, **({"top_k": 5} | options))
    check_graphs(drafter, backbone, tmp_path)


def test_an_untrained_layer_passes_its_input_on(backbone: Backbone) -> None:
    """At every level, whatever the keys and values of the path before it."""
    torch.manual_seed(3)
    config = Config(kind="transformer", layers=2, num_guesses=3, head_width=SMALL)
    h_q = Drafter(config, target.ends(backbone)).h_q
    x, state = torch.randn(4, D), torch.randn(4, h_q.state_width)
    for level in range(3):
        y, state = h_q(x, state, torch.tensor([level]))
        assert torch.equal(y, x)


def test_what_the_proposer_is_told(backbone: Backbone) -> None:
    check_configuration(make_drafter(backbone, max_width=2, top_k=7), backbone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "gru"}, "got kind 'gru', expected one of fixed_attention, lstm, rnn"),
        ({"head": "tied"}, "got head 'tied', expected one of own, shared"),
        ({"layers": 7}, "got layers 7, head_width 1024, expected 0 to 6 layers"),
        ({"head_width": 0}, "head_width 0"),
        ({"alpha_rate": 0.0}, "got alpha_rate 0.0, expected more than 0"),
        ({"soft_weight": 0.5}, "a head of its own learns hard labels"),
        ({"num_guesses": 0}, "got num_guesses 0"),
    ],
)
def test_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
