"""Tests what a run says of itself: lines, the expected end, what trackers get."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from said import Said
from tiny_training import curve, stop_in

from spec_export.cli import main
from spec_export.training import batches, features, log, pace
from spec_export.training import run as train
from spec_export.training.pace import Pace
from spec_export.training.trainer import Trainer


def test_the_share_of_padding() -> None:
    """Lengths 2 4 4 1: two to four, one alone, one to two of its own length."""
    groups = [np.array([0, 1]), np.array([3]), np.array([2, 2])]
    assert batches.padding_share(np.array([2, 4, 4, 1]), groups) == pytest.approx(2 / 17)
    assert batches.padding_share(np.array([2, 4, 4, 1]), groups[1:]) == 0


def test_training_says_how_much_is_padding(recipe: Path, finished: Path, tmp_path: Path) -> None:
    """One line, of the batches that it trains on."""
    report = Said()
    train.run(recipe, ["train.max_steps=1"], tmp_path, cache=finished / "features", report=report)
    held_out = features.FeatureCache(finished / "features").length_N
    said = [line for line in report.lines if "padding" in line]
    assert len(said) == 1
    assert said[0].startswith("batches: ")
    assert 0 < float(said[0].split()[1].rstrip("%")) < 100 * (1 - held_out.mean() / held_out.max())


def test_a_run_by_time_names_no_number_of_steps(
    recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = recipe.read_text().replace("max_steps = 7", "max_minutes = 5\nwarmup = 0")
    by_time = recipe.with_name("by_time.toml")
    by_time.write_text(text)
    report = Said()
    shares = iter([0.0, 1.0])
    monkeypatch.setattr(Trainer, "time_share", lambda trainer, started: next(shares))
    train.run(by_time, ["train.log_every=1"], tmp_path, cache=finished / "features", report=report)
    steps = [line.split(" loss")[0] for line in report.lines if line.startswith("step ")]
    assert steps == ["step 1", "step 2"]


def test_the_expected_end_counts_steps_validations_and_the_time_limit() -> None:
    steps = Pace()
    assert steps.seconds_left(10, 2, None) is None
    steps.step_seconds.extend([1.0, 3.0])
    assert steps.seconds_left(10, 2, None) == 20, "no validation was measured yet"
    steps.validation_seconds = 5.0
    assert steps.seconds_left(10, 2, None) == 30
    assert steps.seconds_left(10, 2, 12.0) == 17
    assert steps.seconds_left(10, 0, 12.0) == 12
    assert steps.seconds_left(1, 1, 1000.0) == 7
    assert [pace.validations_left(step, 7, 3) for step in range(8)] == [3, 3, 3, 2, 2, 2, 1, 0]
    assert [pace.validations_left(step, 6, 3) for step in (2, 3, 5, 6)] == [2, 1, 1, 0]


def test_each_line_but_the_last_says_when_the_run_ends(
    recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the steps 1 and 2 of 3; both validate, and so does the last."""
    report = Said()
    asked: list[tuple[int, int, float | None]] = []

    def seconds_left(self: Pace, *given: Any) -> float:
        asked.append(given)
        return 60.0 * given[0]

    monkeypatch.setattr(Pace, "seconds_left", seconds_left)
    options = [f"train.{key}" for key in ("max_steps=3", "log_every=1", "validate_every=1")]
    train.run(recipe, options, tmp_path, cache=finished / "features", report=report)
    said = [line.split(" tok/s")[1] for line in report.lines if line.startswith("step ")]
    assert [text.split(" ends ")[0] for text in said] == [", 2 min left,", ", 1 min left,", ""]
    assert asked == [(2, 3, None), (1, 2, None)]


def test_trackers_get_the_curve_also_of_a_resumed_run(
    recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after step 5, of which it has logged everything, and goes on from step 4.

    Steps 5 and on are written twice, and TensorBoard shows the second time alone.
    """
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options, cache, trackers = ["train.log_every=1"], finished / "features", ["tensorboard"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_interrupted", lambda trainer: None)
        patch.setattr(Trainer, "_backward", stop_in(Trainer, "_backward", 11, SystemExit(1)))
        with pytest.raises(SystemExit):
            train.run(recipe, options, tmp_path, cache=cache, trackers=trackers)
    train.run(recipe, options, tmp_path, True, cache, trackers=trackers)
    reader = EventAccumulator(str(tmp_path / log.PROJECT))
    reader.Reload()

    def points(tag: str) -> dict[int, float]:
        events = reader.Scalars(tag)
        assert len({event.step for event in events}) == len(events), tag
        return {event.step: event.value for event in events}

    for name in ("loss", "lr", "gradient_norm", "tokens_per_second", "top1_0", "top1_2"):
        assert list(points(f"train/{name}")) == [*range(1, 8)], name
    for name in ("accepted_length", "top1_0", "top5_2", "ece_1"):
        assert list(points(f"validation/{name}")) == [3, 6, 7], name
    rows = [row for row in curve(tmp_path) if row["loss"]]
    losses = [float(row["loss"]) for row in rows]
    assert list(points("train/loss").values()) == pytest.approx(losses)
    assert max(points("train/lr").values()) == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorboard", "got --track tensorboard, which is not installed: pip install tensorboard"),
        ("tensorbord", "got --track 'tensorbord', expected tensorboard, wandb, mlflow"),
    ],
)
def test_a_missing_tracker_is_one_line_before_anything_is_written(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), "--track", name, "--out", str(out)])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert not out.exists()
