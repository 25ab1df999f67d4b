"""ParallelSpec: who sees whom in a parallel group, labels and losses by hand, the exported graph.

Tolerance between eager and ONNX Runtime: 1e-4 absolute on log-probabilities, both float32 with
other orders of summation (measures about 1e-6; a wrong row or position moves them by tenths).
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import check_loss_and_gradient
from graphs import Runner
from tiny_backbone import HEAD_DIM, HEADS, VOCAB, backbone_of, chain, tiny
from torch import Tensor
from torch.nn import functional as F

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters.layers import Batch
from spec_export.drafters.parallelspec import Config, Drafter
from spec_export.graphs.slots import to_slots
from spec_export.training.checkpoint import load_drafter
from spec_export.training.recipe import build_config

TOLERANCE = 1e-4
D = HEADS * HEAD_DIM
TRIMMED = torch.arange(1, VOCAB, 2)
SHIPPED = resources.files("spec_export") / "assets/drafters/smollm2-135m-instruct/parallelspec"


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"), taps=(1, 2))


def make_drafter(backbone: Backbone, vocabulary: Tensor | None = None, **config: Any) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(Config(**config), target.ends(backbone), vocabulary)
    with torch.no_grad():  # so that every gain matters
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return drafter


def make_batch(drafter: Drafter, lengths: tuple[int, ...] = (8,), seed: int = 2) -> Batch:
    """Random tokens and features, every token an answer's."""
    torch.manual_seed(seed)
    B, T, width = len(lengths), max(lengths), max(1, drafter.num_features) * D
    length_B = torch.tensor(lengths)
    is_token_BT = torch.arange(T) < length_B[:, None]
    token_BT = torch.where(is_token_BT, torch.randint(VOCAB, (B, T)), 0)
    return Batch(token_BT, is_token_BT, torch.randn(B, T, width), length_B)


@pytest.mark.parametrize("style", ["medusa", "eagle"])
def test_an_untrained_drafter_guesses_from_the_feature_as_it_is(
    backbone: Backbone, style: str
) -> None:
    """What reads a feature starts as the identity, but for a little of the other inputs."""
    torch.manual_seed(1)
    config = Config(style=style, taps=(1,), num_masks=1, mask_feature="anchor")
    drafter = Drafter(config, target.ends(backbone))
    batch = make_batch(drafter)
    assert batch.feature_BTF is not None
    feature = batch.feature_BTF[:, :-1, :D] * drafter.feature_scale
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
        (2, {"mask_reads_token": True}),
    ],
)
def test_a_group_sees_the_rows_up_to_its_anchor_and_its_own_masks(
    backbone: Backbone, layers: int, options: dict[str, Any]
) -> None:
    """The paper's causal block: a mask sees no later mask, and no real row behind the anchor."""
    drafter = make_drafter(backbone, num_masks=3, layers=layers, **options)
    batch, anchor = make_batch(drafter, (7,)), torch.tensor([[2]])
    with torch.no_grad():
        before = drafter.hidden_rows(batch, anchor)[1][0, 0]

        def moved() -> list[bool]:
            after = drafter.hidden_rows(batch, anchor)[1][0, 0]
            change_K = (after - before).abs().amax(-1)
            assert not ((change_K > 1e-6) & (change_K < 1e-4)).any()  # all or nothing
            return (change_K > 1e-4).tolist()

        columns = []
        assert batch.feature_BTF is not None
        for row in range(6):  # real row t: the feature of t and token t + 1
            changed = []
            for rows, index in ((batch.feature_BTF[0], row), (batch.token_BT[0], row + 1)):
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
def test_other_groups_do_not_matter(backbone: Backbone, mask_feature: str) -> None:
    drafter = make_drafter(backbone, num_masks=3, layers=2, mask_feature=mask_feature)
    batch = make_batch(drafter, (8, 8))
    with torch.no_grad():
        real, together = drafter.hidden_rows(batch, torch.tensor([[4, 0, 2], [1, 6, 3]]))
        for b, anchors in enumerate([[4, 0, 2], [1, 6, 3]]):
            for i, t in enumerate(anchors):
                same_real, alone = drafter.hidden_rows(batch, torch.tensor([[t], [t]]))
                torch.testing.assert_close(alone[b, 0], together[b, i], rtol=0, atol=1e-5)
                torch.testing.assert_close(same_real, real, rtol=0, atol=1e-5)


def test_padding_does_not_matter(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, num_masks=2, top_k=5)
    batch = make_batch(drafter, (9, 5))
    assert batch.feature_BTF is not None
    short = Batch(
        batch.token_BT[1:, :5], batch.loss_BT[1:, :5], batch.feature_BTF[1:, :5], torch.tensor([5])
    )
    padded, alone = drafter.guesses(batch, 5)[1][1, :4], drafter.guesses(short, 5)[1][0]
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)


