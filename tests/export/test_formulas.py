"""Each drafter's loss, counts and gradient against its paper's formula, written out token by token.

The forward passes of EAGLE-3 and P-EAGLE are in published_eagle3.py; PARD's model is transformers'.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from formulas import (
    VARIANTS,
    D,
    Reference,
    attend,
    backbone,
    check_loss,
    cross_entropy,
    decoder_layer,
    features_of,
    make_batch,
    make_drafter,
    rms,
    width_of,
)
from published_eagle3 import Published
from tiny_backbone import TRIMMED
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters import semi_autoregressive
from spec_export.drafters.layers import Batch


def shares_of(config: Any, weights: Sequence[float]) -> list[tuple[float, float]]:
    """Returns the weights of hard and soft labels of each guess."""
    soft = config.soft_weight
    return [((1 - soft) * weight, soft * weight) for weight in weights]


def decayed(config: Any, count: int, first: int = 0) -> list[tuple[float, float]]:
    return shares_of(config, [config.decay**k for k in range(first, first + count)])


# ---- heads on a row ----


def medusa(drafter: Any, batch: Batch) -> Reference:
    config = drafter.config

    def head(h_D: Tensor, k: int) -> Tensor:
        for block in drafter.blocks[k]:
            h_D = F.silu(h_D @ block.weight + (block.bias if config.bias else 0)) + h_D
        return (drafter.output_heads[k] if config.heads == "own" else drafter.head_VD) @ h_D

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[list[Tensor]]:
        return [[head(row[:D], k) for k in range(config.num_heads)] for row in feature_TF]

    return cross_entropy(drafter, batch, logits_of, decayed(config, config.num_heads, 1))


def mutual_attention(drafter: Any, layer: Any, x_KD: Tensor) -> Tensor:
    """Every one of the K rows attends all K."""
    H, Dh = drafter.dims.num_heads, drafter.dims.head_dim
    q, k, v = (rms(x_KD) * layer.norm @ layer.qkv).split(H * Dh, -1)
    mixed = []
    for head in range(H):
        part = slice(head * Dh, (head + 1) * Dh)
        mixed.append(torch.softmax(q[:, part] @ k[:, part].T * Dh**-0.5, -1) @ v[:, part])
    return x_KD + torch.cat(mixed, -1) @ layer.out


def amphista_rows(drafter: Any, token_T: Tensor, feature_TF: Tensor) -> list[Tensor]:
    """What the output heads read, [K, D] of each row of one sequence."""
    config, K, R = drafter.config, drafter.config.num_heads, len(token_T) - 1
    stages, chunks = [feature_TF[:R, :D]], list(feature_TF[:R, : width_of(drafter)].split(D, -1))
    for mixer, layer, gain in zip(drafter.mixers, drafter.layers, drafter.final_norms, strict=True):
        if config.sampled_token:
            chunks.append(drafter.embed_VD[token_T[1:]])
        normed = [rms(chunk) * own for chunk, own in zip(chunks, mixer.norms, strict=True)]
        chunks = [decoder_layer(drafter, layer, torch.cat(normed, -1) @ mixer.fc, range(R))]
        stages.append(rms(chunks[0]) * gain)
    rows = []
    for t in range(R):
        group = []
        for k in range(1, K + 1):
            of_two = 1 if k <= K // 2 else 2
            h = stages[{"none": 0, "one": 1, "two": of_two}[config.staged]][t]
            group.append(F.silu(h @ drafter.blocks[k - 1][0].weight) + h)
        x_KD = torch.stack(group)
        if config.auto_embedding:
            if config.position_table:
                x_KD = x_KD + drafter.position_table
            for layer in drafter.attention:
                x_KD = mutual_attention(drafter, layer, x_KD)
        rows.append(x_KD)
    return rows


def amphista(drafter: Any, batch: Batch) -> Reference:
    config = drafter.config
    heads = drafter.output_heads or [drafter.head_VD] * config.num_heads

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[list[Tensor]]:
        rows = amphista_rows(drafter, token_T, feature_TF)
        return [[head @ row for head, row in zip(heads, x_KD, strict=True)] for x_KD in rows]

    shares = [(config.lambda_hard, config.lambda_soft)] * config.num_heads
    return cross_entropy(drafter, batch, logits_of, shares)


# ---- level by level along the true tokens ----


def paths(
    logits: Callable[[Any, Tensor, list[int]], Tensor], drafter: Any, batch: Batch
) -> Reference:
    """`logits` takes the features of the first t + 1 positions and the path's tokens, and returns
    those of the next guess."""
    K = drafter.config.num_guesses

    def logits_of(token_T: Tensor, feature_TD: Tensor) -> list[list[Tensor]]:
        tokens, T = token_T.tolist(), len(token_T)
        return [
            [
                logits(drafter, feature_TD[: t + 1], tokens[t + 1 : t + 2 + k])
                for k in range(min(K, T - 2 - t))
            ]
            for t in range(T - 2)
        ]

    return cross_entropy(drafter, batch, logits_of, shares_of(drafter.config, [1] * K))


def hydra(drafter: Any, feature_TD: Tensor, path: list[int]) -> Tensor:
    h = rms(feature_TD)
    if drafter.config.prefix_layer:
        h = rms(decoder_layer(drafter, drafter.prefix, h, range(len(h))))
    chunks = torch.cat([h[-1], *(rms(drafter.embed_VD[token]) for token in path)])
    head = drafter.heads[len(path) - 1]
    z = chunks @ head.first[:, :D] + F.silu(chunks @ head.first[:, D:])
    assert len(head.layers) == drafter.config.num_layers - 1
    for weight in head.layers:
        y = z @ weight
        z = z + y * torch.sigmoid(y)
    return drafter.head_VD @ (rms(z) * head.norm)


def redrafter(drafter: Any, feature_TD: Tensor, path: list[int]) -> Tensor:
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


def h_q_of(drafter: Any, path: list[int]) -> Tensor:
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


def semi(drafter: Any, feature_TD: Tensor, path: list[int]) -> Tensor:
    row = F.silu(
        torch.cat((rms(feature_TD[-1]) @ drafter.w_p, h_q_of(drafter, path) @ drafter.w_q))
    )
    if drafter.config.head == "own":
        return drafter.w3 @ row + drafter.b3
    return drafter.head_VD @ (rms(row @ drafter.w3) * drafter.norm)


# ---- on from their own predictions ----


def rollout(drafter: Any, token_T: Tensor, feature_TD: Tensor, t: int, levels: int) -> Tensor:
    """EAGLE's predicted features [K, D] behind row t: a chain of real rows 0 … t, then its own."""
    config, eps = drafter.config, drafter.dims.norm_eps

    def row(feature_D: Tensor, token: int) -> Tensor:
        pair = [feature_D, drafter.embed_VD[token]]
        if config.normalise:
            pair = [rms(x, eps) * drafter.input_norm[i] for i, x in enumerate(pair)]
        return torch.cat(pair) @ drafter.fc + drafter.fc_bias

    tokens = token_T.tolist()
    rows = [row(feature_TD[i], tokens[i + 1]) for i in range(t + 1)]
    predicted: list[Tensor] = []
    for level in range(levels):
        if level:
            rows.append(row(predicted[-1], tokens[t + 1 + level]))
        x = torch.stack(rows)
        for layer in drafter.layers:
            x = decoder_layer(drafter, layer, x, range(len(x)))
        predicted.append(x[-1])
    return torch.stack(predicted)


