"""Checkpoints: going on equals never having stopped, and damage is named."""

import json
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_target import Touch

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from spec_export.training import checkpoint  # noqa: E402 (needs torch)
from spec_runtime.errors import UserError  # noqa: E402
from spec_runtime.files.writing import sha256  # noqa: E402


class Run:
    """A tiny training run whose draws follow from its step."""

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
            torch.manual_seed(self.step)
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


def refused(act: Callable[[], object]) -> str:
    """Returns the one line with which `act` is refused."""
    with pytest.raises(UserError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_resumed_training_equals_uninterrupted(tmp_path: Path) -> None:
    run = Run(0)
    run.train(3)
    path = run.save(tmp_path, progress={"epoch": 1, "losses": [0.5]}, provenance={"who": "test"})
    expected = run.train(4)
    resumed = Run(1)
    found = resumed.load(path)
    resumed.step = found.step
    assert resumed.train(4) == expected
    assert (found.step, found.progress) == (3, {"epoch": 1, "losses": [0.5]})
    assert found.provenance == {"who": "test"}


def test_averaged_weights_lie_beside_the_raw_ones(tmp_path: Path) -> None:
    run = Run(0)
    weights = {name: weight.detach().clone() for name, weight in run.module.named_parameters()}
    average = {name: weight + 1 for name, weight in weights.items()}
    path = run.save(tmp_path, average=average)
    into = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    checkpoint.load(path, run.module, run.optimizer, into)
    assert all(torch.equal(into[name], average[name]) for name in average)
    assert all(torch.equal(w, weights[name]) for name, w in run.module.named_parameters())
    del into["0.bias"]
    into["2.bias"] = torch.zeros(3)
    message = refused(lambda: checkpoint.load(path, run.module, run.optimizer, into))
    assert "average.safetensors: tensors do not fit: unexpected 0.bias" in message
    assert "2.bias is [2], expected [3]" in message


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
    with pytest.raises(UserError, match=f"{name} has SHA-256 .* expected"):
        run.load(path)
    (path / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        run.load(path)
    (path / "checkpoint.json").write_text('{"format": 9, "files": {}}')
    with pytest.raises(UserError, match="format 9, expected 1"):
        run.load(path)
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        run.load(path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = Run(0).save(tmp_path)
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.LayerNorm(9))
    optimizer = torch.optim.AdamW(other.parameters())
    message = refused(lambda: checkpoint.load(path, other, optimizer))
    assert "missing 1.bias, 1.weight; unexpected 2.bias, 2.weight" in message
    assert "0.weight is [8, 4], expected [9, 4]" in message


@dataclass(frozen=True)
class _Config:
    num_masks: int = 4
    taps: tuple[int, ...] = (10, 20)


def save_drafter(folder: Path) -> dict[str, Any]:
    weight = torch.randn(3, 5)
    state = {"a.weight": weight, "b.weight": weight, "count": torch.tensor([7])}  # a and b tied
    ids = np.array([1, 5, 9], dtype=np.int32)
    checkpoint.save_drafter(folder, state, "parallelspec", _Config(), {"date": "d"}, ids)
    return state


def test_drafter_round_trip(tmp_path: Path) -> None:
    """The file holds bfloat16, and takes the place of an older one."""
    save_drafter(tmp_path / "d")
    state = save_drafter(tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    file = safetensors_torch.load_file(tmp_path / "d" / "drafter.safetensors")
    assert file["a.weight"].dtype == torch.bfloat16
    got = checkpoint.load_drafter(tmp_path / "d")
    assert (got.name, got.provenance) == ("parallelspec", {"date": "d"})
    assert got.config == {"num_masks": 4, "taps": [10, 20]}
    assert got.state.keys() == state.keys()
    stored = {key: t.bfloat16() if t.is_floating_point() else t for key, t in state.items()}
    assert all(torch.equal(got.state[key], stored[key].to(state[key].dtype)) for key in state)
    assert got.state["count"].dtype == torch.int64
    assert got.draft_token_ids is not None
    assert got.draft_token_ids.tolist() == [1, 5, 9]
    assert got.draft_token_ids.dtype == np.int64
    with pytest.raises(UserError, match="missing bias, weight"):
        got.load_into(torch.nn.Linear(2, 2))


def test_who_may_read_a_header_may_read_the_weights(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "d").iterdir()}
    assert len(modes) == 2
    assert set(modes.values()) == {modes["config.json"]}


def test_drafter_damage_is_named(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d")
    config_path, tensor_path = tmp_path / "d/config.json", tmp_path / "d/drafter.safetensors"
    tensors = tensor_path.read_bytes()
    tensor_path.write_bytes(tensors[:-4])
    with pytest.raises(UserError, match=r"drafter.safetensors has SHA-256"):
        checkpoint.load_drafter(tmp_path / "d")

    tensor_path.write_bytes(tensors)
    changed = json.loads(config_path.read_text())
    changed["tensors"]["a.weight"][1] = 4
    changed["tensors"]["c.weight"] = changed["tensors"].pop("b.weight")
    config_path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"missing c.weight; unexpected b.weight; a.weight is"):
        checkpoint.load_drafter(tmp_path / "d")

    with pytest.raises(UserError, match=r"none \(there is nothing\), expected a drafter's folder"):
        checkpoint.load_drafter(tmp_path / "none")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"thesis.txt": "mine"}, r"holds other files \(thesis.txt\)"),
        *(
            ({"config.json": text, "model.safetensors": "weights"}, r"\(config.json and 1 more\)")
            for text in ('{"model_type": "llama"}', '{"format": 1}', "[]", "{", "[" * 9999)
        ),
        ({"notes.md": "mine", "config.json": "", "drafter.safetensors": ""}, r"\(notes.md\)"),
    ],
)
def test_a_drafter_takes_no_place_of_other_files(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    folder = tmp_path / "d"
    if "notes.md" in files:
        save_drafter(folder)
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        if text:
            (folder / name).write_text(text)
    with pytest.raises(UserError, match=f"{message}, expected a drafter or a new folder"):
        checkpoint.require_drafter_folder(folder)
    with pytest.raises(UserError, match=message):
        save_drafter(folder)
    assert {path.name for path in folder.iterdir()} == set(files)
    if "notes.md" in files:
        assert checkpoint.load_drafter(folder).name == "parallelspec"


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
    with pytest.raises(UserError, match=message):
        checkpoint.load_drafter(tmp_path / "run")
    save_drafter(tmp_path / "run" / "drafter")
    found = checkpoint.load_drafter(tmp_path / "run")
    assert (found.name, found.path) == ("parallelspec", tmp_path / "run" / "drafter")
    shutil.rmtree(tmp_path / "run" / "drafter")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match=r"run \(it holds no drafter\), expected a drafter"):
        checkpoint.load_drafter(tmp_path / "run")


