"""Trains the two recipes of Medusa-2 for Vicuna, one after the other, on the tiny target."""

from pathlib import Path

import pytest

pytest.importorskip("peft")

from workshop import Workshop

from spec_export.training import checkpoint, recipe
from spec_export.training import run as train

VICUNA = recipe.SHIPPED / "vicuna-7b"


def test_the_two_recipes_for_vicuna_follow_each_other(workshop: Workshop, tmp_path: Path) -> None:
    """Two steps each, the second recipe from the heads of the first."""
    workshop.drafter("medusa")  # writes the rows
    settings = [f"data.path={workshop.folder}/data.jsonl", f"target.model={workshop.llama()}"]
    settings += ["drafter.top_k=5", "data.validation_fraction=0.2", "train.max_steps=2"]
    heads = train.run(VICUNA / "medusa2_heads.toml", settings, tmp_path / "heads")
    joint = train.run(VICUNA / "medusa2.toml", settings, tmp_path / "joint", init=heads)
    first, second = (recipe.load(VICUNA / f"{name}.toml") for name in ("medusa2_heads", "medusa2"))
    assert first.drafter == second.drafter
    assert second.joint is not None
    assert second.train.lr == 4 * second.joint.backbone_lr  # the paper's ratio
    assert checkpoint.load_drafter(joint).provenance["init"]["earlier"]["steps"] == 2
    assert (tmp_path / "joint" / "target" / "config.json").is_file()