def reference_hidden(drafter: Drafter, batch: Batch, t: int) -> Tensor:
    """The last hidden states [K, D] of the group anchored at real row t of one sequence, in a
    drafter of one layer: every row's input by its definition, every query's attention by itself."""
    config, layer, dims = drafter.config, drafter.layers[0], drafter.dims
    assert batch.feature_BTF is not None
    token_T, feature_TF = batch.token_BT[0], batch.feature_BTF[0]

    def row(token_chunk: Tensor, feature: Tensor) -> Tensor:
        chunks = torch.stack([*feature.split(D), token_chunk])
        normed = chunks * torch.rsqrt(chunks.square().mean(-1, keepdim=True) + dims.norm_eps)
        return (normed * drafter.input_norm).flatten() @ drafter.fc

    inputs = [row(drafter.embed_VD[token_T[s + 1]], feature_TF[s]) for s in range(t + 1)]
    positions = list(range(t + 1))
    for k in range(config.num_masks):
        chunk = drafter.mask_embed[k]
        if config.mask_reads_token:
            chunk = drafter.embed_VD[token_T[t + 1]] + chunk
        is_anchor = config.mask_feature == "anchor"
        inputs.append(row(chunk, feature_TF[t] if is_anchor else torch.zeros_like(feature_TF[t])))
        positions.append(t + 1 + k)
    q, k_, v = layer.project_qkv(torch.stack(inputs))
    half = dims.head_dim // 2

    def turned(x: Tensor, position: int) -> Tensor:
        a, b, cos, sin = x[:half], x[half:], drafter.cos[position], drafter.sin[position]
        return torch.cat((a * cos - b * sin, b * cos + a * sin))

    outputs = []
    for i in range(t + 1, len(inputs)):  # rows are in order, so a mask sees all before it
        mixed = []
        for head in range(dims.num_heads):
            group = head // (dims.num_heads // dims.num_kv_heads)
            keys = torch.stack([turned(k_[j, group], positions[j]) for j in range(i + 1)])
            scores = keys @ turned(q[i, head], positions[i]) * dims.head_dim**-0.5
            mixed.append(torch.softmax(scores, -1) @ v[: i + 1, group])
        outputs.append(layer.finish(inputs[i], torch.cat(mixed)))
    return torch.stack(outputs)


@pytest.mark.parametrize("mask_reads_token", [False, True])
@pytest.mark.parametrize("mask_feature", ["zero", "anchor"])
def test_mask_rows_are_their_definition(
    backbone: Backbone, mask_feature: str, mask_reads_token: bool
) -> None:
    drafter = make_drafter(
        backbone, num_masks=3, mask_feature=mask_feature, mask_reads_token=mask_reads_token
    )
    batch = make_batch(drafter, (9,))
    with torch.no_grad():
        masks = drafter.hidden_rows(batch, torch.tensor([[5, 0]]))[1][0]
        for group, t in zip(masks, (5, 0), strict=True):
            expected = reference_hidden(drafter, batch, t)
            torch.testing.assert_close(group, expected, rtol=0, atol=1e-4)


# ---- labels and losses ----


def test_counts_of_a_small_example(backbone: Backbone) -> None:
    """Answer at 3 … 7, token 5 outside the draft vocabulary, K = 2; guess k of row t is t + 2 + k.

    Guess 0: 3, 4, 6, 7 (rows 1, 2, 4, 5, which anchor groups); guess 1 of those: 4, –, 7, past the
    end; guess 2: –, 6, past the end twice.
    """
    drafter = make_drafter(backbone, TRIMMED, num_masks=2)
    batch = make_batch(drafter)
    batch.token_BT[0] = torch.tensor([9, 9, 9, 11, 13, 12, 15, 17])
    batch.loss_BT[0] = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    _, counts = drafter.loss(batch)
    assert counts["count_K"].tolist() == [4, 2, 1]
    batch.loss_BT[0, 6] = False  # as a user's turn between two answers
    assert drafter.loss(batch)[1]["count_K"].tolist() == [3, 1, 0]


