"""The tool that trains variants of a drafter: its studies, its table, what it does not do twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import ablations
from variant_bundles import VariantBundles
from workshop import Workshop

from spec_export import drafters, make_bundle
from spec_export.make_bundle import BuildOptions
from spec_export.training import checkpoint, recipe
from spec_export.training import run as train
from spec_export.training.batches import epoch_batches
from spec_export.training.checkpoint import SavedDrafter, load_drafter
from spec_export.training.features import FeatureCache
from spec_export.training.trainer import Trainer
from spec_runtime.bundle import manifest as bundles
from spec_runtime.measure import bench


@pytest.fixture
def words(workshop: Workshop, tmp_path: Path) -> list[str]:
    """A command line but for study and budget: the tiny target and the workshop's rows."""
    workshop.drafter("parallelspec")  # writes the rows
    tiny = workshop.folder / "ablations.toml"
    tiny.write_text(workshop.recipe("parallelspec", "top_k = 5"))
    folders = {"data": workshop.folder / "data.jsonl", "cache": tmp_path / "cache", "recipe": tiny}
    folders |= {"out": tmp_path / "out", "json": tmp_path / "results" / "a.json"}
    return [word for name, path in folders.items() for word in (f"--{name}", str(path))]


def run(study: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = ablations.main([study, *words])
    return code, capsys.readouterr().out.splitlines()


def test_a_study_is_measured_once(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = ablations.STUDIES["num_masks"]
    some = {label: how for label, how in study.variants.items() if label[-1] in "136"}
    shared = ("drafter.decay=0.5",)
    monkeypatch.setitem(ablations.STUDIES, "num_masks", ablations.Study(study.recipe, some, shared))
    code, lines = run("num_masks", [*words, "--steps", "3"], capsys)
    assert code == 0
    results = json.loads((tmp_path / "results" / "a.json").read_text())
    assert results["shared"][0] == "drafter.decay=0.5"
    assert (results["study"], results["steps"], results["nodes"]) == ("num_masks", 3, 16)
    rows = results["variants"]
    assert [row["overrides"] for row in rows] == [[f"drafter.num_masks={k}"] for k in (1, 3, 6)]
    assert [len(row["top1_K"]) for row in rows] == [2, 4, 7]
    assert {row["steps"] for row in rows} == {3}
    # a mask is one vector of the target's width
    assert [row["parameters"] - rows[0]["parameters"] for row in rows] == [0, 2 * 64, 5 * 64]
    assert len(lines) == 5
    for line, row in zip(lines[2:], rows, strict=True):
        label, *cells, steps = (cell.strip() for cell in line.strip("|").split("|"))
        folder = tmp_path / "out" / label.replace(" = ", "-")
        found = json.loads((folder / "drafter" / "config.json").read_text())
        assert found["config"]["decay"] == 0.5
        measured = found["provenance"]["validation"]
        accuracy = [f"{measured[f'top1_{k}']:.3f}" for k in range(len(row["top1_K"]))]
        assert cells[:7] == accuracy + ["-"] * (7 - len(accuracy))
        assert cells[7] == f"{measured['accepted_length']:.3f}"
        saved = checkpoint.load_drafter(folder / "drafter")
        assert row["parameters"] == sum(tensor.numel() for tensor in saved.state.values())
        assert cells[8] == f"{row['parameters'] / 1e6:.2f} M"
        assert steps == "3"

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(train, "run", never)
    assert run("num_masks", [*words, "--steps", "3"], capsys) == (0, lines)
    code, others = run("num_masks", [*words, "--steps", "4"], capsys)
    assert code == 1
    assert all("failed" in line for line in others[2:])
    rows = json.loads((tmp_path / "results" / "a.json").read_text())["variants"]
    assert all("holds a run with other settings" in row["error"] for row in rows)


def test_a_variant_that_fails_is_left_out(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = {"none": ("drafter.num_masks=-1",), "one": ("drafter.num_masks=1",)}
    monkeypatch.setitem(ablations.STUDIES, "num_masks", ablations.Study(Path("x"), variants))
    code, lines = run("num_masks", [*words, "--minutes-each", "5"], capsys)
    assert code == 1
    assert lines[2].split()[:4] == ["|", "none", "|", "failed"]
    assert lines[3].endswith("| 2 |")  # the recipe's steps


def test_a_variant_cut_short_gets_its_whole_time_again(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By steps it goes on; the clock of --minutes-each cannot."""
    variants = {"one": ("drafter.num_masks=1",)}
    monkeypatch.setitem(ablations.STUDIES, "num_masks", ablations.Study(Path("x"), variants))
    save, first_steps = Trainer.save_checkpoint, []

    def interrupted(trainer: Trainer) -> None:
        save(trainer)
        raise KeyboardInterrupt

    train_from = Trainer.train

    def recorded(trainer: Trainer) -> None:
        first_steps.append(trainer.step)
        train_from(trainer)

    monkeypatch.setattr(Trainer, "train", recorded)
    for budget in (["--steps", "3"], ["--minutes-each", "5"]):
        rest = ["num_masks", *words, "--set", "train.checkpoint_every=1", *budget]
        rest[rest.index("--out") + 1] = str(tmp_path / budget[0])
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "save_checkpoint", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ablations.main(rest)
        assert ablations.main(rest) == 0
    assert first_steps == [0, 1, 0, 0]


def test_variants_learn_from_equal_rows_and_decode_once(
    words: list[str],
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variants = {label: (f"drafter.num_masks={k}",) for k, label in enumerate(("one", "two"), 1)}
    monkeypatch.setitem(ablations.STUDIES, "num_masks", ablations.Study(Path("x"), variants))
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"say {text}", "category": text} for text in ("abc", "xyz")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*words, "--token-rows", "600", "--prompts", str(prompts), "--nodes", "2", "4"]
    words += ["--max-new-tokens", "8", "--set", "drafter.taps=[1]"]
    opened = []

    @contextmanager
    def bundle(_: VariantBundles, saved: SavedDrafter) -> Iterator[Path]:
        """Gives a bundle made before, since tracing takes seconds."""
        opened.append(saved.path.parent.name)
        yield workshop.bundle("parallelspec")

    monkeypatch.setattr(VariantBundles, "bundle", bundle)
    code, lines = run("num_masks", words, capsys)
    assert code == 0
    assert opened == ["one", "two"]
    results = json.loads((tmp_path / "results" / "a.json").read_text())
    cache = FeatureCache(tmp_path / "cache")
    assert cache.sequence(0)[2].shape[1] == 2 * 64  # the final feature and a tap
    num_batches = len(epoch_batches(cache.length_N, 512, 0, 0))
    budget = results["token_rows"]
    assert budget == {"token_rows": 600, "rows_per_step": cache.loss_T.sum() / num_batches}
    assert results["steps"] == round(600 / budget["rows_per_step"]) > 1
    for row in results["variants"]:
        assert row["steps"] == results["steps"]
        assert row["token_rows"] == row["steps"] * budget["rows_per_step"]
        assert row["tokens_per_second"] * row["hours"] * 3600 == pytest.approx(row["token_rows"])
        assert list(row["decoding"]) == ["2 nodes", "4 nodes"]
        for size, found in row["decoding"].items():
            assert list(found["categories"]) == ["abc", "xyz"]
            assert (found["prompts"], found["identical"]) == (2, 1.0)
            assert 1 <= found["accepted_length"] <= found["nodes"] <= int(size[0])
            parts = [part["tokens"] for part in found["categories"].values()]
            assert found["tokens"] == sum(parts)
    assert "decoding, 4 nodes" in lines[0]

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(train, "run", never)
    monkeypatch.setattr(bench, "run", never)
    assert run("num_masks", words, capsys) == (0, lines)
    with pytest.raises(SystemExit):
        ablations.main(["num_masks", *words, "--token-rows", "700"])
    assert "holds runs of 600 token rows, got 700" in capsys.readouterr().err


def test_a_variant_is_bundled_on_the_target_of_the_first(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafter gives the same files, and the target's are links."""
    built, build_bundle = [], make_bundle.build

    def build(options: BuildOptions) -> Path:
        built.append(list(options.drafter_checkpoints))
        return build_bundle(options)

    monkeypatch.setattr(make_bundle, "build", build)
    drafter = workshop.drafter("parallelspec")
    variants = VariantBundles(tmp_path, str(workshop.llama()), "fp32")
    with variants.bundle(load_drafter(drafter)) as folder:
        found = bundles.read(folder)
        base = bundles.read(tmp_path / "target-fp32-1", verify=False)
        assert found.manifest == base.manifest
        for name in found.manifest.files:
            is_own = name.startswith("drafters/")
            assert (folder / name).samefile(base.path / name) != is_own, name
    assert built == [[drafter]]
    assert [path.name for path in tmp_path.iterdir()] == ["target-fp32-1"]


def test_combinations_are_named_on_the_command_line() -> None:
    known = {"baseline": ()}
    text = "both: drafter.layers=2,drafter.taps=[1, 2],drafter.loss=tv"
    both = ("drafter.layers=2", "drafter.taps=[1, 2]", "drafter.loss=tv")
    assert ablations.chosen(known, [text], None) == {"baseline": (), "both": both}
    assert ablations.chosen(known, [text], ["both"]) == {"both": both}
    for added, only, message in (
        (["layers=2"], None, "expected 'LABEL: KEY=VALUE,KEY=VALUE'"),
        (["baseline: drafter.layers=2"], None, "got --variant 'baseline' twice"),
        ([], ["both"], "got --only 'both', expected some of baseline"),
    ):
        with pytest.raises(ValueError, match=message):
            ablations.chosen(known, added, only)


@pytest.mark.parametrize("study", ablations.STUDIES)
def test_every_variant_is_another_drafter(study: str) -> None:
    found = ablations.STUDIES[study]
    configs = []
    for overrides in found.variants.values():
        plan = recipe.load(found.recipe, [*found.shared, *overrides])
        known = drafters.load(plan.drafter_name).Config
        configs.append(recipe.build_config(known, plan.drafter_fields, str(found.recipe)))
    assert len(set(configs)) == len(configs) >= 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--data", "nowhere.jsonl"], "got --data nowhere.jsonl, expected a file of chat rows"),
        (["--set", "train.lr=-1"], "[train] lr is -1.0, expected more than 0"),
        (["--steps", "0"], "[train] max_steps is 0, expected at least 1"),
    ],
)
def test_what_a_command_line_is_refused_for(
    words: list[str], changed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        ablations.main(["num_masks", *words, "--steps", "2", *changed])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
