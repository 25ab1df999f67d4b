"""Medusa: the heads' loss by its formula, in chunks too; a bundle with another drafter."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import D, check_loss, cross_entropy, make_batch, make_drafter
from tiny_backbone import TRIMMED
from torch import Tensor
from torch.nn import functional as F
from workshop import Workshop

import spec_runtime
from spec_runtime.bundle import manifest as bundles


@pytest.mark.parametrize(
    "options",
    [
        {"heads": "shared"},
        {"heads": "own"},
        {"heads": "own", "soft_weight": 0.3, "num_layers": 2, "bias": True},
        {"heads": "shared", "soft_weight": 1.0, "decay": 0.5, "num_layers": 2},
    ],
)
def test_the_loss_and_its_gradient_are_the_formulas(options: dict[str, Any]) -> None:
    drafter = make_drafter("medusa", TRIMMED, num_heads=3, **options)
    config, soft = drafter.config, drafter.config.soft_weight

    def head(h_D: Tensor, k: int) -> Tensor:
        for block in drafter.blocks[k]:
            bias_D = block.bias if config.bias else 0
            h_D = F.silu(h_D @ block.weight + bias_D) + h_D
        return (drafter.output_heads[k] if config.heads == "own" else drafter.head_VD) @ h_D

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[list[Tensor]]:
        return [[head(feature_F[:D], k) for k in range(3)] for feature_F in feature_TF]

    weights = [config.decay**k for k in (1, 2, 3)]
    shares = [((1 - soft) * weight, soft * weight) for weight in weights]
    # a tap that others read follows the final feature
    check_loss(
        drafter, lambda batch: cross_entropy(drafter, batch, logits_of, shares), (14, 9), 2 * D
    )


def test_many_rows_go_through_a_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter("medusa", heads="own", soft_weight=0.3)
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


def test_a_bundle_feeds_each_drafter_its_own_taps(workshop: Workshop, tmp_path: Path) -> None:
    """Medusa reads only the final feature, the other drafter of the bundle a tap too, which its
    entry names as older bundles did."""
    both = tmp_path / "both"
    shutil.copytree(workshop.bundle("parallelspec"), both)
    own = bundles.read(workshop.bundle("medusa"))
    shutil.copytree(own.path / "drafters/medusa", both / "drafters/medusa")
    manifest = bundles.read(both).manifest
    assert (manifest.target.taps, own.manifest.target.taps) == ((1,), ())
    (older,) = manifest.drafters
    config = {key: value for key, value in older.config.items() if key != "features"}
    older = dataclasses.replace(older, config=config | {"taps": [1]})
    entries = (older, *own.manifest.drafters)
    bundles.write_manifest(both, dataclasses.replace(manifest, drafters=entries))

    engine = spec_runtime.load(both, "parallelspec", threads=1, lookup=False)
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    for name in ("medusa", "parallelspec", "medusa"):
        got = engine.with_drafter(name, lookup=False).generate("say abc, 3", **options)
        alone = spec_runtime.load(workshop.bundle(name), name, threads=1, lookup=False)
        expected = alone.generate("say abc, 3", **options)
        assert got.token_ids == expected.token_ids
        assert got.stats.drafted_tokens == expected.stats.drafted_tokens > 0