def reference_loss(drafter: Drafter, batch: Batch) -> tuple[Tensor, list[int], list[int]]:
    """The loss of one sequence by its formulas, guess by guess; also correct_K and count_K."""
    config, K = drafter.config, drafter.config.num_masks
    ids = drafter.draft_token_ids.tolist()
    tokens, answer = batch.token_BT[0].tolist(), batch.loss_BT[0].tolist()
    assert batch.feature_BTF is not None
    weight = [1.0 if a else config.prompt_weight for a in answer]
    label = [ids.index(x) if x in ids else None for x in tokens]
    anchors = torch.arange(len(tokens) - 1)[None]
    real, masks = drafter.hidden_rows(batch, anchors)
    rows = drafter.output_rows(torch.cat((real[0, :, None], masks[0]), dim=1))  # [R, K+1, D]
    total, correct_K, count_K = torch.zeros(()), [0] * (K + 1), [0] * (K + 1)
    reach_R = [1.0] * len(tokens)
    for k in range(K + 1):
        losses, weights, distances, all_weights = [], [], [], []
        for t in range(len(tokens) - 2 - k):
            own, first, decay = label[t + 2 + k], label[t + 2], config.decay**k
            may_train = weight[t + 2] > 0 and (first is not None or config.style == "eagle")
            reach, reach_R[t] = reach_R[t], 0.0
            lambda_k = reach if config.depth_weights == "reach" else decay
            if config.style == "eagle" and config.depth_weights == "decay":
                lambda_k = 1.0
            if not may_train or not weight[t + 2 + k]:
                continue
            feature_D = batch.feature_BTF[0, t + 1 + k, :D]
            distances.append(lambda_k * weight[t + 2 + k] * F.smooth_l1_loss(rows[t, k], feature_D))
            all_weights.append(weight[t + 2 + k])
            if own is None:
                continue
            row = rows[t, k]
            log_q_V = torch.log_softmax(row @ drafter.head_VD.T, -1)
            p_V = torch.softmax(feature_D @ drafter.head_VD.T, -1)
            soft = config.soft_weight
            loss = -(1 - soft) * log_q_V[own] - soft * (p_V * log_q_V).sum()
            if config.loss == "tv":
                distance = (p_V - log_q_V.exp()).abs().sum() / 2
                loss = config.tv_weight * distance + (1 - config.tv_weight) * loss
            if config.loss == "lk":
                loss = -torch.minimum(p_V, log_q_V.exp()).sum().log()
            losses.append(lambda_k * weight[t + 2 + k] * loss)
            weights.append(weight[t + 2 + k])
            reach_R[t] = reach * log_q_V[own].exp().item()
            if answer[t + 2 + k]:
                correct_K[k] += int(log_q_V.argmax() == own)
                count_K[k] += 1
        part = torch.stack(losses).sum() / sum(weights)
        if config.style == "eagle":
            distance = torch.stack(distances).sum() / sum(all_weights)
            part = config.w_cls * part + config.w_reg * distance
        total = total + part
    return total, correct_K, count_K


@pytest.mark.parametrize(
    "options",
    [
        {"style": "medusa"},
        {"style": "medusa", "soft_weight": 0.5, "taps": (1,)},
        {"style": "medusa", "inputs": "tokens", "decay": 0.5},
        {"style": "eagle", "w_reg": 0.7, "w_cls": 0.2},
        {"style": "eagle", "soft_weight": 1.0, "num_masks": 0},
        {"loss": "tv", "soft_weight": 0.5},
        {"loss": "tv", "tv_weight": 0.3, "style": "eagle"},
        {"loss": "lk", "mask_feature": "anchor"},
        {"depth_weights": "reach", "num_masks": 3},
        {"depth_weights": "reach", "style": "eagle", "w_cls": 1.0},
        {"prompt_weight": 0.3, "soft_weight": 0.5},
        {"prompt_weight": 1.5, "style": "eagle"},
        {"loss": "lk", "depth_weights": "reach", "prompt_weight": 0.5},
    ],
)
def test_the_loss_and_its_gradient_are_the_formulas(
    backbone: Backbone, options: dict[str, Any]
) -> None:
    vocabulary = torch.tensor([i for i in range(VOCAB) if i % 5])
    drafter = make_drafter(backbone, vocabulary, **({"num_masks": 2} | options))
    batch = make_batch(drafter, (14,))
    batch.loss_BT[0, :3] = False
    batch.loss_BT[0, 6] = False  # as a user's turn between two answers
    with torch.no_grad():  # make some guesses right
        ids, _ = drafter.guesses(batch, 1)
        batch.token_BT[0, 13] = ids[0, 11, 0, 0]
    assert any(x % 5 == 0 for x in batch.token_BT[0, 3:].tolist())  # some have no label
    empty = () if drafter.config.num_masks else ("mask_embed",)
    check_loss_and_gradient(drafter, batch, reference_loss, empty=empty)


