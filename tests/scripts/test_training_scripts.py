"""Runs each script of tools/training once on tiny targets and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from workshop import Workshop

from spec_export import drafters
from spec_export.training import recipe
from spec_export.training import run as train
from spec_export.training.batches import epoch_batches
from spec_export.training.features import FeatureCache
from spec_runtime.errors import UserError
from tools.training import ablations

DRAFTER = "parallelspec"


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- training for tables


def never(*arguments: Any, **options: Any) -> None:
    raise AssertionError("trained again")


def test_a_study_trains_each_variant_once_on_equal_rows(
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workshop.drafter(DRAFTER)  # writes the rows
    variants = {f"masks {k}": (f"drafter.num_masks={k}",) for k in (1, 3)}
    variants["wrong"] = ("drafter.num_masks=-1",)
    monkeypatch.setitem(ablations.STUDIES, "num_masks", ablations.Study(Path("x"), variants))
    file = workshop.folder / "tiny.toml"  # beside its target
    file.write_text(workshop.recipe(DRAFTER, "top_k = 5"))
    given = {"data": workshop.folder / "data.jsonl", "cache": tmp_path / "cache", "recipe": file}
    given |= {"out": tmp_path / "out", "json": tmp_path / "results" / "a.json"}
    words = ["num_masks", *(w for name, path in given.items() for w in (f"--{name}", str(path)))]
    words += ["--set", "drafter.taps=[1]"]

    right = ["--only", "masks 1", "masks 3", "--token-rows"]
    assert ablations.main([*words, *right, "600"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(given["json"].read_text())
    cache = FeatureCache(given["cache"])
    num_batches = len(epoch_batches(cache.length_N, 512, 0, 0))
    budget = {"token_rows": 600, "rows_per_step": cache.loss_T.sum() / num_batches}
    one, three = found["variants"]
    assert one["budget"] == three["budget"] == budget
    assert one["steps"] == round(600 / budget["rows_per_step"]) > 1
    assert [len(row["top1_K"]) for row in (one, three)] == [2, 4]
    assert three["parameters"] - one["parameters"] == 2 * 64, "a mask is one vector of the width"
    assert one["token_rows"] == one["steps"] * budget["rows_per_step"]
    assert "| masks 3 |" in shown

    assert ablations.main([*words, "--only", "wrong", "--steps", "2"]) == 1, "it cannot be trained"
    monkeypatch.setattr(train, "run", never)
    assert ablations.main([*words, *right, "600"]) == 0
    assert capsys.readouterr().out.endswith(shown)
    for other, message in (
        ([*right, "700"], "holds runs of 600 token rows, got 700"),
        (["--only", "masks 1", "--steps", "4"], "holds a run with other settings"),
    ):
        assert ablations.main([*words, *other]) == 1
        assert message in json.loads(given["json"].read_text())["variants"][0]["error"]


@pytest.mark.parametrize("study", ablations.STUDIES)
def test_every_variant_is_another_drafter(study: str) -> None:
    asked = ablations.STUDIES[study]
    configs = set()
    for overrides in asked.variants.values():
        plan = recipe.load(asked.recipe, [*asked.shared, *overrides])
        known = drafters.load(plan.drafter_name).Config
        configs.add(recipe.build_config(known, plan.drafter_fields, str(asked.recipe)))
    assert len(configs) == len(asked.variants) >= 6


def test_combinations_are_named_on_the_command_line() -> None:
    text = "both: drafter.layers=2,drafter.taps=[1, 2]"
    both = ("drafter.layers=2", "drafter.taps=[1, 2]")
    assert ablations.with_variants({"baseline": ()}, [text]) == {"baseline": (), "both": both}
    for added, message in (
        ("layers=2", "expected 'LABEL: KEY=VALUE,KEY=VALUE'"),
        ("baseline: drafter.layers=2", "got --variant 'baseline' twice"),
    ):
        with pytest.raises(UserError, match=message):
            ablations.with_variants({"baseline": ()}, [added])


def test_drafters_are_trained_on_one_cache(workshop: Workshop, tmp_path: Path) -> None:
    workshop.drafter(DRAFTER)
    files = [workshop.folder / f"{name}.toml" for name in (DRAFTER, "medusa")]
    for file in files:
        file.write_text(workshop.recipe(file.stem, "top_k = 5"))
    out = tmp_path / "out.json"
    words = ["recipes", "--data", workshop.folder / "data.jsonl", "--out", tmp_path / "out"]
    words += ["--cache", tmp_path / "cache", "--json", out, "--recipe", *files]
    assert ablations.main([*map(str, words), "--token-rows", "300"]) == 0
    found = json.loads(out.read_text())
    assert [found[file.stem]["steps"] > 0 for file in files] == [True, True]
    assert list((tmp_path / "out").glob("*/features")) == []
