"""ParallelSpec: who sees whom in a parallel group, mask rows and losses by their definitions."""

import dataclasses
from typing import Any

import pytest
import torch
from formulas import D, attend, backbone, features_of, make_drafter, new_drafter, width_of
from formulas import make_batch as make_batch_of
from tiny_backbone import VOCAB
from torch import Tensor
from torch.nn import functional as F

from spec_export.drafters.layers import Batch
from spec_export.drafters.parallelspec import Drafter
from spec_export.drafters.rollout import choose_anchors
from spec_export.model import target

NAME = "parallelspec"


def make_batch(drafter: Drafter, lengths: tuple[int, ...] = (8,)) -> Batch:
    return make_batch_of(lengths, width_of(drafter))


@pytest.mark.parametrize("style", ["medusa", "eagle"])
def test_an_untrained_drafter_guesses_from_the_feature_as_it_is(style: str) -> None:
    """What reads a feature starts as the identity, but for a little of the other inputs."""
    drafter = new_drafter(NAME, style=style, taps=(1,), num_masks=1, mask_feature="anchor")
    batch = make_batch(drafter)
    feature = features_of(batch)[:, :-1, :D] * target.ends(backbone()).feature_scale
    real, masks = drafter.hidden_rows(batch, torch.arange(7)[None])
    for rows in (real, masks[:, :, 0]):
        out = drafter.output_rows(rows)
        assert F.cosine_similarity(out, feature, dim=-1).min() > 0.8
        assert (out.square().mean() / feature.square().mean()).sqrt().item() == pytest.approx(
            1, abs=0.3
        )


# ---- the group-wise mask ----

VISIBLE = """
                 real0 real1 real2 real3 real4 real5 | mask1 mask2 mask3
    mask1 of t=2   x     x     x     .     .     .   |   x     .     .
    mask2 of t=2   x     x     x     .     .     .   |   x     x     .
    mask3 of t=2   x     x     x     .     .     .   |   x     x     x
"""


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (1, {}),
        (2, {}),
        (1, {"mask_feature": "anchor"}),
        (2, {"mask_feature": "anchor"}),
    ],
)
def test_a_group_sees_the_rows_up_to_its_anchor_and_its_own_masks(
    layers: int, options: dict[str, Any]
) -> None:
    """The paper's causal block: a mask sees no later mask, and no real row behind the anchor."""
    drafter = make_drafter(NAME, num_masks=3, layers=layers, **options)
    batch, anchor = make_batch(drafter, (7,)), torch.tensor([[2]])
    with torch.no_grad():
        before = drafter.hidden_rows(batch, anchor)[1][0, 0]

        def moved() -> list[bool]:
            after = drafter.hidden_rows(batch, anchor)[1][0, 0]
            change_K = (after - before).abs().amax(-1)
            assert not ((change_K > 1e-6) & (change_K < 1e-4)).any()  # all or nothing
            return (change_K > 1e-4).tolist()

        columns = []
        for row in range(6):  # real row t: the feature of t and token t + 1
            changed = []
            for rows, index in ((features_of(batch)[0], row), (batch.token_BT[0], row + 1)):
                kept = rows[index].clone()
                rows[index] = (kept + 1) % VOCAB
                changed.append(moved())
                rows[index] = kept
            assert changed[0] == changed[1], row
            columns.append(changed[0])
        for embedding in drafter.mask_embed:
            kept = embedding.clone()
            embedding += torch.randn(D)
            columns.append(moved())
            embedding.copy_(kept)
    grid = [list(row) for row in zip(*columns, strict=True)]
    lines = [line.split("=2")[1].replace("|", " ").split() for line in VISIBLE.splitlines()[2:5]]
    assert grid == [[cell == "x" for cell in line] for line in lines]


@pytest.mark.parametrize("mask_feature", ["zero", "anchor"])
def test_other_groups_do_not_matter(mask_feature: str) -> None:
    drafter = make_drafter(NAME, num_masks=3, layers=2, mask_feature=mask_feature)
    batch = make_batch(drafter, (8, 8))
    with torch.no_grad():
        real, together = drafter.hidden_rows(batch, torch.tensor([[4, 0, 2], [1, 6, 3]]))
        for b, anchors in enumerate([[4, 0, 2], [1, 6, 3]]):
            for i, t in enumerate(anchors):
                same_real, alone = drafter.hidden_rows(batch, torch.tensor([[t], [t]]))
                torch.testing.assert_close(alone[b, 0], together[b, i], rtol=0, atol=1e-5)
                torch.testing.assert_close(same_real, real, rtol=0, atol=1e-5)


