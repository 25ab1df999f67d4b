"""Tests which weights a run keeps: finite ones, averaged ones, those of the best step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from said import Said
from tiny_training import curve, stored

from spec_export.training import checkpoint, validate
from spec_export.training import run as train
from spec_export.training.average import WeightAverage
from spec_export.training.trainer import Trainer
from spec_runtime.errors import UserError


def test_diverged_training_ends_with_the_last_good_checkpoint(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    options = ["train.lr=1e20", "train.checkpoint_every=1", "train.schedule=constant"]
    with pytest.raises(ValueError, match="training diverged after step") as caught:
        train.run(recipe, options, tmp_path, cache=finished / "features")
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert f"the last good checkpoint is {newest}; train into another" in str(caught.value)
    assert "expected finite numbers" in str(caught.value)
    assert not (tmp_path / "drafter").exists()
    tensors = checkpoint._read_tensors(newest / "model.safetensors")
    assert not checkpoint.non_finite(tensors)


def test_weights_that_diverge_in_the_last_step_are_not_exported(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    options = ["train.lr=1e39", "train.max_steps=1", "train.warmup=0"]
    with pytest.raises(ValueError, match=r"NaN or infinity in .*no checkpoint was written yet"):
        train.run(recipe, options, tmp_path, cache=finished / "features")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_drafter_with_nan_is_neither_saved_nor_built(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint.load_drafter(finished / "drafter")
    broken = sorted(saved.state)[0]
    state = saved.state | {broken: torch.full_like(saved.state[broken], float("nan"))}
    arguments = (state, saved.name, saved.config, saved.provenance, saved.draft_token_ids)
    with pytest.raises(UserError, match=f"NaN or infinity in {broken}, expected"):
        checkpoint.save_drafter(tmp_path / "refused", *arguments)
    assert not (tmp_path / "refused").exists()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_require_finite", lambda *_: None)
        checkpoint.save_drafter(tmp_path / "drafter", *arguments)
    with pytest.raises(UserError, match=f"{broken} holds NaN or infinity"):
        checkpoint.load_drafter(tmp_path / "drafter")


def test_the_average_forgets_the_beginning_and_changes_places() -> None:
    """Weights 1, then 11 and 21: 0.1·1 + 0.9·11 = 10, then 2/11·10 + 9/11·21 = 19."""
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(1)
    average = WeightAverage(module, 0.9)
    for step, weight in enumerate((11.0, 21.0)):
        module.weight.data.fill_(weight)
        average.update(step)
    assert average.tensors["weight"].item() == pytest.approx(19)
    with average.in_use():
        assert module.weight.item() == pytest.approx(19)
        assert average.tensors["weight"].item() == 21
    assert module.weight.item() == 21
    average.put_back()  # does nothing: they are back
    assert module.weight.item() == 21
    module.weight.data.fill_(29)
    average.update(1000)
    assert average.tensors["weight"].item() == pytest.approx(0.9 * 19 + 0.1 * 29)


def test_averaged_weights_are_exported_and_train_nothing(finished: Path, averaged: Path) -> None:
    raw, average = stored(averaged, 7, "model"), stored(averaged, 7, "average")
    of_plain_run = stored(finished, 7, "model")
    assert all(torch.equal(raw[name], of_plain_run[name]) for name in raw)
    exported = checkpoint.load_drafter(averaged / "drafter").state
    assert all(torch.equal(exported[n], average[n].bfloat16().float()) for n in average)
    assert all(not torch.equal(raw[name], average[name]) for name in average)
    before = stored(averaged, 6, "average")
    decay = 7 / 16  # of the step counted as 6
    for name, tensor in average.items():
        expected = decay * before[name] + (1 - decay) * raw[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
    lengths = [[row["accepted_length"] for row in curve(out)] for out in (finished, averaged)]
    assert lengths[0] != lengths[1], "the averaged weights are validated"


def test_a_run_goes_on_averaging_or_not(recipe: Path, finished: Path, averaged: Path) -> None:
    cache = finished / "features"
    with pytest.raises(ValueError, match=r"has no averaged weights, expected those of train\.ema"):
        train.run(recipe, ["train.ema=0.9"], finished, True, cache)
    with pytest.raises(ValueError, match=r"another recipe \(train\.ema was 0\.9, is absent\)"):
        train.run(recipe, [], averaged, True, cache)
    with pytest.raises(ValueError, match=r"\[train\]\.ema: got int 1, expected less"):
        train.run(recipe, ["train.ema=1"], averaged, True, cache)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_best_step_is_kept_and_exported(
    recipe: Path, finished: Path, tmp_path: Path, ema: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validated at 3, 6 and 7: the first was the best, and all checkpoints are younger."""
    weights: list[dict[str, Any]] = []
    lengths = iter([2.5, 1.5, 2.0])

    def measured(trainer: Trainer) -> validate.Validation:
        weights.append({name: t.clone() for name, t in trainer.drafter.state_dict().items()})
        return validate.Validation((0.5,), (0.5,), next(lengths), (0.1,))

    monkeypatch.setattr(Trainer, "validate", measured)
    said, options = Said(), [f"train.ema={ema}"]
    folder = train.run(recipe, options, tmp_path, cache=finished / "features", report=said)
    saved = checkpoint.load_drafter(folder)
    assert saved.provenance["steps"] == 3
    assert saved.provenance["validation"]["accepted_length"] == 2.5
    assert all(torch.equal(t, weights[0][n].bfloat16().float()) for n, t in saved.state.items())
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-00000003"]
    assert "exporting step 3 of 7, with the best validation: accepted length 2.500" in said.text


def test_without_validation_the_last_step_is_exported(recipe: Path, tmp_path: Path) -> None:
    said, options = Said(), ["data.validation_fraction=0", "train.max_steps=2"]
    folder = train.run(recipe, options, tmp_path, report=said)
    assert checkpoint.load_drafter(folder).provenance["steps"] == 2
    assert "exporting step 2, the last: nothing is held out" in said.lines
    assert not (tmp_path / "best").exists()