def test_losses_that_read_the_target_need_its_features(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, inputs="tokens", loss="tv")
    batch = dataclasses.replace(make_batch(drafter), feature_BTF=None)
    with pytest.raises(ValueError, match=r"got loss 'tv' .* without the target's features"):
        drafter.loss(batch)


def loss_of(drafter: Drafter, batch: Batch, seed: int) -> tuple[float, list[int]]:
    loss, counts = drafter.loss(batch, torch.Generator().manual_seed(seed))
    return loss.item(), counts["count_K"].tolist()


def test_groups_thin_out_with_depth(backbone: Backbone) -> None:
    """About half of all groups keep mask 2, and half of these mask 3."""
    drafter = make_drafter(backbone, num_masks=3, depth_keep=0.5)
    batch = make_batch(drafter, (50,) * 8)
    loss, count_K = loss_of(drafter, batch, 0)
    assert count_K[:2] == [8 * 48, 8 * 47]
    assert count_K[2] == pytest.approx(8 * 46 / 2, abs=40)
    assert count_K[3] == pytest.approx(8 * 45 / 4, abs=40)
    assert (loss, count_K) == loss_of(drafter, batch, 0)
    assert count_K != loss_of(drafter, batch, 1)[1]
    drafter.config = dataclasses.replace(drafter.config, depth_keep=1.0)
    assert loss_of(drafter, batch, 0)[1] == [8 * 48, 8 * 47, 8 * 46, 8 * 45]


def test_noise_is_eagles_and_the_targets_own_features_stay(backbone: Backbone) -> None:
    """Rows read features within ± noise / 2 · 512 / length; those that are regressed have none."""
    drafter = make_drafter(backbone, style="eagle", num_masks=1, feature_noise=0.2)
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
        apart_TF = (read[0][b] - batch.feature_BTF[b]).abs()  # type: ignore[index]
        assert 0.95 * bound < apart_TF.max() <= bound * 1.0001
    drafter.attended_rows = attended_rows  # type: ignore[method-assign]
    drafter.config = dataclasses.replace(drafter.config, feature_noise=0.0)
    assert clean == loss_of(drafter, batch, 0) != noisy


def test_anchors_are_a_seeded_part_of_the_labelled_rows(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, num_masks=2, anchor_fraction=0.3)
    batch = make_batch(drafter, (20,))
    batch.loss_BT[0, :4] = False
    has_label = batch.loss_BT[:, 2:]

    def anchors(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        anchor_BA, is_anchor_BA = drafter._choose_anchors(has_label, generator)
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


def test_only_its_own_weights_are_saved(backbone: Backbone) -> None:
    names = set(make_drafter(backbone, style="eagle").state_dict())
    layer = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
    assert names == {"mask_embed", "input_norm", "fc", *(f"layers.0.{name}" for name in layer)}
    assert "final_norm" in make_drafter(backbone).state_dict()


# ---- the exported graph ----

GRAPHS: dict[str, dict[str, Any]] = {
    "medusa, taps": {"taps": (1, 2)},
    "medusa, tokens only, two layers": {"inputs": "tokens", "layers": 2, "num_masks": 2},
    "eagle, whole vocabulary": {"style": "eagle", "num_masks": 3},
    "eagle, two layers, tap": {"style": "eagle", "layers": 2, "taps": (1,)},
    "no masks": {"num_masks": 0},
    "masks with the anchor's feature": {"mask_feature": "anchor", "taps": (1,)},
    "masks with the root token": {"mask_reads_token": True, "mask_feature": "anchor"},
    "tokens only, masks with the root token": {"mask_reads_token": True, "inputs": "tokens"},
}


@pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in GRAPHS.items()])
def test_the_graph_guesses_as_the_module_does(
    backbone: Backbone, options: dict[str, Any], tmp_path: Path
) -> None:
    """Pairs come in chunks of uneven size, with mask rows behind each as scratch; both forms."""
    whole = options.get("num_masks") == 3
    drafter = make_drafter(backbone, None if whole else TRIMMED, **({"top_k": 5} | options))
    model = drafter.export(backbone.config)["drafter"]
    check_graph(drafter, Runner(model, tmp_path / "contiguous", "contiguous", 64))
    check_graph(drafter, Runner(to_slots(model), tmp_path / "slots", "slots", 64))


