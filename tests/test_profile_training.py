"""The parts of a training step: each is found, and they make up the whole."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from formulas import make_batch
from profile_training import PARTS, Cost, Steps
from tiny_backbone import backbone_of, tiny

from spec_export import target
from spec_export.drafters.parallelspec import Config, Drafter


@pytest.mark.parametrize("soft_weight", [0.5, 0.0])
def test_every_part_of_a_step_is_found(soft_weight: float) -> None:
    torch.manual_seed(1)
    config = Config(num_masks=2, soft_weight=soft_weight, mask_feature="anchor")
    drafter = Drafter(config, target.ends(backbone_of(tiny("llama"))))
    batch = make_batch((20, 10))
    before = drafter.fc.detach().clone()
    cost = Steps(drafter, lambda number: batch, is_bf16=True).cost(2)
    assert cost.tokens == 2 * 30
    assert not torch.equal(drafter.fc, before)
    assert tuple(cost.part_seconds) == PARTS
    empty = [part for part, seconds in cost.part_seconds.items() if seconds <= 0]
    assert empty == ([] if soft_weight else ["soft labels"])


def test_the_report_has_shares_and_rates() -> None:
    cost = Cost(1000, 2.0, 1.5, dict.fromkeys(PARTS, 1.0) | {"head": 5.0})
    lines = cost.lines()
    assert lines[1].split() == ["head", "5.00", "s", "50.0%"]
    assert lines[-1] == "500 answer tokens/s, 1.50 CPU seconds per 1,000"
