"""Medusa: the heads' loss by its formula, what is trained, the graph; every recipe.

Tolerance between eager and ONNX Runtime: 1e-4 absolute on log-probabilities, both float32 with
other orders of summation (measures about 1e-6).
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import check_loss_and_gradient, make_batch
from graphs import open_model
from this_cpu import SATURATES
from tiny_backbone import HEAD_DIM, HEADS, TRIMMED, VOCAB, backbone_of, tiny
from torch import Tensor
from torch.nn import functional as F
from workshop import Workshop

import spec_runtime
from spec_export import drafters, target
from spec_export.decoder import Backbone
from spec_export.drafters.layers import Batch
from spec_export.drafters.medusa import Config, Drafter
from spec_export.graphs.quantize import quantize
from spec_export.training import recipe
from spec_runtime.backends.cpu import CpuBackend
from spec_runtime.bundle import manifest as bundles

TOLERANCE = 1e-4
D = HEADS * HEAD_DIM
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"))


def make_drafter(backbone: Backbone, vocabulary: Tensor | None = None, **config: Any) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(Config(**config), target.ends(backbone), vocabulary)
    with torch.no_grad():  # so that every weight matters
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return drafter


# ---- loss ----


def test_an_untrained_head_is_the_targets_own(backbone: Backbone) -> None:
    """Zero blocks leave h_t, so that every head still guesses what the target's reads there."""
    batch = make_batch()
    assert batch.feature_BTF is not None
    expected = torch.log_softmax(batch.feature_BTF[0, :-1] @ backbone.head.weight.T, -1)
    for heads in ("own", "shared"):
        drafter = Drafter(Config(num_heads=3, heads=heads), target.ends(backbone))
        ids, log_probs = drafter.guesses(batch, 4)
        for k in range(3):
            assert torch.equal(ids[0, :, k], expected.topk(4).indices)
            torch.testing.assert_close(log_probs[0, :, k], expected.topk(4).values)


def head_log_probs(drafter: Drafter, feature_D: Tensor, k: int) -> Tensor:
    """log p^(k+1) over the draft vocabulary, block by block."""
    h = feature_D
    for block in drafter.blocks[k]:  # type: ignore[attr-defined]
        h = F.silu(h @ block.weight) + h
    head_VD = drafter.output_heads[k] if drafter.output_heads else drafter.head_VD
    return torch.log_softmax(head_VD @ h, -1)


def reference_loss(drafter: Drafter, batch: Batch) -> tuple[Tensor, list[int], list[int]]:
    """Σ_k λ_k · mean_t of head k's loss, token by token; also correct_K and count_K."""
    config, ids = drafter.config, drafter.draft_token_ids.tolist()
    assert batch.feature_BTF is not None
    total, correct_K, count_K = torch.zeros(()), [], []
    for k in range(1, config.num_heads + 1):
        losses, correct = [], 0
        for b, length in enumerate(batch.length_B.tolist()):
            for t in range(length - k - 1):
                token = int(batch.token_BT[b, t + k + 1])
                if not batch.loss_BT[b, t + k + 1] or token not in ids:
                    continue
                log_p_V = head_log_probs(drafter, batch.feature_BTF[b, t, :D], k - 1)
                # what the target itself says of token t + k + 1, at position t + k
                soft_V = torch.softmax(drafter.head_VD @ batch.feature_BTF[b, t + k, :D], -1)
                hard = -log_p_V[ids.index(token)]
                soft = -(soft_V * log_p_V).sum()
                losses.append((1 - config.soft_weight) * hard + config.soft_weight * soft)
                correct += int(log_p_V.argmax() == ids.index(token))
        total = total + config.decay**k * torch.stack(losses).mean()
        correct_K.append(correct)
        count_K.append(len(losses))
    return total, correct_K, count_K


@pytest.mark.parametrize(
    "options",
    [
        {"heads": "shared"},
        {"heads": "own"},
        {"heads": "own", "soft_weight": 0.3, "num_layers": 2},
        {"heads": "shared", "soft_weight": 1.0, "decay": 0.5, "num_layers": 2},
    ],
)
def test_the_loss_and_its_gradient_are_the_formulas(
    backbone: Backbone, options: dict[str, Any]
) -> None:
    drafter = make_drafter(backbone, TRIMMED, num_heads=3, **options)
    batch = make_batch((14, 9), width=2 * D)  # a tap that others read lies behind
    batch.loss_BT[0, :5] = False
    ids, _ = drafter.guesses(batch, 1)
    batch.token_BT[0, 12] = ids[0, 10, 0, 0]  # make a guess right
    check_loss_and_gradient(drafter, batch, reference_loss)


