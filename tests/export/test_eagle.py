"""EAGLE: the rows of a rollout by hand, losses by the formula, the exported graph along trees.

Tolerance between eager and ONNX Runtime: 1e-4 absolute on log-probabilities and features, both
float32 with other orders of summation (measures 3e-5 at most; a wrong row, feature or position
moves them by tenths).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import check_loss_and_gradient
from graphs import Runner
from tiny_backbone import HEAD_DIM, HEADS, VOCAB, backbone_of, tiny
from torch import Tensor
from torch.nn import functional as F

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters.eagle import Config, Drafter
from spec_export.drafters.layers import Batch, rotate
from spec_export.graphs.slots import to_slots

TOLERANCE = 1e-4
D = HEADS * HEAD_DIM
TRIMMED = torch.arange(1, VOCAB, 2)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"))


def make_drafter(backbone: Backbone, vocabulary: Tensor | None = None, **config: Any) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(Config(**config), target.ends(backbone), vocabulary)
    with torch.no_grad():  # so that every gain and bias matters
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return drafter


def make_batch(lengths: tuple[int, ...] = (8,), seed: int = 2) -> Batch:
    """Random tokens and features, every token an answer's."""
    torch.manual_seed(seed)
    B, T = len(lengths), max(lengths)
    length_B = torch.tensor(lengths)
    is_token_BT = torch.arange(T) < length_B[:, None]
    token_BT = torch.where(is_token_BT, torch.randint(VOCAB, (B, T)), 0)
    return Batch(token_BT, is_token_BT, torch.randn(B, T, D), length_B)


# ---- the module, literally ----


def row_input(drafter: Drafter, feature_D: Tensor, token: int) -> Tensor:
    embedding_D = drafter.embed_VD[token]
    if drafter.config.normalise:
        eps = drafter.dims.norm_eps
        feature_D = F.rms_norm(feature_D, (D,), drafter.input_norm[0], eps)
        embedding_D = F.rms_norm(embedding_D, (D,), drafter.input_norm[1], eps)
    return torch.cat([feature_D, embedding_D]) @ drafter.fc + drafter.fc_bias


def run_chain(drafter: Drafter, rows: Tensor) -> Tensor:
    """The layers over a plain causal sequence [R, D], one head at a time."""
    R, dims = len(rows), drafter.dims
    x = rows
    for layer in drafter.layers:
        q, k, v = layer.project_qkv(x)
        q = rotate(q, drafter.cos[:R], drafter.sin[:R])
        k = rotate(k, drafter.cos[:R], drafter.sin[:R])
        heads = []
        for h in range(dims.num_heads):
            g = h // (dims.num_heads // dims.num_kv_heads)
            score = q[:, h] @ k[:, g].T / dims.head_dim**0.5
            score = score.masked_fill(torch.ones(R, R).triu(1).bool(), -torch.inf)
            heads.append(score.softmax(-1) @ v[:, g])
        x = layer.finish(x, torch.cat(heads, -1))
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
def test_each_level_goes_on_from_the_one_before(
    backbone: Backbone, layers: int, normalise: bool
) -> None:
    drafter = make_drafter(backbone, layers=layers, normalise=normalise)
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


def test_guesses_are_the_heads_of_the_levels(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, TRIMMED, num_guesses=3)
    batch = make_batch((7,))
    ids, log_probs = drafter.guesses(batch, 4)
    assert ids.shape == log_probs.shape == (1, 6, 3, 4)
    with torch.no_grad():
        hidden = literal_rollout(drafter, batch, 0, 2, 3)
    q = torch.log_softmax(hidden @ drafter.head_VD.T, -1)
    torch.testing.assert_close(log_probs[0, 2], q.topk(4).values, rtol=0, atol=1e-5)
    assert ids[0, 2].tolist() == TRIMMED[q.topk(4).indices].tolist()


# ---- labels and losses ----


def test_counts_of_a_small_example(backbone: Backbone) -> None:
    """Answer at 3 … 7, token 5 outside the draft vocabulary; guess k of row t is t + 2 + k."""
    drafter = make_drafter(backbone, TRIMMED, ttt_steps=3)
    batch = make_batch()
    batch.token_BT[0] = torch.tensor([9, 9, 9, 11, 13, 12, 15, 17])
    batch.loss_BT[0] = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    assert drafter.loss(batch)[1]["count_K"].tolist() == [4, 4, 3]
    batch.loss_BT[0, 3] = False
    assert drafter.loss(batch)[1]["count_K"].tolist() == [3, 3, 3]
    batch.loss_BT[:] = False
    loss, counts = drafter.loss(batch)
    assert (loss.item(), counts["count_K"].tolist()) == (0.0, [0, 0, 0])