def reference_hidden(drafter: Drafter, batch: Batch, t: int) -> Tensor:
    """The last hidden states [K, D] of the group anchored at real row t of one sequence, in a
    drafter of one layer: every row's input by its definition, every query's attention by itself."""
    config, layer, dims = drafter.config, drafter.layers[0], drafter.dims
    token_T, feature_TF = batch.token_BT[0], features_of(batch)[0]

    def row(token_chunk: Tensor, feature: Tensor) -> Tensor:
        chunks = torch.stack([*feature.split(D), token_chunk])
        normed = chunks * torch.rsqrt(chunks.square().mean(-1, keepdim=True) + dims.norm_eps)
        return (normed * drafter.input_norm).flatten() @ drafter.fc

    inputs = [row(drafter.embed_VD[token_T[s + 1]], feature_TF[s]) for s in range(t + 1)]
    positions = list(range(t + 1))
    for k in range(config.num_masks):
        is_anchor = config.mask_feature == "anchor"
        feature_F = feature_TF[t] if is_anchor else torch.zeros_like(feature_TF[t])
        inputs.append(row(drafter.mask_embed[k], feature_F))
        positions.append(t + 1 + k)
    x = torch.stack(inputs)  # rows are in order, so a mask sees all before it
    return layer.finish(x, attend(drafter, layer, x, positions))[t + 1 :]


@pytest.mark.parametrize("mask_feature", ["zero", "anchor"])
def test_mask_rows_are_their_definition(mask_feature: str) -> None:
    drafter = make_drafter(NAME, num_masks=3, mask_feature=mask_feature)
    batch = make_batch(drafter, (9,))
    with torch.no_grad():
        masks = drafter.hidden_rows(batch, torch.tensor([[5, 0]]))[1][0]
        for group, t in zip(masks, (5, 0), strict=True):
            expected = reference_hidden(drafter, batch, t)
            torch.testing.assert_close(group, expected, rtol=0, atol=1e-4)


# ---- losses ----


def loss_of(drafter: Drafter, batch: Batch, seed: int) -> tuple[float, list[int]]:
    loss, counts = drafter.loss(batch, torch.Generator().manual_seed(seed))
    return loss.item(), counts["count_K"].tolist()


def test_noise_is_eagles_and_the_targets_own_features_stay() -> None:
    """Rows read features within ± noise / 2 · 512 / length; those that are regressed have none."""
    drafter = make_drafter(NAME, style="eagle", num_masks=1, feature_noise=0.2)
    batch = make_batch(drafter, (20, 10))
    assert loss_of(drafter, batch, 0) == loss_of(drafter, batch, 0)
    noisy = loss_of(drafter, batch, 0)
    assert noisy != loss_of(drafter, batch, 1)
    attended_rows, read = drafter.attended_rows, []

    def without_noise(seen: Batch, anchor_BA: Tensor) -> tuple[Tensor, Tensor]:
        read.append(seen.feature_BTF)
        return attended_rows(batch, anchor_BA)

    drafter.attended_rows = without_noise  # type: ignore[method-assign, assignment]
    clean = loss_of(drafter, batch, 0)
    for b, length in enumerate((20, 10)):
        bound = 0.1 * 512 / length
        apart_TF = (read[0][b] - features_of(batch)[b]).abs()  # type: ignore[index]
        assert 0.95 * bound < apart_TF.max() <= bound * 1.0001
    drafter.attended_rows = attended_rows  # type: ignore[method-assign]
    drafter.config = dataclasses.replace(drafter.config, feature_noise=0.0)
    assert clean == loss_of(drafter, batch, 0) != noisy


def test_anchors_are_a_seeded_part_of_the_labelled_rows() -> None:
    drafter = make_drafter(NAME, num_masks=2, anchor_fraction=0.3)
    batch = make_batch(drafter, (20,))
    batch.loss_BT[0, :4] = False
    has_label = batch.loss_BT[:, 2:]

    def anchors(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        anchor_BA, is_anchor_BA = choose_anchors(has_label, 0.3, generator)
        return sorted(anchor_BA[is_anchor_BA].tolist())

    assert len(anchors(0)) == 5  # of 16 labelled rows, rounded up
    assert min(anchors(0)) >= 2
    assert anchors(0) == anchors(0)
    assert anchors(0) != anchors(1)
    losses = [drafter.loss(batch, torch.Generator().manual_seed(7))[0].item() for _ in range(2)]
    assert losses[0] == losses[1]
    counts = drafter.loss(batch, torch.Generator().manual_seed(7))[1]["count_K"].tolist()
    assert counts[0] == 16
    assert counts[1] <= 5


def test_a_step_with_a_shortlist_learns_what_the_whole_vocabulary_teaches() -> None:
    """The mean gradient of 300 steps with other shortlists points where the full one does, and the
    list has every token of the batch."""
    drafter = make_drafter(NAME, num_masks=2, soft_weight=0.5)
    batch = make_batch(drafter, (6,))

    def gradient(seed: int) -> Tensor:
        drafter.zero_grad()
        loss, _ = drafter(batch, torch.Generator().manual_seed(seed))
        loss.backward()
        return torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])

    full = gradient(0)
    assert drafter.shortlist is None
    drafter.shortlist_size = VOCAB // 2
    some = torch.stack([gradient(seed) for seed in range(300)])
    assert drafter.shortlist is not None
    assert (drafter.shortlist.position_V[batch.token_BT] >= 0).all()
    assert torch.equal(gradient(7), some[7])  # the generator draws it
    assert F.cosine_similarity(some[0], full, dim=0) < 0.999  # one step is an estimate
    assert F.cosine_similarity(some.mean(0), full, dim=0) > 0.99
