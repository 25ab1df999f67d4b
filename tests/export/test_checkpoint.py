"""Checkpoints: going on equals never having stopped, and damage is named."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from spec_export.training import checkpoint  # noqa: E402 (needs torch)
from spec_export.training.checkpoint import CheckpointError  # noqa: E402


class Run:
    """A tiny training run that draws from torch's random source."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.module(torch.randn(3, 4)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, **more: Any) -> Path:
        facts: dict[str, Any] = {"progress": {}, "provenance": {}, "keep": 2}
        return checkpoint.save(folder, self.step, self.module, self.optimizer, **facts | more)

    def load(self, path: Path) -> checkpoint.Checkpoint:
        return checkpoint.load(path, self.module, self.optimizer)


def test_resumed_training_equals_uninterrupted(tmp_path: Path) -> None:
    run = Run(0)
    run.train(3)
    path = run.save(tmp_path, progress={"epoch": 1, "losses": [0.5]}, provenance={"who": "test"})
    expected = run.train(4)
    resumed = Run(1)
    found = resumed.load(path)
    assert resumed.train(4) == expected
    assert (found.step, found.progress) == (3, {"epoch": 1, "losses": [0.5]})
    assert found.provenance == {"who": "test"}


def test_keeps_the_newest_and_leaves_nothing_temporary(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    run = Run(0)
    for _ in range(4):
        run.train(1)
        run.save(tmp_path, keep=2)
    run.save(tmp_path, keep=2)  # the same step again replaces it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000004"


def test_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    run = Run(0)
    path = run.save(tmp_path)
    with pytest.raises(TypeError, match="object has no JSON form"):
        run.save(tmp_path, progress={"bad": object()})
    assert list(tmp_path.iterdir()) == [path]
    run.load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "states.pt"])
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    run = Run(0)
    path = run.save(tmp_path)
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{name} has SHA-256 .* expected"):
        run.load(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        run.load(path)
    (path / "checkpoint.json").write_text('{"format": 9, "files": {}}')
    with pytest.raises(CheckpointError, match="format 9, expected 1"):
        run.load(path)
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        run.load(path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = Run(0).save(tmp_path)
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.LayerNorm(9))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, other, torch.optim.AdamW(other.parameters()))
    message = str(caught.value)
    assert "missing 1.bias, 1.weight" in message
    assert "unexpected 2.bias, 2.weight" in message
    assert "0.weight is [8, 4], expected [9, 4]" in message


@dataclass(frozen=True)
class _Config:
    num_masks: int = 4
    taps: tuple[int, ...] = (10, 20)


def save_drafter(folder: Path) -> dict[str, Any]:
    weight = torch.randn(3, 5)
    state = {"a.weight": weight, "b.weight": weight, "count": torch.tensor([7])}  # a and b tied
    checkpoint.save_drafter(
        folder,
        state,
        "parallelspec",
        _Config(),
        {"date": "d"},
        np.array([1, 5, 9], dtype=np.int32),
    )
    return state


def test_drafter_round_trip(tmp_path: Path) -> None:
    state = save_drafter(tmp_path / "d")
    got = checkpoint.load_drafter(tmp_path / "d")
    assert (got.name, got.config, got.provenance) == (
        "parallelspec",
        {"num_masks": 4, "taps": [10, 20]},
        {"date": "d"},
    )
    assert got.state.keys() == state.keys()
    stored = {key: t.bfloat16() if t.is_floating_point() else t for key, t in state.items()}
    assert all(torch.equal(got.state[key], stored[key].to(state[key].dtype)) for key in state)
    assert got.draft_token_ids is not None
    assert got.draft_token_ids.tolist() == [1, 5, 9]
    assert got.draft_token_ids.dtype == np.int64


