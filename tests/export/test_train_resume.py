"""Tests that a run that was stopped goes on exactly where it was, and only there."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from said import Said
from tiny_training import curve, largest_file, stop_in

from spec_export.training import checkpoint, folders, interruption
from spec_export.training import run as train
from spec_export.training.log import Log
from spec_export.training.trainer import Trainer


def test_a_run_is_not_overwritten_nor_continued_with_another_recipe(
    recipe: Path, finished: Path
) -> None:
    with pytest.raises(ValueError, match="already holds a training run: pass --resume"):
        train.run(recipe, out=finished)
    with pytest.raises(ValueError, match="was trained with another recipe"):
        train.run(recipe, ["train.lr=1e-4"], finished, resume=True)


def test_two_runs_cannot_write_one_folder(
    recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_alone, refused = Trainer.train, []

    def train_twice(trainer: Trainer) -> None:
        with pytest.raises(ValueError, match=f"is being written by process {os.getpid()} on"):
            train.run(recipe, out=tmp_path / "run", cache=finished / "features")
        refused.append(True)
        train_alone(trainer)

    monkeypatch.setattr(Trainer, "train", train_twice)
    train.run(recipe, ["train.max_steps=1"], tmp_path / "run", cache=finished / "features")
    assert refused
    assert not list(tmp_path.glob(".*.lock"))


def test_a_checkpoint_that_does_not_fit_is_one_line(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    """Named with its size and the folder; the run goes on once there is room."""
    newest = finished / "checkpoints" / "step-00000007"
    for name in ("model.safetensors", "states.pt"):
        limit = (newest / name).stat().st_size - 1
        with largest_file(limit), pytest.raises(ValueError, match="cannot write a check") as error:
            train.run(recipe, out=tmp_path / f"{limit}", cache=finished / "features")
        assert f"to {tmp_path / f'{limit}'} (" in str(error.value)
        assert "with --resume where a checkpoint was written" in str(error.value)
        assert checkpoint.latest(tmp_path / f"{limit}" / "checkpoints") is None
    save = checkpoint.save

    def full_at_four(folder: Path, step: int, *arguments: Any, **more: Any) -> Path:
        with largest_file(20_000 if step == 4 else resource.RLIM_INFINITY):
            return save(folder, step, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", full_at_four)
        with pytest.raises(ValueError, match="cannot write a checkpoint of"):
            train.run(recipe, out=tmp_path / "run", cache=finished / "features")
    train.run(recipe, out=tmp_path / "run", cache=finished / "features", resume=True)
    assert curve(tmp_path / "run") == curve(finished)


def test_resuming_needs_a_checkpoint(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got --resume, but .* \(it is empty or not there\)"):
        train.run(recipe, out=tmp_path / "none", resume=True)
    (tmp_path / "none" / "features").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds no checkpoint \(it holds features\)"):
        train.run(recipe, out=tmp_path / "none", resume=True)


def test_a_resumed_run_may_go_on_longer_and_say_more(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    cache = finished / "features"
    shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"another recipe \(train.lr was 0.003, is 0.0001\)"):
        train.run(recipe, ["train.lr=1e-4", "train.log_every=1"], tmp_path, True, cache)
    with pytest.raises(
        ValueError, match=r"step 7, the recipe ends at step 5: raise train\.max_steps"
    ):
        train.run(recipe, ["train.max_steps=5"], tmp_path, True, cache)
    options = ["train.max_steps=9", "train.log_every=1", "train.keep_checkpoints=3"]
    folder = train.run(recipe, options, tmp_path, True, cache)
    assert [int(row["step"]) for row in curve(tmp_path) if row["loss"]] == [4, 7, 8, 9]
    assert checkpoint.load_drafter(folder).provenance["resumed"] == [
        {
            "step": 7,
            "changed": {
                "train.keep_checkpoints": [2, 3],
                "train.log_every": [4, 1],
                "train.max_steps": [7, 9],
            },
        }
    ]


def test_a_resumed_run_may_have_another_number_of_processes(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints") / "step-00000007"
    header = json.loads((path / "checkpoint.json").read_text())
    assert header["progress"]["processes"] == 1
    header["progress"] |= {"processes": 2, "batches_per_step": 4}
    (path / "checkpoint.json").write_text(json.dumps(header))
    said = Said()
    train.run(recipe, None, tmp_path, True, finished / "features", report=said)
    assert "was trained by 2 processes, now 1: each step keeps its batches" in said.text
    saved = checkpoint.load_drafter(tmp_path / "drafter")
    assert saved.provenance["resumed"] == [{"step": 7, "changed": {"processes": [2, 1]}}]
    header["progress"]["curve"] = "none"
    (path / "checkpoint.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"progress\.curve: got str 'none', expected a list"):
        train.run(recipe, out=tmp_path, resume=True, cache=finished / "features")


@pytest.mark.parametrize(
    ("owner", "name", "call", "step", "error"),
    [
        # in the middle of steps 2 and 6, between their two micro-batches
        (Trainer, "_backward", 4, 1, KeyboardInterrupt()),
        (Trainer, "_backward", 11, 5, SystemExit(143)),
        (Log, "training", 1, 4, KeyboardInterrupt()),
        # in a validation, while the average is in use
        (Trainer, "_guesses", 1, 3, SystemExit(143)),
        (Trainer, "validate", 3, 7, KeyboardInterrupt()),
        # the step is validated, and not yet kept as the best
        (Log, "write_curve", 2, 6, SystemExit(143)),
        (Log, "write_curve", 3, 7, KeyboardInterrupt()),
        (Trainer, "write_results", 1, 7, KeyboardInterrupt()),  # its last checkpoint is written
    ],
)
def test_an_interrupted_run_saves_a_checkpoint_and_ends_as_an_uninterrupted_one(
    recipe: Path,
    finished: Path,
    averaged: Path,
    tmp_path: Path,
    owner: type,
    name: str,
    call: int,
    step: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C and SIGTERM keep the last whole step; what goes on from it is the same bit for bit,
    raw weights and averaged ones, and the curve, in the middle of a line of it too."""
    said, options, cache = Said(), ["train.ema=0.9"], finished / "features"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop_in(owner, name, call, error))
        with pytest.raises(type(error)):
            train.run(recipe, options, tmp_path, cache=cache, report=said)
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == folders.folder_name(step)
    line = f"interrupted: {newest} holds step {step}; the same command with --resume goes on"
    assert line in said.lines or name == "write_results"
    assert not (tmp_path / "drafter").exists()
    torch.manual_seed(99)  # nothing may depend on what the process did before
    train.run(recipe, options, tmp_path, True, cache)
    assert curve(tmp_path) == curve(averaged)
    for file in (
        "drafter/drafter.safetensors",
        "checkpoints/step-00000007/model.safetensors",
        "checkpoints/step-00000007/average.safetensors",
    ):
        assert (tmp_path / file).read_bytes() == (averaged / file).read_bytes(), file
    best = [sorted(p.name for p in (run / "best").rglob("*")) for run in (tmp_path, averaged)]
    assert best[0] == best[1]


def test_a_run_removes_what_a_killed_one_left(recipe: Path, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("features"))
    there = sorted(path.relative_to(run) for path in run.rglob("*"))
    for left in ("best/.step-00000006.0123abcd.tmp", ".drafter.0123abcd.tmp"):
        (run / left).mkdir()
        (run / left / "model.safetensors").touch()
    (run / "checkpoints" / ".step-00000007.lock").write_text("process 1 on a machine\n")
    train.run(recipe, out=run, resume=True, cache=finished / "features")
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == there


def test_an_interrupt_before_the_first_step_saves_nothing(
    recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_backward", stop_in(Trainer, "_backward", 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train.run(recipe, out=tmp_path, cache=finished / "features")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("number", interruption.SIGNALS, ids=str)
def test_signals_wait_for_the_end_of_a_step(number: signal.Signals) -> None:
    happened: list[str] = []
    before = signal.signal(number, lambda *_: happened.append("signal"))
    try:
        with interruption.delayed():
            os.kill(os.getpid(), number)
            happened.append("step")
        assert happened == ["step", "signal"]
    finally:
        signal.signal(number, before)