def reference_loss(drafter: Drafter, batch: Batch) -> tuple[Tensor, list[int], list[int]]:
    config = drafter.config
    assert batch.feature_BTF is not None
    correct_K, count_K = [0] * config.ttt_steps, [0] * config.ttt_steps
    total = torch.zeros(())
    for k in range(config.ttt_steps):
        losses, distances = [], []
        for b in range(len(batch.token_BT)):
            for t in range(int(batch.length_B[b]) - 2 - k):
                token = int(batch.token_BT[b, t + 2 + k])
                wanted = int(drafter.draft_index_V[token])
                if not batch.loss_BT[b, t + 2 + k]:
                    continue
                predicted = literal_rollout(drafter, batch, b, t, k + 1)[-1]
                feature = batch.feature_BTF[b, t + 1 + k]
                distances.append(F.smooth_l1_loss(predicted, feature))
                if wanted < 0:  # outside the draft vocabulary: a feature, and no label
                    continue
                log_q = torch.log_softmax(drafter.head_VD @ predicted, -1)
                p = torch.softmax(drafter.head_VD @ feature, -1)
                soft = config.soft_weight
                ce = -(1 - soft) * log_q[wanted] - soft * (p * log_q).sum()
                losses.append(ce)
                correct_K[k] += int(log_q.argmax() == wanted)
        count_K[k] = len(losses)
        assert len(distances) > len(losses) > 0
        both = config.w_reg * torch.stack(distances).mean()
        both = both + config.w_cls * torch.stack(losses).mean()
        total = total + config.decay**k * both
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
def test_the_loss_and_its_gradient_are_the_formulas(
    backbone: Backbone, options: dict[str, Any]
) -> None:
    vocabulary = torch.tensor([i for i in range(VOCAB) if i % 5])
    drafter = make_drafter(backbone, vocabulary, feature_noise=0.0, **options)
    batch = make_batch((10, 6))
    batch.loss_BT[0, :3] = False
    with torch.no_grad():  # make some guesses right
        ids, _ = drafter.guesses(batch, 1)
        batch.token_BT[0, 9] = ids[0, 7, 0, 0]
    check_loss_and_gradient(drafter, batch, reference_loss)