def eagle(drafter: Any, batch: Batch) -> Reference:
    """Adds the regression, which counts tokens outside the draft vocabulary too, to the CE."""
    c = drafter.config

    def logits_of(token_T: Tensor, feature_TD: Tensor) -> list[Tensor]:
        T = len(token_T)
        return [
            rollout(drafter, token_T, feature_TD, t, min(c.ttt_steps, T - 2 - t))
            @ drafter.head_VD.T
            for t in range(T - 2)
        ]

    shares = shares_of(c, [c.w_cls * c.decay**k for k in range(c.ttt_steps)])
    total, correct_K, count_K = cross_entropy(drafter, batch, logits_of, shares)
    distances: list[list[Tensor]] = [[] for _ in range(c.ttt_steps)]
    for b, length in enumerate(batch.length_B.tolist()):
        token_T, feature_TD = batch.token_BT[b, :length], features_of(batch)[b, :length]
        for t in range(length - 2):
            levels = rollout(drafter, token_T, feature_TD, t, min(c.ttt_steps, length - 2 - t))
            for k, predicted_D in enumerate(levels):
                if batch.loss_BT[b, t + 2 + k]:
                    distances[k].append(F.smooth_l1_loss(predicted_D, feature_TD[t + 1 + k]))
    for k, of_level in enumerate(distances):
        assert len(of_level) > count_K[k] > 0
        total = total + c.w_reg * c.decay**k * torch.stack(of_level).mean()
    return total, correct_K, count_K


def eagle3(drafter: Any, batch: Batch) -> Reference:
    config = drafter.config
    published = Published(drafter, backbone().config.rope["rope_theta"])  # weights with gradients

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[list[Tensor]]:
        fused_TD, tokens, T = published.fused_of(feature_TF), token_T.tolist(), len(token_T)
        levels = [
            published.levels(fused_TD[: t + 1], tokens, min(config.ttt_steps, T - 2 - t))
            for t in range(T - 2)
        ]
        return [[published.log_q(row) for row in rows] for rows in levels]

    return cross_entropy(drafter, batch, logits_of, decayed(config, config.ttt_steps))


