"""EAGLE: the rows of a rollout by hand, losses by the formula, the exported graph along trees."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import (
    D,
    attend,
    backbone,
    check_loss,
    cross_entropy,
    features_of,
    make_batch,
    make_drafter,
)
from guessing import check_along_trees
from tiny_backbone import TRIMMED, VOCAB
from torch import Tensor
from torch.nn import functional as F

from spec_export.drafters.eagle import Drafter
from spec_export.drafters.layers import Batch, noisy_features
from spec_export.graphs.slots import to_slots

OWN = {  # sizes and rotary embedding of its own, as EAGLE's files have them
    **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24},
    **{"rope": {"rope_theta": 90.0}, "norm_eps": 1e-3, "input_norm": False},
}

# ---- the module, literally ----


def row_input(drafter: Drafter, feature_D: Tensor, token: int) -> Tensor:
    embedding_D = drafter.embed_VD[token]
    if drafter.config.normalise:
        eps = drafter.dims.norm_eps
        feature_D = F.rms_norm(feature_D, (D,), drafter.input_norm[0], eps)
        embedding_D = F.rms_norm(embedding_D, (D,), drafter.input_norm[1], eps)
    return torch.cat([feature_D, embedding_D]) @ drafter.fc + drafter.fc_bias


def run_chain(drafter: Drafter, x: Tensor) -> Tensor:
    """The layers over a plain causal sequence [R, D]."""
    for layer in drafter.layers:
        x = layer.finish(x, attend(drafter, layer, x, range(len(x))))
    return x


def literal_rollout(drafter: Drafter, batch: Batch, b: int, t: int, num_levels: int) -> Tensor:
    """Predicted features [K, D] behind row t: a chain of real rows 0 … t, then its own."""
    assert batch.feature_BTF is not None
    token_T, feature_TD = batch.token_BT[b].tolist(), batch.feature_BTF[b]
    rows = [row_input(drafter, feature_TD[i], token_T[i + 1]) for i in range(t + 1)]
    predicted: list[Tensor] = []
    for level in range(num_levels):
        if level:
            rows.append(row_input(drafter, predicted[-1], token_T[t + 1 + level]))
        predicted.append(run_chain(drafter, torch.stack(rows))[-1])
    return torch.stack(predicted)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_each_level_goes_on_from_the_one_before(layers: int, normalise: bool) -> None:
    drafter = make_drafter("eagle", layers=layers, normalise=normalise)
    batch = make_batch((9, 7))
    assert batch.feature_BTF is not None
    with torch.no_grad():
        levels = drafter.rollout(batch, batch.feature_BTF, 4)
        for b, length in ((0, 9), (1, 7)):
            for t in range(length - 1):
                K = min(4, length - 1 - t)  # while there are tokens to read
                expected = literal_rollout(drafter, batch, b, t, K)
                got = torch.stack([level[b, t] for level in levels[:K]])
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_guesses_are_the_heads_of_the_levels() -> None:
    drafter = make_drafter("eagle", TRIMMED, num_guesses=3)
    batch = make_batch((7,))
    ids, log_probs = drafter.guesses(batch, 4)
    assert ids.shape == log_probs.shape == (1, 6, 3, 4)
    with torch.no_grad():
        hidden = literal_rollout(drafter, batch, 0, 2, 3)
    q = torch.log_softmax(hidden @ drafter.head_VD.T, -1)
    torch.testing.assert_close(log_probs[0, 2], q.topk(4).values, rtol=0, atol=1e-5)
    assert ids[0, 2].tolist() == TRIMMED[q.topk(4).indices].tolist()


# ---- labels and losses ----


def reference_loss(drafter: Drafter, batch: Batch) -> tuple[Tensor, list[int], list[int]]:
    """Adds the regression, which counts tokens outside the draft vocabulary too, to the CE."""
    c = drafter.config
    distances: list[list[Tensor]] = [[] for _ in range(c.ttt_steps)]

    def logits_of(token_T: Tensor, feature_TD: Tensor) -> list[Tensor]:
        T = len(token_T)
        one = Batch(token_T[None], batch.loss_BT, feature_TD[None], torch.tensor([T]))
        return [
            literal_rollout(drafter, one, 0, t, min(c.ttt_steps, T - 2 - t)) @ drafter.head_VD.T
            for t in range(T - 2)
        ]

    weights = [c.w_cls * c.decay**k for k in range(c.ttt_steps)]
    shares = [((1 - c.soft_weight) * weight, c.soft_weight * weight) for weight in weights]
    total, correct_K, count_K = cross_entropy(drafter, batch, logits_of, shares)
    for b, length in enumerate(batch.length_B.tolist()):
        for t in range(length - 2):
            levels = literal_rollout(drafter, batch, b, t, min(c.ttt_steps, length - 2 - t))
            for k, predicted_D in enumerate(levels):
                if batch.loss_BT[b, t + 2 + k]:
                    wanted_D = features_of(batch)[b, t + 1 + k]
                    distances[k].append(F.smooth_l1_loss(predicted_D, wanted_D))
    for k, of_level in enumerate(distances):
        assert len(of_level) > count_K[k] > 0
        total = total + c.w_reg * c.decay**k * torch.stack(of_level).mean()
    return total, correct_K, count_K


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalise": True, "w_reg": 0.7, "w_cls": 0.2},
        {"soft_weight": 0.25, "layers": 2},
        {"ttt_steps": 3, "decay": 0.5},
    ],
)
def test_the_loss_and_its_gradient_are_the_formulas(options: dict[str, Any]) -> None:
    drafter = make_drafter("eagle", TRIMMED, **options)
    check_loss(drafter, partial(reference_loss, drafter), (12, 6), atol=1e-4)


def test_noise_is_seeded_and_as_large_as_eagles() -> None:
    """Uniform in ± 0.1 · 512 / length, on what is read; what is regressed stays clean."""
    drafter, batch = make_drafter("eagle", feature_noise=0.2), make_batch((40, 20))
    assert batch.feature_BTF is not None
    before = batch.feature_BTF.clone()
    losses = [drafter.loss(batch, torch.Generator().manual_seed(s))[0].item() for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(batch.feature_BTF, before)
    noisy = noisy_features(batch, drafter.config.feature_noise, torch.Generator().manual_seed(0))
    assert noisy is not None
    noise = noisy - before
    for b, length in ((0, 40), (1, 20)):
        half = 0.1 * 512 / length
        assert 0.98 * half < float(noise[b].abs().max()) <= half * 1.001
        assert abs(float(noise[b].mean())) < 0.05 * half
    clean = make_drafter("eagle")
    assert clean.loss(batch)[0].item() == clean.loss(batch, torch.Generator())[0].item()


@pytest.mark.parametrize(
    ("options", "vocabulary"),
    [
        ({}, TRIMMED),
        ({"normalise": True}, None),
        ({"layers": 2, "normalise": True}, TRIMMED),
        ({"layers": 2, **OWN}, TRIMMED),
        ({"layers": 2, "qkv_bias": True}, TRIMMED),
    ],
)
def test_the_graph_guesses_as_the_module_does_along_a_tree(
    options: dict[str, Any], vocabulary: Tensor | None, tmp_path: Path
) -> None:
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
