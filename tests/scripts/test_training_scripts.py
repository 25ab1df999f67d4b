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
from tools.training import (
    ablations,
    broad_prompts,
    data_summary,
    fit_lookup,
    overlap,
    train_drafters,
)

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
    assert found["token_rows"] == budget
    assert found["steps"] == round(600 / budget["rows_per_step"]) > 1
    one, three = found["variants"]
    assert [len(row["top1_K"]) for row in (one, three)] == [2, 4]
    assert three["parameters"] - one["parameters"] == 2 * 64, "a mask is one vector of the width"
    assert one["token_rows"] == found["steps"] * budget["rows_per_step"]
    assert "| masks 3 |" in shown

    assert ablations.main([*words, "--only", "wrong", "--steps", "2"]) == 1, "it cannot be trained"
    monkeypatch.setattr(train, "run", never)
    assert ablations.main([*words, *right, "600"]) == 0
    assert capsys.readouterr().out.endswith(shown)
    with pytest.raises(UserError, match="holds runs of 600 token rows, got 700"):
        ablations.main([*words, *right, "700"])
    assert ablations.main([*words, "--only", "masks 1", "--steps", "4"]) == 1
    (row,) = json.loads(given["json"].read_text())["variants"]
    assert "holds a run with other settings" in row["error"]


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
    assert ablations.chosen({"baseline": ()}, [text], ["both"]) == {"both": both}
    for added, only, message in (
        (["layers=2"], None, "expected 'LABEL: KEY=VALUE,KEY=VALUE'"),
        (["baseline: drafter.layers=2"], None, "got --variant 'baseline' twice"),
        ([], ["both"], "got --only 'both', expected some of baseline"),
    ):
        with pytest.raises(UserError, match=message):
            ablations.chosen({"baseline": ()}, added, only)


