"""P-EAGLE against its published forward pass: guesses, loss, graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import (
    Reference,
    backbone,
    check_loss,
    cross_entropy,
    features_of,
    make_batch,
    make_drafter,
    width_of,
)
from guessing import TOLERANCE, check_guesses, every_log_q, guesses_by_chunk
from published_eagle3 import Published
from test_bigram_pairs import random_table
from test_eagle3 import OWN, TAPS, fused
from tiny_backbone import LAYERS, TRIMMED, VOCAB
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_export.drafters.peagle import Drafter
from spec_export.graphs.slots import to_slots

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is trained": {"layers": 4, "own_embedding": True},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "num_masks": 2},
    "Qwen3 layers": {"qk_norms": True, "layers": 2, "fc_norm": True, "taps": (0, LAYERS)},
    "sizes of its own": OWN,
    "no masks": {"num_masks": 0},
    "windows": {"layers": 3, "sliding_layers": (0, 2), "window": 5},
}
in_every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def make(**options: Any) -> tuple[Drafter, Published]:
    """Returns a drafter and its published form."""
    drafter = make_drafter(
        "peagle", TRIMMED, **{"taps": TAPS, "mask_token_id": 7, "top_k": 5} | options
    )
    rope = options.get("rope") or backbone().config.rope
    return drafter, Published(drafter, rope["rope_theta"])


def published_log_q(published: Published, fused_TD: Tensor, token_T: Tensor) -> Tensor:
    """Returns the log-probability of every token, [T-1, K+1, VOCAB]; of others than the draft
    vocabulary's -inf."""
    K, tokens = published.config.num_masks, token_T.tolist()
    log_q = torch.full((len(tokens) - 1, K + 1, VOCAB), -torch.inf)
    for t in range(len(tokens) - 1):
        log_q[t, :, TRIMMED] = published.log_q(published.group(fused_TD[: t + 1], tokens, K))
    return log_q


@in_every_variant
def test_module_and_graph_are_the_published_model(options: dict[str, Any], tmp_path: Path) -> None:
    drafter, published = make(**options)
    batch = make_batch((24,), width_of(drafter))
    with torch.no_grad():
        fused_TD = fused(published, features_of(batch)[0])
        expected_RKV = published_log_q(published, fused_TD, batch.token_BT[0])
        torch.testing.assert_close(every_log_q(drafter, batch), expected_RKV, rtol=0, atol=1e-4)
    model = drafter.export(backbone().config)["drafter"]
    for form, graph in (("contiguous", model), ("slots", to_slots(model.clone()))):
        folder = tmp_path / form
        found = guesses_by_chunk(drafter, graph, folder, form, batch, fused_TD.numpy())
        for t, got in found:
            log_probs = got["guess_log_probs"]
            assert log_probs.shape == (drafter.config.num_guesses, 5)
            apart = check_guesses(got["guess_ids"], log_probs, expected_RKV[t])
            assert apart.max() <= TOLERANCE, (form, t)


def test_a_table_of_bigrams_conditions_the_graphs_guesses(tmp_path: Path) -> None:
    drafter, published = make(num_masks=3)
    drafter.add_bigrams(random_table(TRIMMED.numpy()))
    batch = make_batch((24,), width_of(drafter))
    with torch.no_grad():
        fused_TF = fused(published, features_of(batch)[0]).numpy()
    model = to_slots(drafter.export(backbone().config)["drafter"])
    assert drafter.bigrams is not None
    for _, got in guesses_by_chunk(drafter, model, tmp_path, "slots", batch, fused_TF):
        index_KC = drafter.draft_index_V[torch.from_numpy(got["guess_ids"])]
        pair_KCC = drafter.bigrams(index_KC, torch.tensor(got["guess_log_probs"])).numpy()
        assert got["pair_log_probs"].shape == (3, 5, 5)
        assert np.abs(got["pair_log_probs"] - pair_KCC).max() <= TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"num_masks": 2},
        {"num_masks": 3, "soft_weight": 0.25, "decay": 0.5, "norm_before_fc": True},
        {"num_masks": 1, "fc_norm": True, "own_embedding": True, "layers": 2},
        {"num_masks": 2, "layers": 2, "sliding_layers": (0,), "window": 3},
    ],
)
def test_the_loss_and_its_gradient_are_the_formulas(options: dict[str, Any]) -> None:
    drafter, _ = make(**options)
    config = drafter.config

    def reference(batch: Batch) -> Reference:
        published = Published(drafter, backbone().config.rope["rope_theta"])  # with gradients

        def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[Tensor]:
            fused_TD, tokens = fused(published, feature_TF), token_T.tolist()
            groups = [
                published.group(fused_TD[: t + 1], tokens, config.num_masks)
                for t in range(len(tokens) - 2)
            ]
            return [published.log_q(group) for group in groups]

        soft, weights = config.soft_weight, [config.decay**k for k in range(config.num_guesses)]
        shares = [((1 - soft) * weight, soft * weight) for weight in weights]
        return cross_entropy(drafter, batch, logits_of, shares)

    check_loss(drafter, reference, (12, 6), atol=1e-4)


def test_a_mask_beyond_the_targets_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=f"got mask_token_id {VOCAB}, expected one of the targ"):
        make(mask_token_id=VOCAB)
