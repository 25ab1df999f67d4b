"""Joint training on a tiny target: losses, stages, files; what comes out makes a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_target import save_llama
from torch import Tensor
from torch.nn import functional as F

import spec_runtime
from spec_export import joint, make_bundle, recipe, target, train
from spec_export.drafters.layers import Batch

RECIPE = """
[target]
model = "./llama"
[drafter]
name = "parallelspec"
num_masks = 1
taps = [1]
top_k = 5
[data]
path = "data.jsonl"
max_length = 64
validation_fraction = 0.2
[train]
batch_tokens = 250
lr = 3e-3
max_steps = 6
precision = "fp32"
log_every = 1
checkpoint_every = 3
[joint]
lora_rank = 4
lora_dropout = 0.0
backbone_lr = 2e-3
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joint")
    save_llama(folder / "llama")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": "ab, cd. " * (1 + i % 3)},
            ]
        }
        for i in range(10)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def trainer(
    path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> joint.JointTrainer:
    """As `train.run` makes it, before its first step."""
    made: list[joint.JointTrainer] = []

    class Stop(Exception):
        pass

    def stop(self: joint.JointTrainer) -> None:
        made.append(self)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(joint.JointTrainer, "train", stop)
        with pytest.raises(Stop):
            train.run(path, list(overrides), out)
    return made[0]


def adapter_of(made: joint.JointTrainer) -> list[Tensor]:
    return [p for p in made.both.target.parameters() if p.requires_grad]


def some_batch(made: joint.JointTrainer) -> Batch:
    with torch.enable_grad():
        return made.batch(made._epoch_batches(0)[0])


def test_a_joint_run_leaves_a_merged_target_and_its_drafter(path: Path, tmp_path: Path) -> None:
    folder = train.run(path, [], tmp_path / "run")
    before, _ = target.load(target.resolve(str(path.parent / "llama")))
    after, _ = target.load(target.resolve(str(tmp_path / "run" / "target")))
    changed = {
        name
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert any("q_proj" in name for name in changed)
    assert any("down_proj" in name for name in changed)
    assert not any("norm" in name or "embed" in name or "lm_head" in name for name in changed)

    bundle = make_bundle.build(
        str(tmp_path / "run" / "target"), [], folder, out=tmp_path / "bundle"
    )
    engine = spec_runtime.load(bundle, threads=1, also="none")
    assert spec_runtime.bundle.read(bundle).manifest.target.target_modified
    plain = engine.with_drafter("none").generate("say 3", max_new_tokens=24, ignore_eos=True)
    drafted = engine.generate("say 3", max_new_tokens=24, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    prompt = engine.encode("say 3")
    with torch.no_grad():
        logits = after(torch.tensor([prompt + plain.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == plain.token_ids


@pytest.mark.parametrize("kind", ["ce", "distill"])
def test_the_loss_is_both_parts(
    kind: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(path, tmp_path, monkeypatch, f"joint.backbone_loss={kind}")
    batch, model = some_batch(made), made.both
    for parameter in adapter_of(made):  # an adapter that does something
        torch.nn.init.normal_(parameter, std=0.1)
    got, _ = model(batch, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.target(batch.token_BT).logits.log_softmax(-1)
        with model.target.disable_adapter():
            original = model.target(batch.token_BT).logits.log_softmax(-1)
        labelled = batch.loss_BT[:, 1:]
        if kind == "ce":
            label = batch.token_BT[:, 1:][labelled]
            backbone = F.nll_loss(logits[:, :-1][labelled], label)
        else:
            p, q = original[:, :-1][labelled], logits[:, :-1][labelled]
            backbone = (p.exp() * (p - q)).sum(-1).mean()
            assert backbone > 1e-4
        live = Batch(batch.token_BT, batch.loss_BT, model.features(batch.token_BT), batch.length_B)
        drafting, _ = model.drafter.loss(live, torch.Generator().manual_seed(0))
    assert float(got) == pytest.approx(float(backbone + 0.2 * drafting), rel=1e-5)


def test_the_drafters_gradient_reaches_the_target(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(path, tmp_path, monkeypatch, "joint.backbone_weight=0.0")
    loss, _ = made.both(some_batch(made), torch.Generator().manual_seed(0))
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in adapter_of(made))


def test_the_adapter_rests_while_the_drafter_trains_alone(path: Path, tmp_path: Path) -> None:
    train.run(path, ["joint.drafter_only_steps=6"], tmp_path / "run")
    before, _ = target.load(target.resolve(str(path.parent / "llama")))
    after, _ = target.load(target.resolve(str(tmp_path / "run" / "target")))
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_drafters_weight_rises_as_a_sine(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(path, tmp_path, monkeypatch, "joint.drafter_ramp=sine")
    weights = []
    for made.step in range(6):
        made.start_step()
        weights.append(made.both.drafter_weight)
    assert weights[2] == pytest.approx(0.2 * 0.5**0.5)
    assert weights[5] == pytest.approx(0.2)
    assert weights == sorted(weights)


def test_an_interrupted_joint_run_ends_as_an_uninterrupted_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.run(path, [], tmp_path / "whole")
    save = train.Trainer._save

    def interrupted(self: train.Trainer) -> None:
        save(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(path, [], tmp_path / "part")
    train.run(path, [], tmp_path / "part", resume=True)
    curves: list[Any] = [(tmp_path / name / "curves.csv").read_text() for name in ("whole", "part")]
    assert curves[0] == curves[1]
    for name in ("target/model.safetensors", "drafter/drafter.safetensors"):
        a, b = ((tmp_path / run / name).read_bytes() for run in ("whole", "part"))
        assert a == b, name


def test_the_two_rates_are_their_own(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(path, tmp_path, monkeypatch)
    assert [group["base_lr"] for group in made.optimizer.param_groups] == [3e-3, 2e-3]
    assert recipe.load(path).joint == recipe.JointSection(
        lora_rank=4, lora_dropout=0.0, backbone_lr=2e-3
    )