def test_noise_is_seeded_and_as_large_as_eagles(backbone: Backbone) -> None:
    """Uniform in ± 0.1 · 512 / length, on what is read; what is regressed stays clean."""
    drafter, batch = make_drafter(backbone), make_batch((40, 20))
    assert batch.feature_BTF is not None
    before = batch.feature_BTF.clone()
    losses = [drafter.loss(batch, torch.Generator().manual_seed(s))[0].item() for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(batch.feature_BTF, before)
    noise = drafter._noisy(before, batch, torch.Generator().manual_seed(0)) - before
    for b, length in ((0, 40), (1, 20)):
        half = 0.1 * 512 / length
        assert 0.98 * half < float(noise[b].abs().max()) <= half * 1.001
        assert abs(float(noise[b].mean())) < 0.05 * half
    clean = make_drafter(backbone, feature_noise=0.0)
    assert clean.loss(batch)[0].item() == clean.loss(batch, torch.Generator())[0].item()


def test_it_trains_under_autocast(backbone: Backbone) -> None:
    """A step down the gradient lowers the loss, in bf16 as in training."""
    drafter = make_drafter(backbone, feature_noise=0.0, ttt_steps=2, normalise=True)
    batch = make_batch((24, 16))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = drafter.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert loss.dtype == torch.float32


def test_only_its_own_weights_are_saved(backbone: Backbone) -> None:
    layer = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
    names = {"fc", "fc_bias", *(f"layers.0.{name}" for name in layer)}
    assert set(make_drafter(backbone).state_dict()) == names
    assert set(make_drafter(backbone, normalise=True).state_dict()) == names | {"input_norm"}


# ---- the exported graph ----


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize(
    ("options", "trimmed"),
    [({}, True), ({"normalise": True}, False), ({"layers": 2, "normalise": True}, True)],
)
def test_the_graph_guesses_as_the_module_does_along_a_tree(
    backbone: Backbone, options: dict[str, Any], trimmed: bool, form: str, tmp_path: Path
) -> None:
    """Committed pairs in chunks, behind each a random tree, level by level, of which nothing
    stays. Each node against the module's rollout along its own path."""
    drafter = make_drafter(
        backbone, TRIMMED if trimmed else None, **({"top_k": 5, "num_guesses": 4} | options)
    )
    model = drafter.export(backbone.config)["drafter"]
    runner = Runner(to_slots(model) if form == "slots" else model, tmp_path, form, 64)
    batch = make_batch((24,))
    assert batch.feature_BTF is not None
    token_T, feature_TD = batch.token_BT[0].numpy(), batch.feature_BTF[0].numpy()
    rng = np.random.default_rng(0)
    outputs, t = ["guess_ids", "guess_log_probs", "hidden"], 0
    for c in (5, 1, 3, 6):
        chain = np.maximum(np.arange(-1, c - 1), 0)
        rows, features = token_T[t + 1 : t + 1 + c], feature_TD[None, t : t + c]
        got = runner.step(rows, chain, outputs, [c - 1], features=features)
        runner.cache.commit(range(c))
        t += c
        check(drafter, batch, t - 1, [], got, 0)
        # two roots, then nodes below random ones of the level before
        tokens: list[int] = []
        parents: list[int] = []
        level, hidden = [-1], {-1: got["hidden"][0]}
        for width in (2, 3, 3):
            first = len(tokens)
            for _ in range(width):
                parent = int(rng.choice(level))
                parents.append(len(parents) if parent < 0 else parent)
                tokens.append(int(rng.integers(VOCAB)))
                hidden[len(tokens) - 1] = hidden[parent]  # its parent's, till it has its own
            feeds = runner.cache.place(np.array(parents), first)
            feeds["input_ids"] = np.array([tokens[first:]])
            feeds["features"] = np.stack([hidden[i] for i in range(first, len(tokens))])[None]
            feeds["logit_rows"] = np.arange(width)
            result = runner.backend.run(feeds, outputs)
            got = {name: array.copy() for name, array in result.items()}
            level = list(range(first, len(tokens)))
            for i in level:
                hidden[i] = got["hidden"][i - first]
                check(drafter, batch, t - 1, path_of(tokens, parents, i), got, i - first)


def path_of(tokens: list[int], parents: list[int], node: int) -> list[int]:
    above = [] if parents[node] == node else path_of(tokens, parents, parents[node])
    return [*above, tokens[node]]


def check(
    drafter: Drafter, batch: Batch, t: int, path: list[int], got: dict[str, np.ndarray], row: int
) -> None:
    """Row `row` of the graph's outputs against the module on the text that has `path` behind token
    t + 1."""
    assert batch.feature_BTF is not None
    token_T = torch.cat([batch.token_BT[0, : t + 2], torch.tensor(path, dtype=torch.int64)])
    T, k = len(token_T), len(path)
    feature = F.pad(batch.feature_BTF[:, : t + 1], (0, 0, 0, T - t - 1))
    text = Batch(token_T[None], torch.ones(1, T) > 0, feature, torch.tensor([T]))
    with torch.no_grad():
        hidden = drafter.rollout(text, feature, k + 1)[k][0, t]
    assert np.abs(got["hidden"][row] - hidden.numpy()).max() <= TOLERANCE
    log_q = torch.full((VOCAB,), -torch.inf)
    log_q[drafter.draft_token_ids] = torch.log_softmax(drafter.head_VD @ hidden, -1)
    log_probs, ids = got["guess_log_probs"][row], got["guess_ids"][row]
    assert np.abs(log_probs - log_q.topk(5).values.numpy()).max() <= TOLERANCE
    assert np.abs(log_q[ids].numpy() - log_probs).max() <= TOLERANCE
    assert len(set(ids.tolist())) == 5


def test_what_the_proposer_is_told(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, num_guesses=6, max_width=4, top_k=7)
    told = {"num_guesses": 6, "max_width": 4, "taps": [], "top_k": 7}
    assert drafter.runtime_config() == told


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"taps": (1,)}, "leave taps empty"),
        ({"layers": 0}, "got layers 0, expected at least 1"),
        ({"num_guesses": 0}, "got num_guesses 0"),
        ({"max_width": 0}, "got max_width 0"),
        ({"top_k": 0}, "got top_k 0"),
        ({"ttt_steps": 0}, "got ttt_steps 0"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5"),
        ({"feature_noise": -0.1}, "feature_noise -0.1, expected"),
    ],
)
def test_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
    assert dataclasses.replace(Config(), layers=2).layers == 2