def peagle(drafter: Any, batch: Batch) -> Reference:
    config = drafter.config
    published = Published(drafter, backbone().config.rope["rope_theta"])

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[Tensor]:
        fused_TD, tokens = published.fused_of(feature_TF), token_T.tolist()
        groups = [
            published.group(fused_TD[: t + 1], tokens, config.num_masks)
            for t in range(len(tokens) - 2)
        ]
        return [published.log_q(group) for group in groups]

    return cross_entropy(drafter, batch, logits_of, decayed(config, config.num_guesses))


# ---- language models ----


def pard(drafter: Any, batch: Batch) -> Reference:
    config = drafter.config

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[Tensor]:
        masks = token_T.new_full((config.num_masks,), config.mask_token_id)
        texts = [torch.cat((token_T[: t + 2], masks)) for t in range(len(token_T) - 2)]
        return [
            drafter.model(input_ids=ids[None]).logits[0, t + 1 :, TRIMMED]
            for t, ids in enumerate(texts)
        ]

    return cross_entropy(drafter, batch, logits_of, decayed(config, config.num_guesses))


def draft_model(drafter: Any, batch: Batch) -> Reference:
    def logits_of(token_T: Tensor, feature_TD: Tensor) -> list[list[Tensor]]:
        hidden_RD = drafter.hidden_rows(token_T[None])[0, 1:]
        return [[drafter.head_VD @ drafter.output_rows(hidden_D)] for hidden_D in hidden_RD]

    shares, prompt_weight = shares_of(drafter.config, [1]), drafter.config.prompt_weight
    loss, correct_K, count_K = cross_entropy(drafter, batch, logits_of, shares)
    if prompt_weight:
        prompt = dataclasses.replace(batch, loss_BT=~batch.loss_BT)
        loss = loss + prompt_weight * cross_entropy(drafter, prompt, logits_of, shares)[0]
    return loss, correct_K, count_K


# ---- parallel groups ----


def parallelspec(drafter: Any, batch: Batch) -> Reference:
    """The loss of one sequence, guess by guess."""
    config, K = drafter.config, drafter.config.num_masks
    ids = drafter.draft_token_ids.tolist()
    tokens, answer = batch.token_BT[0].tolist(), batch.loss_BT[0].tolist()
    label = [ids.index(x) if x in ids else None for x in tokens]
    real, masks = drafter.hidden_rows(batch, torch.arange(len(tokens) - 1)[None])
    rows = drafter.output_rows(torch.cat((real[0, :, None], masks[0]), dim=1))  # [R, K+1, D]
    total, correct_K, count_K = torch.zeros(()), [0] * (K + 1), [0] * (K + 1)
    reach_R = [1.0] * len(tokens)
    for k in range(K + 1):
        losses, distances = [], []
        for t in range(len(tokens) - 2 - k):
            own, first, decay = label[t + 2 + k], label[t + 2], config.decay**k
            may_train = answer[t + 2] and (first is not None or config.style == "eagle")
            reach, reach_R[t] = reach_R[t], 0.0
            lambda_k = reach if config.depth_weights == "reach" else decay
            if config.style == "eagle" and config.depth_weights == "decay":
                lambda_k = 1.0
            if not may_train or not answer[t + 2 + k]:
                continue
            feature_D = features_of(batch)[0, t + 1 + k, :D]
            distances.append(lambda_k * F.smooth_l1_loss(rows[t, k], feature_D))
            if own is None:
                continue
            log_q_V = torch.log_softmax(rows[t, k] @ drafter.head_VD.T, -1)
            p_V = torch.softmax(feature_D @ drafter.head_VD.T, -1)
            soft = config.soft_weight
            loss = -(1 - soft) * log_q_V[own] - soft * (p_V * log_q_V).sum()
            losses.append(lambda_k * loss)
            reach_R[t] = reach * log_q_V[own].exp().item()
            correct_K[k] += int(log_q_V.argmax() == own)
            count_K[k] += 1
        part = torch.stack(losses).mean()
        if config.style == "eagle":
            part = config.w_cls * part + config.w_reg * torch.stack(distances).mean()
        total = total + part
    return total, correct_K, count_K


# ---- the table ----

