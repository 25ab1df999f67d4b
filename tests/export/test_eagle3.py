"""EAGLE-3 against its published forward pass: levels, loss, graph along trees, fused taps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import (
    D,
    Reference,
    backbone,
    check_loss,
    cross_entropy,
    features_of,
    make_batch,
    make_drafter,
    width_of,
)
from graphs import Runner
from guessing import check_along_trees, every_log_q
from published_eagle3 import Published
from tiny_backbone import LAYERS, TRIMMED, VOCAB, backbone_of, chain, tiny
from torch import Tensor

from spec_export.drafters.eagle3 import Drafter
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
DIALECTS: dict[str, dict[str, Any]] = {
    "native": {},
    "speculators": {**{"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "Qwen3 layers": {"qk_norms": True, "layers": 2, "taps": (0, 1, 2, 3)},
    "sizes of its own": OWN,
    "windows": {"layers": 3, "sliding_layers": (0, 2), "window": 4, "norm_before_residual": True},
    "one tap": {"taps": (1,), "norm_before_residual": True, "layers": 2},
}


def dialects(*names: str) -> pytest.MarkDecorator:
    cases = [pytest.param(DIALECTS[name], id=name) for name in names or DIALECTS]
    return pytest.mark.parametrize("options", cases)


def make(vocabulary: Tensor | None = None, **options: Any) -> tuple[Drafter, Published]:
    """Returns a drafter and its published form."""
    drafter = make_drafter("eagle3", vocabulary, **{"taps": TAPS} | options)
    rope = options.get("rope") or backbone().config.rope
    return drafter, Published(drafter, rope["rope_theta"])


def fused(published: Published, feature_TF: Tensor) -> Tensor:
    _, *taps = feature_TF.split(D, -1)
    return published.fused(taps)


@dialects()
def test_levels_are_those_of_the_published_model(options: dict[str, Any]) -> None:
    drafter, published = make(TRIMMED, num_guesses=3, **options)
    batch = make_batch((9,), width_of(drafter))
    tokens, feature_TF = batch.token_BT[0].tolist(), features_of(batch)[0]
    log_q_RKV = every_log_q(drafter, batch)[..., TRIMMED]
    with torch.no_grad():
        for t in range(6):
            rows = published.levels(fused(published, feature_TF[: t + 1]), tokens, 3)
            expected_KV = torch.stack([published.log_q(row) for row in rows])
            torch.testing.assert_close(log_q_RKV[t], expected_KV, rtol=0, atol=1e-4)


@dialects("native", "speculators", "Qwen3 layers", "sizes of its own", "windows")
def test_the_graph_is_the_published_model_along_trees(
    options: dict[str, Any], tmp_path: Path
) -> None:
    drafter, published = make(TRIMMED, top_k=5, **options)
    model = drafter.export(backbone().config)["drafter"]
    with torch.no_grad():
        fused_TD = fused(published, features_of(make_batch((24,), width_of(drafter)))[0])

    def expected_of(token_T: Tensor, length: int) -> tuple[Tensor, Tensor]:
        num_levels = len(token_T) - length
        with torch.no_grad():
            row = published.levels(fused_TD[:length], token_T.tolist(), num_levels)[-1]
            log_q_V = torch.full((VOCAB,), -torch.inf)
            log_q_V[TRIMMED] = published.log_q(row)
            return log_q_V, published.norm(row, "norm") if drafter.config.norm_output else row

    for form, graph in (("contiguous", model), ("slots", to_slots(model.clone()))):
        check_along_trees(graph, tmp_path / form, form, expected_of, fused_TD.numpy())


@dialects("native", "speculators", "EAGLE-3.1")
def test_the_targets_graph_fuses_its_taps(options: dict[str, Any], tmp_path: Path) -> None:
    """Also in 8 bits, where the fusion's product stays in float."""
    drafter, published = make(**options)
    hf_model, token_N = tiny("llama"), torch.arange(9) * 5
    whole = backbone_of(hf_model)
    assert drafter.fusion is not None
    whole.add_fusion("eagle3", drafter.fusion)
    model = to_slots(trace.export_backbone(whole))
    with torch.no_grad():
        _, *taps = features_and_taps(hf_model.model, token_N[None], drafter.config.taps)
        expected = published.fused([tap[0] for tap in taps])
    for precision, tolerance in (("fp32", 1e-5), ("int8", 0.2)):
        graph = quantize(model.clone(), precision)
        assert "fusions.eagle3.fc" in graph.graph.initializers
        got = Runner(graph, tmp_path / precision).step(token_N.numpy(), chain(9), ["fused.eagle3"])
        error = torch.from_numpy(got["fused.eagle3"]) - expected
        assert error.abs().max() <= tolerance * expected.abs().max()


def reference_loss(drafter: Drafter, batch: Batch) -> Reference:
    config = drafter.config
    published = Published(drafter, backbone().config.rope["rope_theta"])  # weights with gradients

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[list[Tensor]]:
        fused_TD, T = fused(published, feature_TF), len(token_T)
        return [
            [
                published.log_q(row)
                for row in published.levels(
                    fused_TD[: t + 1], token_T.tolist(), min(config.ttt_steps, T - 2 - t)
                )
            ]
            for t in range(T - 2)
        ]

    weights, soft = [config.decay**k for k in range(config.ttt_steps)], config.soft_weight
    shares = [((1 - soft) * weight, soft * weight) for weight in weights]
    return cross_entropy(drafter, batch, logits_of, shares)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"soft_weight": 0.25, "decay": 0.5, "norm_before_fc": True, "norm_before_residual": True},
        {
            "fc_norm": True,
            "norm_output": True,
            "qk_norms": True,
            "own_embedding": True,
            "layers": 2,
        },
        {"sliding_layers": (0,), "window": 2},
    ],
)
def test_the_loss_and_its_gradient_are_the_formulas(options: dict[str, Any]) -> None:
    drafter, _ = make(TRIMMED, ttt_steps=3, **options)
    check_loss(drafter, partial(reference_loss, drafter), (12, 6), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 48}, "got hidden_size 48 with the target's embedding, expected its 64"),
        ({"head_dim": 8}, "got head_dim 8 with the target's rotary embedding, expected its 16"),
        ({"rope": {"rope_type": "spiral"}}, "got rotary embedding 'spiral'"),
        ({"sliding_layers": (0,)}, r"got sliding_layers \[0\] and no window, expected its width"),
        (
            {"sliding_layers": (1,), "window": 9},
            r"got sliding_layers \[1\], expected some of the l",
        ),
        ({"num_kv_heads": 3}, "got 4 heads over 3 key/value heads"),
    ],
)
def test_what_does_not_fit_the_target(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_taps_beyond_the_target_are_refused() -> None:
    drafter, _ = make(taps=(1, LAYERS + 1))
    assert drafter.fusion is not None
    with pytest.raises(ValueError, match=r"got taps \[1, 4\], expected distinct layer ids from 0"):
        backbone_of(tiny("llama")).add_fusion("eagle3", drafter.fusion)