def test_provenance_is_json_and_names_the_run() -> None:
    got = checkpoint.collect_provenance(config=_Config(), data={"path": Path("a.jsonl")})
    assert json.loads(json.dumps(got)) == got
    assert {"command", "git_commit", "date"} <= got.keys()
    if (Path(__file__).parents[2] / ".git").exists():
        assert re.match("[0-9a-f]{40}", got["git_commit"])
    assert got["versions"]["torch"] == torch.__version__
    assert got["config"] == {"num_masks": 4, "taps": [10, 20]}
    assert not Path(got["command"][0]).is_absolute()


# ---- foreign or damaged folders ----


def rewrite(folder: Path, header: str, **values: Any) -> None:
    """Replaces values of a header, and the hashes of the files by those of what is there now."""
    facts = json.loads((folder / header).read_text())
    facts["files"] = {name: sha256(folder / name) for name in facts["files"]}
    (folder / header).write_text(json.dumps(facts | values))


HEX = "0" * 64


@pytest.mark.parametrize(
    "values",
    [
        {"step": "3"},
        {"step": 2.5},
        {"step": -1},
        {"progress": []},
        {"provenance": None},
        {"files": []},
        {"files": {}},
        {"files": {"model.safetensors": 5, "states.pt": HEX}},
        {"files": {"../outside": HEX, "model.safetensors": HEX, "states.pt": HEX}},
        {"files": {"/etc/passwd": HEX, "model.safetensors": HEX, "states.pt": HEX}},
        {"files": {"a\0b": HEX, "model.safetensors": HEX, "states.pt": HEX}},
        {"unknown": 1},
        {"format": [1]},
    ],
)
def test_a_checkpoint_header_is_read_with_care(tmp_path: Path, values: dict[str, Any]) -> None:
    run = Run(0)
    path = run.save(tmp_path)
    rewrite(path, "checkpoint.json", **values)
    refused(lambda: run.load(path))


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "5", "", "\xff", '{"a": "\\ud800"}'])
def test_headers_that_are_no_json_objects(tmp_path: Path, content: str) -> None:
    run = Run(0)
    path = run.save(tmp_path / "run")
    (path / "checkpoint.json").write_bytes(content.encode("latin1"))
    refused(lambda: run.load(path))
    save_drafter(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_bytes(content.encode("latin1"))
    refused(lambda: checkpoint.load_drafter(tmp_path / "d"))


def test_the_states_of_a_checkpoint_are_read_with_care(tmp_path: Path) -> None:
    """Hashes fit in all cases: whoever made the file made the header."""
    run = Run(0)
    run.train(1)
    path = run.save(tmp_path / "run")
    good = torch.load(path / "states.pt", weights_only=True)
    optimizer = good["optimizer"]
    wrong_shape = {0: optimizer["state"][0] | {"exp_avg": torch.zeros(7)}}
    cases: list[dict[str, Any] | bytes] = [
        {"optimizer": 5},
        {"optimizer": {}},
        {"optimizer": {"state": 5, "param_groups": 7}},
        {"optimizer": optimizer | {"param_groups": [{"params": [0, 1, 2, 3]}]}},
        {"optimizer": optimizer | {"state": optimizer["state"] | wrong_shape}},
        {"more": Touch(tmp_path / "written")},
        *(b"", b"PK\3\4", b"\x80\x02}q\0."),
    ]
    for values in cases:
        if isinstance(values, bytes):
            (path / "states.pt").write_bytes(values)
        else:
            torch.save(good | values, path / "states.pt")
        rewrite(path, "checkpoint.json")
        refused(lambda: run.load(path))
    assert not (tmp_path / "written").exists()


def test_a_damaged_newest_checkpoint_does_not_block_the_older_one(tmp_path: Path) -> None:
    run = Run(0)
    older = run.save(tmp_path)
    run.train(1)
    newest = run.save(tmp_path)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-notes" / "checkpoint.json").write_text("{}")
    assert checkpoint.latest(tmp_path) == newest
    (newest / "states.pt").write_bytes(b"half")
    with pytest.warns(UserWarning, match=r"states.pt has SHA-256 .* taking step-00000000 instead"):
        assert checkpoint.latest(tmp_path) == older
    (newest / "checkpoint.json").unlink()
    with pytest.warns(UserWarning, match="cannot read .* taking step-00000000 instead"):
        assert checkpoint.latest(tmp_path) == older
    (older / "model.safetensors").unlink()
    assert "holds no whole checkpoint" in refused(lambda: checkpoint.latest(tmp_path))


def test_a_checkpoint_with_nan_is_not_whole(tmp_path: Path) -> None:
    run = Run(0)
    older = run.save(tmp_path)
    run.train(1)
    with torch.no_grad():
        run.module[0].bias[1] = float("nan")
    newest = run.save(tmp_path)
    assert "0.bias holds NaN or infinity" in refused(lambda: run.load(newest))
    with pytest.warns(UserWarning, match="taking step-00000000 instead"):
        assert checkpoint.latest(tmp_path) == older


@pytest.mark.parametrize(
    "values",
    [
        {"name": 5},
        {"config": []},
        {"config": {"taps": 5}},
        {"config": {"taps": ["1"]}},
        {"tensors": []},
        {"tensors": {"a.weight": 5}},
        {"provenance": []},
        {"provenance": {"validation": 5}},
        {"provenance": {"validation": {"accepted_length": "x"}}},
        {"files": {"../d/drafter.safetensors": HEX}},
        {"files": {}},
    ],
)
def test_a_drafter_header_is_read_with_care(tmp_path: Path, values: dict[str, Any]) -> None:
    save_drafter(tmp_path / "d")
    rewrite(tmp_path / "d", "config.json", **values)
    refused(lambda: checkpoint.load_drafter(tmp_path / "d"))


def test_drafter_tensors_are_read_with_care(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save_drafter(folder)
    file = folder / "drafter.safetensors"
    tensors = safetensors_torch.load_file(file)
    nan = torch.full((3, 5), float("nan"), dtype=torch.bfloat16)
    cases = [
        ({"a.weight": nan}, "a.weight holds NaN or infinity"),
        ({"draft_token_ids": torch.tensor([-1])}, "expected a row of int64 of 0 or more"),
        ({"draft_token_ids": torch.zeros(0, dtype=torch.int64)}, "expected a row of int64"),
        ({"draft_token_ids": torch.ones(2, 2)}, "expected a row of int64 of 0 or more"),
    ]
    for changed, message in cases:
        safetensors_torch.save_file(tensors | changed, file)
        signatures = {
            name: [str(t.dtype).removeprefix("torch."), *t.shape]
            for name, t in (tensors | changed).items()
        }
        rewrite(folder, "config.json", tensors=signatures)
        assert message in refused(lambda: checkpoint.load_drafter(folder))
    for content in (b"", b"\xff" * 64, file.read_bytes()[:-9]):
        file.write_bytes(content)
        rewrite(folder, "config.json")
        assert "cannot read" in refused(lambda: checkpoint.load_drafter(folder))