def test_drafters_are_trained_on_one_cache(workshop: Workshop, tmp_path: Path) -> None:
    workshop.drafter(DRAFTER)
    files = [workshop.folder / f"{name}.toml" for name in (DRAFTER, "medusa")]
    for file in files:
        file.write_text(workshop.recipe(file.stem, "top_k = 5"))
    words = ["--data", workshop.folder / "data.jsonl", "--out", tmp_path / "out", *files]
    assert train_drafters.main([*map(str, words), "--token-rows", "300"]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [found[file.stem]["steps"] > 0 for file in files] == [True, True]
    assert list((tmp_path / "out").glob("*/features")) == []


def test_tables_of_lookup_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": [5, 6, 7, 5, 6, k], "response": [5, 6, k, 5, 6, 7]} for k in range(30)]
    path = written(tmp_path / "answers.jsonl", *rows)
    fit_lookup.main([str(path)])
    shown = capsys.readouterr().out
    assert shown.startswith("30 rows, ")
    assert "LONGEST: from length, row (a, b, c, d)" in shown


# ---- training data


class Words:
    """Decodes each id as a word."""

    all_special_ids = (1,)

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_overlap_is_thirteen_words_or_a_whole_short_text(tmp_path: Path) -> None:
    shared = list(range(13))
    texts = [Words().decode(shared), "Who wrote this famous book?", "yes or no"]
    index = overlap.Index(texts)
    assert index.overlaps("First, who wrote this famous book? Tell me.")
    assert not index.overlaps("Yes or no"), "four words and fewer are in any text"
    assert not index.overlaps(Words().decode(shared[:12]))
    clean = {"prompt": [1, 2], "response": [3], "source": "a"}
    path = written(
        tmp_path / "rows.jsonl",
        clean,
        {"prompt": [99, *shared], "response": [3], "source": "a"},
        {"turns": [{"prompt": [1], "response": [2]}, {"prompt": shared, "response": shared}]},
        {"messages": [{"role": "assistant", "content": Words().decode(shared).upper()}]},
        {"tokens": [5, *shared], "loss_mask": [1] + [0] * 13},
    )
    counts, left = overlap.compare(path, index, Words())
    assert left == [clean]
    assert counts["a"] == overlap.Counts(rows=2, prompts=1, answers=0, either=1)
    assert counts[""] == overlap.Counts(rows=3, prompts=2, answers=2, either=3)


def test_prompts_are_the_same_for_a_seed_and_of_every_kind(tmp_path: Path) -> None:
    maths = ({"question": f"{i}?", "answer": "1"} for i in range(9))
    written(tmp_path / "gsm8k_train.jsonl", *maths)
    tables = {"question": "How many?", "context": "CREATE TABLE t (a number)"}
    written(tmp_path / "spider_dev_with_schema.jsonl", tables)
    written(tmp_path / "nq_open_dev.jsonl", {"question": "who is who"})
    catalogue = tmp_path / "python-docs-de" / "a.po"
    catalogue.parent.mkdir()
    english = "Use :func:`open`, not *this*, in every one of your programs."
    german = "Nimm :func:`open` und nicht *dies* in jedem deiner Programme."
    catalogue.write_text(f'msgid ""\n"{english}"\nmsgstr "{german}"\n')
    pairs = [*broad_prompts.catalogue_pairs(tmp_path)]
    assert pairs[0].text.startswith("Nimm open und nicht dies")
    passages = [
        broad_prompts.Passage(f"Passage {i} tells of a town. " * 12, origin, question)
        for i in range(40)
        for origin, question in (("quoref", f"Which town is {i}?"), ("answers", None))
    ]
    wording = broad_prompts.tomllib.loads(broad_prompts.WORDING.read_text(encoding="utf-8"))
    material = broad_prompts.Material(tmp_path, passages, pairs, wording)
    prompts = broad_prompts.draw(material, 200, 3, lambda text: len(text) < 3000)
    assert prompts == broad_prompts.draw(material, 200, 3, lambda text: len(text) < 3000)
    assert {p.kind for p in prompts} == set(broad_prompts.SHARES)
    assert len({p.text for p in prompts}) == len(prompts) > 150
    # No name of a list, and no place for a text, is left.
    assert not [p for p in prompts if "{" in p.text and p.kind not in ("code", "json")]
    rows = broad_prompts.with_follow_ups(
        [broad_prompts.row_of(prompt) for prompt in prompts], material.wording, 2, 0
    )
    assert {len(set(row["turns"])) for row in rows} == {3}
    broad_prompts.write(rows, material.wording["licences"], tmp_path / "out.jsonl")
    sources = json.loads((tmp_path / "out.jsonl.sources.json").read_text())
    assert sum(entry["prompts"] for entry in sources.values()) == len(rows)
    assert sources["maths/gsm8k"]["licence"] == "MIT"


def test_tokens_are_summed_by_source_licence_temperature_and_turns(tmp_path: Path) -> None:
    path = written(
        tmp_path / "rows.jsonl",
        {"prompt": [5, 6], "response": [7, 8, 1], "source": "maths/gsm8k", "temperature": 0.7},
        {"turns": [{"prompt": [5], "response": [7, 1]}, {"prompt": [6], "response": [9]}]},
        {"prompt": [5], "response": [7, 1], "source": "elsewhere"},
    )
    sidecar = {"settings": {"temperature": 0.0}}
    (tmp_path / "rows.jsonl.state.json").write_text(json.dumps(sidecar))
    tables = data_summary.summarize([path], {1})
    Totals = data_summary.Totals
    assert tables["all"] == {"all": Totals(3, 5, 4, 8, 1)}
    assert tables["temperature"] == {"0.7": Totals(1, 2, 1, 3, 0), "0.0": Totals(2, 3, 3, 5, 1)}
    assert tables["turns"] == {"1": Totals(2, 3, 2, 5, 0), "2": Totals(1, 2, 2, 3, 1)}
    assert set(tables["licence"]) == {"MIT", "unknown", "as the target (Apache-2.0 for the demo)"}
    assert tables["all"]["all"].figures()["cut"] == 0.25
    with pytest.raises(UserError, match=r"rows.jsonl:1: not a row of distill"):
        data_summary.summarize([written(path, {"prompt": "text"})], {1})