FORMULAS: dict[str, Callable[[Any, Batch], Reference]] = {
    **{"amphista": amphista, "draft_model": draft_model, "eagle": eagle, "eagle3": eagle3},
    **{"hydra": partial(paths, hydra), "medusa": medusa, "pard": pard, "peagle": peagle},
    **{"parallelspec": parallelspec, "redrafter": partial(paths, redrafter)},
    "semi_autoregressive": partial(paths, semi),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "amphista": [
        {"lambda_soft": s, "lambda_hard": h} | each
        for each in VARIANTS["amphista"].values()
        for s, h in ((1.0, 1.0), (0.3, 2.0))
    ],
    "draft_model": [
        *({}, {"prompt_weight": 0.3}, {"soft_weight": 0.5}, {"layers": 1, "num_kv_heads": 3})
    ],
    "eagle": [
        *({}, {"normalise": True, "w_reg": 0.7, "w_cls": 0.2}, {"soft_weight": 0.25, "layers": 2}),
        {"ttt_steps": 3, "decay": 0.5},
    ],
    "eagle3": [
        {"ttt_steps": 3, "taps": (2, 0, 3)} | each
        for each in (
            {},
            {"soft_weight": 0.25, "decay": 0.5, "norm_before_fc": True}
            | {"norm_before_residual": True},
            {"fc_norm": True, "norm_output": True, "qk_norms": True, "own_embedding": True}
            | {"layers": 2},
            {"sliding_layers": (0,), "window": 2},
        )
    ],
    "hydra": [*VARIANTS["hydra"].values()],
    "medusa": [
        {"num_heads": 3} | each
        for each in (
            *({"heads": "shared"}, {"heads": "own"}),
            {"heads": "own", "soft_weight": 0.3, "num_layers": 2, "bias": True},
            {"heads": "shared", "soft_weight": 1.0, "decay": 0.5, "num_layers": 2},
        )
    ],
    "pard": [
        {"num_masks": 2, "anchor_fraction": 1.0} | each
        for each in ({"num_masks": 0}, {"soft_weight": 0.3, "decay": 0.7})
    ],
    "parallelspec": [
        {"num_masks": 2} | each
        for each in (
            *({}, {"soft_weight": 0.5, "taps": (1,)}, {"inputs": "tokens", "decay": 0.5}),
            {"style": "eagle", "w_reg": 0.7, "w_cls": 0.2},
            {"style": "eagle", "soft_weight": 1.0, "num_masks": 0},
            {"mask_feature": "anchor", "depth_weights": "reach", "num_masks": 3},
            {"depth_weights": "reach", "style": "eagle", "w_cls": 1.0},
        )
    ],
    "peagle": [
        {"mask_token_id": 7, "taps": (2, 0, 3)} | each
        for each in (
            {"num_masks": 2},
            {"num_masks": 3, "soft_weight": 0.25, "decay": 0.5, "norm_before_fc": True},
            {"num_masks": 1, "fc_norm": True, "own_embedding": True, "layers": 2},
            {"num_masks": 2, "layers": 2, "sliding_layers": (0,), "window": 3},
        )
    ],
    "redrafter": [*VARIANTS["redrafter"].values()],
    "semi_autoregressive": [*VARIANTS["semi_autoregressive"].values()],
}


# Whose gradients are sums of few terms.
SHORT = ("draft_model", "hydra", "medusa", "redrafter", "semi_autoregressive")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}: {options}")
        for name, cases in OPTIONS.items()
        for options in cases
    ],
)
def test_the_loss_and_its_gradient_are_the_formulas(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features that others read follow the final one of heads on a row."""
    monkeypatch.setattr("spec_export.drafters.losses.CHUNK_ROWS", 5)
    drafter = make_drafter(name, TRIMMED, **options)
    lengths = (14,) if name == "parallelspec" else (14, 9) if name == "medusa" else (12, 6)
    width = 3 * D if name in ("medusa", "amphista") else None
    empty = ("mask_embed",) if options.get("num_masks") == 0 and name == "parallelspec" else ()
    atol = 1e-5 if name in SHORT else 1e-4
    check_loss(drafter, partial(FORMULAS[name], drafter), lengths, width, atol, empty)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_each_level_of_eagle_goes_on_from_the_one_before(layers: int, normalise: bool) -> None:
    drafter = make_drafter("eagle", TRIMMED, layers=layers, normalise=normalise, num_guesses=3)
    batch = make_batch((9, 7))
    with torch.no_grad():
        levels = drafter.rollout(batch, features_of(batch), 4)
        for b, length in ((0, 9), (1, 7)):
            for t in range(length - 1):
                K = min(4, length - 1 - t)  # while there are tokens to read
                expected = rollout(drafter, batch.token_BT[b], features_of(batch)[b], t, K)
                got = torch.stack([level[b, t] for level in levels[:K]])
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
        ids, log_probs = drafter.guesses(batch, 4)
        hidden = rollout(drafter, batch.token_BT[1], features_of(batch)[1], 2, 3)
        best = torch.log_softmax(hidden @ drafter.head_VD.T, -1).topk(4)
    assert ids.shape == log_probs.shape == (2, 8, 3, 4)
    torch.testing.assert_close(log_probs[1, 2], best.values, rtol=0, atol=2e-5)
    assert ids[1, 2].tolist() == TRIMMED[best.indices].tolist()