def check_graph(drafter: Drafter, runner: Runner) -> None:
    K = drafter.config.num_masks
    batch = make_batch(drafter, (24,))
    assert batch.feature_BTF is not None
    _, best = drafter.guesses(batch, 5)
    every_id, every_log_prob = drafter.guesses(batch, len(drafter.draft_token_ids))
    token_T, feature_TF, t = batch.token_BT[0].numpy(), batch.feature_BTF[0].numpy(), 0
    for c in (7, 1, 3, 1, 6, 5):
        mask_ids = VOCAB + np.arange(K)
        if drafter.config.mask_reads_token:
            mask_ids = np.arange(1, K + 1) * VOCAB + token_T[t + c]
        rows = np.concatenate([token_T[t + 1 : t + 1 + c], mask_ids])
        more = {}
        if drafter.num_features:
            behind_KF = feature_TF[[t + c - 1] * K]
            if drafter.config.mask_feature == "zero":
                behind_KF = np.zeros_like(behind_KF)
            more["features"] = np.concatenate([feature_TF[t : t + c], behind_KF])[None]
        outputs = runner.step(
            rows, chain(c + K), ["guess_ids", "guess_log_probs"], range(c - 1, c + K), **more
        )
        runner.cache.commit(range(c))
        t += c
        got_ids, got = torch.from_numpy(outputs["guess_ids"]), outputs["guess_log_probs"]
        assert got.shape == (K + 1, 5)
        assert np.abs(got - best[0, t - 1].numpy()).max() <= TOLERANCE
        # the ids carry these probabilities in eager mode too (close ones may change places)
        table_KV = torch.full((K + 1, VOCAB), -torch.inf)
        table_KV.scatter_(1, every_id[0, t - 1], every_log_prob[0, t - 1])
        assert np.abs(table_KV.gather(1, got_ids).numpy() - got).max() <= TOLERANCE
        assert all(len(set(row)) == 5 for row in got_ids.tolist())


def test_what_the_proposer_is_told(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, taps=(1,), num_masks=3, top_k=7)
    assert drafter.runtime_config() == {
        "inputs": "features+tokens",
        "mask_feature": "zero",
        "num_masks": 3,
        "num_guesses": 4,
        "mask_token_base": VOCAB,
        "taps": [1],
        "style": "medusa",
        "top_k": 7,
    }
    other = make_drafter(backbone, mask_reads_token=True).runtime_config()
    assert other["mask_reads_token"] is True


# ---- config ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"style": "hydra"}, "got style 'hydra', expected one of medusa, eagle"),
        ({"mask_feature": "last"}, "got mask_feature 'last', expected one of zero, anchor"),
        ({"inputs": "features"}, "got inputs 'features', expected one of tokens"),
        ({"style": "eagle", "inputs": "tokens"}, "style 'eagle' regresses features"),
        ({"inputs": "tokens", "taps": (1,)}, "leave taps empty"),
        ({"num_masks": -1}, "expected num_masks >= 0"),
        ({"layers": 0}, "layers >= 1"),
        ({"top_k": 0}, "top_k >= 1"),
        ({"anchor_fraction": 0.0}, r"anchor_fraction must lie in \(0, 1\]"),
        ({"soft_weight": 1.5}, r"soft_weight in \[0, 1\]"),
        ({"loss": "kl"}, "got loss 'kl', expected one of ce, tv, lk"),
        ({"depth_weights": "flat"}, "got depth_weights 'flat', expected one of decay, reach"),
        ({"tv_weight": 1.5}, r"got tv_weight 1.5 .* in \[0, 1\]"),
        ({"depth_keep": 0.0}, r"depth_keep 0.0, expected .* in \(0, 1\]"),
        ({"prompt_weight": -1.0}, "got prompt_weight -1.0 .* expected neither negative"),
        ({"feature_noise": 0.1}, "got feature_noise 0.1 with style 'medusa', expected 0"),
    ],
)
def test_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
    assert dataclasses.replace(Config(), layers=2).layers == 2


def test_a_config_saved_before_these_fields_is_the_papers_form() -> None:
    """As the first shipped drafter's did."""
    saved = load_drafter(str(SHIPPED))
    added = {
        *("mask_reads_token", "loss", "tv_weight"),
        *("depth_weights", "prompt_weight", "depth_keep", "feature_noise"),
    }
    fields = {name: value for name, value in saved.config.items() if name not in added}
    config = build_config(Config, fields, "config.json")
    assert {name: getattr(config, name) for name in added} == {
        "mask_reads_token": False,
        "loss": "ce",
        "tv_weight": 0.9,
        "depth_weights": "decay",
        "prompt_weight": 0.0,
        "depth_keep": 1.0,
        "feature_noise": 0.0,
    }


def test_a_step_with_a_shortlist_learns_what_the_whole_vocabulary_teaches(
    backbone: Backbone,
) -> None:
    """The mean gradient of 300 steps with other shortlists points where the full one does, and the
    list has every token of the batch."""
    drafter = make_drafter(backbone, num_masks=2, soft_weight=0.5)
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