def test_drafter_in_bf16_is_half_the_size_and_replaces_the_old_one(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d")
    state = save_drafter(tmp_path / "d")
    file = safetensors_torch.load_file(tmp_path / "d" / "drafter.safetensors")
    assert file["a.weight"].dtype == torch.bfloat16
    got = checkpoint.load_drafter(tmp_path / "d").state
    assert torch.equal(got["a.weight"], state["a.weight"].bfloat16().float())
    assert got["count"].dtype == torch.int64
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_drafter_damage_is_named(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d")
    config_path, tensor_path = (
        tmp_path / "d" / "config.json",
        tmp_path / "d" / "drafter.safetensors",
    )
    config, tensors = config_path.read_text(), tensor_path.read_bytes()

    tensor_path.write_bytes(tensors[:-4])
    with pytest.raises(CheckpointError, match=r"drafter.safetensors has SHA-256"):
        checkpoint.load_drafter(tmp_path / "d")

    tensor_path.write_bytes(tensors)
    changed = json.loads(config)
    changed["tensors"]["a.weight"][1] = 4
    changed["tensors"]["c.weight"] = changed["tensors"].pop("b.weight")
    config_path.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_drafter(tmp_path / "d")
    assert "missing c.weight; unexpected b.weight; a.weight is" in str(caught.value)

    with pytest.raises(CheckpointError, match=r"cannot read .*config.json"):
        checkpoint.load_drafter(tmp_path / "none")


def test_drafter_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds other files"):
        save_drafter(tmp_path / "d")
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "thesis.txt"]


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama"}', '{"format": 1}', "[]", "{", "[" * 9999]
)
def test_a_folder_with_any_config_is_no_drafter(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_bytes(b"weights")
    message = r"holds other files \(config.json and 1 more\), expected a drafter or a new folder"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.require_drafter_folder(folder)
    with pytest.raises(CheckpointError, match=message):
        save_drafter(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_notes_beside_a_drafter_are_not_removed(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d")
    (tmp_path / "d" / "notes.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds other files \(notes.md\)"):
        save_drafter(tmp_path / "d")
    assert checkpoint.load_drafter(tmp_path / "d").name == "parallelspec"


def test_checkpoints_with_notes_outlive_the_rotation(tmp_path: Path) -> None:
    run = Run(0)
    for _ in range(4):
        run.train(1)
        run.save(tmp_path, keep=1)
        if run.step == 2:
            (tmp_path / "step-00000002" / "notes.md").write_text("a good one")
    (tmp_path / "step-back").mkdir()
    (tmp_path / "step-back" / "checkpoint.json").touch()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000004"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-back",
    ]
    checkpoint.clear(tmp_path)
    assert (tmp_path / "step-00000002" / "notes.md").is_file()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000002"


def test_a_save_removes_what_killed_ones_left(tmp_path: Path) -> None:
    """Even of steps that are never saved again."""
    for name in (".step-00000099.0123abcd.tmp", ".step-00000001.0123abcd.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    path = Run(0).save(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_stands_for_its_drafter(tmp_path: Path) -> None:
    Run(0).save(tmp_path / "run" / "checkpoints")
    message = r"run holds a training run that has not ended, expected a finished drafter; go on"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_drafter(tmp_path / "run")
    save_drafter(tmp_path / "run" / "drafter")
    found = checkpoint.load_drafter(tmp_path / "run")
    assert (found.name, found.path) == ("parallelspec", tmp_path / "run" / "drafter")
    shutil.rmtree(tmp_path / "run" / "drafter")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"cannot read .*run/config.json"):
        checkpoint.load_drafter(tmp_path / "run")


def test_drafter_that_does_not_fit_the_module(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d")
    got = checkpoint.load_drafter(tmp_path / "d")
    with pytest.raises(CheckpointError, match="missing bias, weight"):
        got.load_into(torch.nn.Linear(2, 2))


def test_provenance_is_json_and_names_the_run() -> None:
    got = checkpoint.collect_provenance(config=_Config(), data={"path": Path("a.jsonl")})
    assert json.loads(json.dumps(got)) == got
    assert {"command", "git_commit", "date"} <= got.keys()
    if (Path(__file__).parents[2] / ".git").exists():
        assert re.match("[0-9a-f]{40}", got["git_commit"])
    assert got["versions"]["torch"] == torch.__version__
    assert got["config"] == {"num_masks": 4, "taps": [10, 20]}
    assert not Path(got["command"][0]).is_absolute()