def test_many_rows_go_through_a_head_in_chunks(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(backbone, heads="own", soft_weight=0.3)
    batch = make_batch((40,))
    results = []
    for rows in (1000, 1):  # chunks of four times as many
        monkeypatch.setattr("spec_export.drafters.losses.CHUNK_ROWS", rows)
        drafter.zero_grad()
        loss, counts = drafter.loss(batch)
        loss.backward()
        results.append((loss.detach(), counts["correct_K"], drafter.output_heads[0].grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", ["own", "shared"])
def test_a_batch_without_labels_moves_nothing(backbone: Backbone, heads: str) -> None:
    """Every parameter has a gradient all the same, which distributed training waits for."""
    drafter = make_drafter(backbone, heads=heads)
    batch = make_batch()
    batch.loss_BT[:] = False
    loss, counts = drafter.loss(batch)
    loss.backward()
    assert loss.item() == counts["count_K"].sum() == 0
    for parameter in drafter.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("heads", ["own", "shared"])
def test_bf16_autocast_is_near_float32(backbone: Backbone, heads: str) -> None:
    drafter, batch = make_drafter(backbone, heads=heads, soft_weight=0.5), make_batch((20,))
    assert batch.feature_BTF is not None
    exact, _ = drafter.loss(batch)
    rounded = dataclasses.replace(batch, feature_BTF=batch.feature_BTF.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = drafter.loss(rounded)
    loss.backward()
    assert abs(loss.item() / exact.item() - 1) < 0.02
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())


def test_what_is_saved(backbone: Backbone) -> None:
    blocks = {f"blocks.{k}.{layer}.weight" for k in range(2) for layer in range(2)}
    shared = make_drafter(backbone, num_heads=2, num_layers=2)
    assert set(shared.state_dict()) == blocks
    own = make_drafter(backbone, num_heads=2, num_layers=2, heads="own")
    assert set(own.state_dict()) == blocks | {"output_heads.0", "output_heads.1"}


# ---- the exported graph ----


def check_graph(drafter: Drafter, backend: CpuBackend, tolerance: float) -> None:
    batch = make_batch((9,))
    assert batch.feature_BTF is not None
    ids, log_probs = drafter.guesses(batch, len(drafter.draft_token_ids))
    K = drafter.config.num_heads
    for t in range(8):
        feeds = {"features": batch.feature_BTF[0, t : t + 1].numpy()}
        out = backend.run(feeds, ["guess_ids", "guess_log_probs"])
        got = out["guess_log_probs"]
        assert got.shape == out["guess_ids"].shape == (K, 5)
        assert np.abs(got - log_probs[0, t, :, :5].numpy()).max() <= tolerance
        # the ids carry these probabilities in eager mode too (close ones may change places)
        table_KV = torch.full((K, VOCAB), -torch.inf).scatter_(1, ids[0, t], log_probs[0, t])
        theirs = table_KV.gather(1, torch.from_numpy(out["guess_ids"])).numpy()
        assert np.abs(theirs - got).max() <= tolerance


# rounding measures 0.02 in int8 and 0.2 in int4; a wrong row moves them by several
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", TOLERANCE), ("int8", 0.1), ("int4", 1.0)]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"heads": "own", "num_layers": 2, "num_heads": 3}, {"num_heads": 1}],
    ids=["shared", "own", "one head"],
)
def test_the_graph_guesses_as_the_module_does(
    backbone: Backbone, options: dict[str, Any], precision: str, tolerance: float, tmp_path: Path
) -> None:
    drafter = make_drafter(backbone, TRIMMED, top_k=5, **options)
    model = drafter.export(backbone.config)["drafter"]
    products = sum(node.op_type in ("MatMul", "Gemm") for node in model.graph)
    config = drafter.config
    num_heads = config.num_heads if config.heads == "own" else 1
    assert products == config.num_heads * config.num_layers + num_heads
    quantize(model, precision, SATURATES)
    check_graph(drafter, open_model(model, tmp_path, "stateless", 1), tolerance)


def test_what_the_manifest_says(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, num_heads=3, top_k=7)
    assert drafter.runtime_config() == {"num_guesses": 3, "taps": [], "top_k": 7}


# ---- config and recipes ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": "tied"}, "got heads 'tied', expected one of own, shared"),
        ({"taps": (1,)}, r"got taps \[1\], expected none"),
        ({"num_heads": 0}, "got num_heads 0, num_layers 1, top_k 10, expected at least 1"),
        ({"num_layers": 0}, "got num_heads 4, num_layers 0"),
        ({"top_k": 0}, "top_k 0, expected at least 1 of each"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5, expected a number in"),
    ],
)
def test_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=f"{p.parent.name}/{p.stem}") for p in RECIPES.rglob("*.toml")]
)
def test_every_recipe_can_be_built(path: Path) -> None:
    plan = recipe.load(path, [])
    definition = drafters.load(plan.drafter_name)
    config = recipe.build_config(definition.Config, plan.drafter_fields, str(path))
    assert config.top_k >= 1


# ---- beside another drafter ----


def test_a_bundle_feeds_each_drafter_its_own_taps(workshop: Workshop, tmp_path: Path) -> None:
    """Medusa reads the final feature alone, the other drafter of the bundle a tap too."""
    both = tmp_path / "both"
    shutil.copytree(workshop.bundle("parallelspec"), both)
    own = bundles.read(workshop.bundle("medusa"))
    shutil.copytree(own.path / "drafters/medusa", both / "drafters/medusa")
    manifest = bundles.read(both).manifest
    assert (manifest.target.taps, own.manifest.target.taps) == ((1,), ())
    entries = (*manifest.drafters, *own.manifest.drafters)
    bundles.write_manifest(both, dataclasses.replace(manifest, drafters=entries))

    engine = spec_runtime.load(both, "parallelspec", threads=1, lookup=False)
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    for name in ("medusa", "parallelspec", "medusa"):
        got = engine.with_drafter(name, lookup=False).generate("say abc, 3", **options)
        alone = spec_runtime.load(workshop.bundle(name), name, threads=1, lookup=False)
        expected = alone.generate("say abc, 3", **options)
        assert got.token_ids == expected.token_ids
        assert got.stats.drafted_tokens == expected.stats.drafted_tokens > 0
