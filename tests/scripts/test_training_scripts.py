"""Runs each script of tools/training once on tiny targets and data."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from workshop import Workshop

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
    one, three, wrong = (f"masks {k}: drafter.num_masks={k}" for k in (1, 3, -1))
    file = workshop.folder / "tiny.toml"  # beside its target
    file.write_text(workshop.recipe(DRAFTER, "top_k = 5"))
    given = {"data": workshop.folder / "data.jsonl", "cache": tmp_path / "cache", "recipe": file}
    given |= {"out": tmp_path / "out", "json": tmp_path / "results" / "a.json"}
    words = [w for name, path in given.items() for w in (f"--{name}", str(path))]
    words += ["--set", "drafter.taps=[1]"]

    right = ["--variant", one, "--variant", three, "--token-rows"]
    assert ablations.main([*words, *right, "600"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(given["json"].read_text())
    cache = FeatureCache(given["cache"])
    num_batches = len(epoch_batches(cache.length_N, 512, 0, 0))
    rows_per_step = cache.loss_T.sum() / num_batches
    first, second = found["variants"]
    assert first["steps"] == second["steps"] == round(600 / rows_per_step) > 1
    assert [len(row["top1_K"]) for row in (first, second)] == [2, 4]
    assert second["parameters"] - first["parameters"] == 2 * 64, "a mask is one vector of the width"
    assert first["token_rows"] == first["steps"] * rows_per_step
    assert "| masks 3 |" in shown

    assert ablations.main([*words, "--variant", wrong, "--steps", "2"]) == 1, "it cannot be trained"
    monkeypatch.setattr(train, "run", never)
    assert ablations.main([*words, *right, "600"]) == 0
    assert capsys.readouterr().out.endswith(shown)
    assert ablations.main([*words, "--variant", one, "--steps", "40"]) == 1
    (row,) = json.loads(given["json"].read_text())["variants"]
    assert "holds a run with other settings" in row["error"]


def test_combinations_are_named_on_the_command_line() -> None:
    text = "both: drafter.layers=2,drafter.taps=[1, 2]"
    path = Path("a/b.toml")
    both = ("drafter.layers=2", "drafter.taps=[1, 2]")
    assert ablations.runs_of([path], [text]) == {"both": (path, both)}
    assert ablations.runs_of([path], []) == {"b": (path, ())}
    for recipes, added, message in (
        ([path], ["layers=2"], "expected 'LABEL: KEY=VALUE,KEY=VALUE'"),
        ([path], [text, "both: drafter.layers=3"], "got --variant 'both' twice"),
        ([path, path], [text], "got variants of 2 recipes"),
    ):
        with pytest.raises(UserError, match=message):
            ablations.runs_of(recipes, added)


def test_drafters_are_trained_on_one_cache(workshop: Workshop, tmp_path: Path) -> None:
    workshop.drafter(DRAFTER)
    files = [workshop.folder / f"{name}.toml" for name in (DRAFTER, "medusa")]
    for file in files:
        file.write_text(workshop.recipe(file.stem, "top_k = 5"))
    out = tmp_path / "out.json"
    words = ["--data", workshop.folder / "data.jsonl", "--out", tmp_path / "out"]
    words += ["--cache", tmp_path / "cache", "--json", out, "--recipe", *files]
    assert ablations.main([*map(str, words), "--token-rows", "300"]) == 0
    found = json.loads(out.read_text())
    assert [found[file.stem]["steps"] > 0 for file in files] == [True, True]
    assert list((tmp_path / "out").glob("*/features")) == []
