"""Joint training on a tiny target: losses, stages, files; what comes out makes a bundle."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from said import Said
from tiny_gguf import write_gguf
from tiny_target import save_llama
from tiny_training import train_in_processes
from torch import Tensor
from torch.nn import functional as F

import spec_runtime
from spec_export.build import drafters, make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.drafters import skip_layer
from spec_export.drafters.layers import Batch
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training import batches, checkpoint, joint, recipe
from spec_export.training import run as train
from spec_export.training.trainer import Trainer

RECIPE = """
[target]
model = "./llama"
[drafter]
top_k = 5
{options}
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
DRAFTERS = {
    "recipe": 'name = "parallelspec"\nnum_masks = 1\ntaps = [1]',
    "semi_autoregressive": 'name = "semi_autoregressive"\nhead_width = 16\nnum_guesses = 2',
    "skip_layer": 'name = "skip_layer"\nlayers = 2\nhead = "target"\nexit_layers = [3]',
}
MEDUSA = 'name = "medusa"\nnum_heads = 2\nheads = "own"'
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joint")
    save_llama(folder / "llama", num_hidden_layers=4)
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
    for name, options in (DRAFTERS | {"medusa": MEDUSA}).items():
        (folder / f"{name}.toml").write_text(RECIPE.replace("{options}", options))
    return folder / "recipe.toml"


@pytest.fixture(scope="module")
def finished(path: Path) -> Path:
    """The folder of a run that nothing interrupted. Do not change it."""
    train.run(path, [], path.parent / "finished")
    return path.parent / "finished"


@pytest.fixture(scope="module")
def averaged(path: Path) -> Path:
    """The folder of the same run with averaged weights."""
    train.run(path, ["train.ema=0.9"], path.parent / "averaged")
    return path.parent / "averaged"


def trainer(
    path: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    init: Path | None = None,
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
            train.run(path, list(overrides), out, init=init)
    return made[0]


def adapter_of(made: joint.JointTrainer) -> list[Tensor]:
    return [p for p in made.joint_model.target.parameters() if p.requires_grad]


def some_batch(made: joint.JointTrainer) -> Batch:
    return next(batches.loaded(made.sequences, made.epoch_batches(0)[:1], made.device))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["recipe", "skip_layer"])
def test_a_joint_run_leaves_a_merged_target_and_its_drafter(
    path: Path, finished: Path, tmp_path: Path, drafter: str
) -> None:
    run = finished if drafter == "recipe" else tmp_path / "run"
    if drafter != "recipe":
        train.run(path.with_stem(drafter), [], run)
    before, _ = target.load(target.resolve(str(path.parent / "llama")))
    after, _ = target.load(target.resolve(str(run / "target")))
    changed = {
        name
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert any("q_proj" in name for name in changed)
    assert any("down_proj" in name for name in changed)
    assert not any("norm" in name or "embed" in name or "lm_head" in name for name in changed)

    bundle = make_bundle.build(
        BuildOptions(str(run / "target"), [], [run / "drafter"], out=tmp_path / "bundle", lanes=1)
    )
    engine = spec_runtime.load(bundle, threads=1, lookup=False)
    assert spec_runtime.bundle.manifest.read(bundle).manifest.target.target_modified
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
    batch, model = some_batch(made), made.joint_model
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


@every_drafter
def test_the_drafters_gradient_reaches_the_target(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Every layer that the drafter reads through, and no other."""
    made = trainer(path.with_stem(drafter), tmp_path, monkeypatch, "joint.backbone_weight=0.0")
    loss, _ = made.joint_model(some_batch(made), torch.Generator().manual_seed(0))
    loss.backward()
    reached = {
        int(name.split("layers.")[1][0])
        for name, p in made.joint_model.target.named_parameters()
        if p.grad is not None and p.grad.any()
    }
    assert reached == ({0, 1, 2} if drafter == "skip_layer" else {0, 1, 2, 3})


def test_dropout_is_for_training_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("joint.lora_dropout=0.5", "joint.layer_dropout=0.5")
    made = trainer(path, tmp_path, monkeypatch, *options)
    for parameter in adapter_of(made):
        torch.nn.init.normal_(parameter, std=0.1)
    batch = some_batch(made)
    losses = {
        made.joint_model(batch, torch.Generator().manual_seed(seed))[0].item() for seed in (0, 0, 1)
    }
    assert len(losses) == 3, "the adapter's dropout goes by torch's own generator"
    assert made.validate() == made.validate()
    assert made.joint_model.training


def test_layer_dropout_skips_deeper_layers_more_often(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole sequences, layer l of 4 with probability 0.8 · (2^(l/3) − 1); taps see it too."""
    llama, _ = target.load(target.resolve(str(path.parent / "llama")))
    ends = target.ends(Backbone.from_transformers(llama))
    token_BT = torch.randint(98, (400, 3), generator=torch.Generator().manual_seed(0))
    batch = Batch(token_BT, torch.ones(400, 3, dtype=torch.bool), None, torch.full((400,), 3))
    drafter = skip_layer.Drafter(skip_layer.Config(layers=2, exit_layers=(3,)), ends)
    settings = recipe.JointSection(layer_dropout=0.8, lora_dropout=0.0)
    model = joint.JointModel(llama, drafter, settings)
    skipped: list[Tensor] = []
    for layer in llama.model.layers:
        layer.register_forward_hook(
            lambda module, given, out: skipped.append((given[0] == out).flatten(1).all(1))
        )
    live: list[Batch] = []
    loss = drafter.loss

    def recorded(batch: Batch, generator: torch.Generator | None) -> Any:
        live.append(batch)
        return loss(batch, generator)

    monkeypatch.setattr(drafter, "loss", recorded)
    losses = [model(batch, torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    expected = 0.8 * (2 ** (torch.arange(4) / 3) - 1)
    share = torch.stack(skipped[:4]).float().mean(1)
    assert share[0] == 0
    assert (share - expected).abs().max() < 0.075  # three standard errors of 400 draws
    assert live[0].feature_BTF is not None
    _, behind_2, behind_3 = live[0].feature_BTF.chunk(3, -1)
    assert torch.equal((behind_2 == behind_3).flatten(1).all(1), skipped[2])


def test_a_second_stage_starts_from_the_heads_of_the_first(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medusa-2's way: heads alone, then both, with a warm-up that is whole for the adapter.

    The heads have output matrices of their own, whose rows belong to the vocabulary of stage 1.
    """
    stage_1, stage_2 = path.with_stem("stage_1"), path.with_stem("stage_2")
    text = path.with_stem("medusa").read_text() + "[export]\ndraft_vocab = 40\n"
    stage_2.write_text(text)
    stage_1.write_text(re.sub(r"\[joint\](.*\n)+?(?=\[export\])", "", text))
    heads = train.run(stage_1, [], tmp_path / "heads")
    saved = checkpoint.load_drafter(heads)
    other_rows = path.with_name("other.jsonl")  # of other commonest tokens
    other_rows.write_text(path.with_name("data.jsonl").read_text().replace("ab, cd.", "0123 xyz"))
    overrides = [f"data.path={json.dumps(str(other_rows))}", "train.warmup=4"]
    overrides.append("train.schedule=constant")

    made = trainer(stage_2, tmp_path / "joint", monkeypatch, *overrides, init=heads)
    fresh = trainer(stage_2, tmp_path / "fresh", monkeypatch, *overrides)
    assert saved.draft_token_ids is not None
    ids = saved.draft_token_ids.tolist()
    assert made.drafter.draft_token_ids.tolist() == ids != fresh.drafter.draft_token_ids.tolist()
    for name, tensor in made.drafter.state_dict().items():
        assert torch.equal(tensor, saved.state[name])
    rates = []
    start_step = made.start_step

    def recorded() -> None:
        rates.append([group["lr"] for group in made.optimizer.param_groups])
        start_step()

    monkeypatch.setattr(made, "start_step", recorded)
    made.train()
    shares = [0.25, 0.5, 0.75, 1, 1]  # before step 1 … 5: what the step before it had
    assert rates[1:] == [pytest.approx([3e-3 * share, 2e-3 * share]) for share in shares]
    joint_drafter = checkpoint.load_drafter(made.export())
    assert joint_drafter.provenance["init"]["earlier"]["steps"] == 6
    assert not torch.equal(joint_drafter.state["output_heads.0"], saved.state["output_heads.0"])

    with pytest.raises(ValueError, match=r"got no --init: pass the same --init again"):
        train.run(stage_2, overrides, tmp_path / "joint", resume=True)
    with pytest.raises(ValueError, match=r"a head over 40 tokens, .* set export.draft_vocab to 40"):
        train.run(stage_2, ["export.draft_vocab=41"], tmp_path / "more", init=heads)
    with pytest.raises(ValueError, match=r"weights of medusa, expected those of parallelspec"):
        train.run(path, [], tmp_path / "other", init=heads)


def test_the_drafters_weight_rises_as_a_sine(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(path, tmp_path, monkeypatch, "joint.drafter_ramp=sine")
    weights = []
    for made.step in range(6):
        made.start_step()
        assert made.drafter.optimizer_step == made.step
        weights.append(made.joint_model.drafter_weight)
    assert weights[2] == pytest.approx(0.2 * 0.5**0.5)
    assert weights[5] == pytest.approx(0.2)
    assert weights == sorted(weights)


def test_an_interrupted_joint_run_ends_as_an_uninterrupted_one(
    path: Path, averaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, out = Trainer.save_checkpoint, tmp_path / "part"

    def interrupted(self: Trainer) -> None:
        save(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save_checkpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(path, ["train.ema=0.9"], out)
    train.run(path, ["train.ema=0.9"], out, resume=True)
    files = ("curves.csv", "target/model.safetensors", "drafter/drafter.safetensors")
    for name in files:
        assert (averaged / name).read_bytes() == (out / name).read_bytes(), name


def test_drafter_and_adapter_are_exported_with_their_averages(
    finished: Path, averaged: Path
) -> None:
    last = Path("checkpoints", "step-00000006")
    raw, same = (load_file(run / last / "model.safetensors") for run in (finished, averaged))
    assert all(torch.equal(raw[name], same[name]) for name in raw)
    average = load_file(averaged / last / "average.safetensors")
    assert {name.split(".")[0] for name in average} == {"drafter", "adapter"}
    merged = [target.load(target.resolve(str(run / "target")))[0] for run in (finished, averaged)]
    pairs = zip(*(model.parameters() for model in merged), strict=True)
    assert sum(not torch.equal(a, b) for a, b in pairs) == 28  # the seven products of four layers


def test_the_two_rates_are_their_own(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(path, tmp_path, monkeypatch)
    assert [group["base_lr"] for group in made.optimizer.param_groups] == [3e-3, 2e-3]
    made = trainer(path.with_stem("semi_autoregressive"), tmp_path / "three", monkeypatch)
    rates = [group["base_lr"] for group in made.optimizer.param_groups]
    assert rates == pytest.approx([3e-3, 20 * 3e-3, 2e-3])  # the second is α's
    assert recipe.load(path).joint == recipe.JointSection(
        lora_rank=4, lora_dropout=0.0, backbone_lr=2e-3
    )


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batches(path: Path, tmp_path: Path) -> None:
    """With the target whole in both, or spread over them."""
    runs = []
    for name, processes in (("one", 1), ("two", 2), ("sharded", 2)):
        options = [f"train.grad_accumulation={2 // processes}"]
        options += ["train.batch_tokens=150", "joint.backbone_loss=distill", "train.ema=0.9"]
        options += ["train.max_steps=3"]
        words = ["train", str(path.with_stem("skip_layer")), "--out", str(tmp_path / name)]
        words += [word for option in options for word in ("--set", option)]
        environment = {"ACCELERATE_USE_FSDP": "true"} if name != "two" else {}
        runs.append((processes, environment, str(tmp_path / f"{name}.log"), words))
    train_in_processes(runs)
    curves, said = {}, {}
    for name in ("one", "two", "sharded"):
        log = (tmp_path / f"{name}.log").read_text()
        assert (tmp_path / name / "drafter").is_dir(), log[-3000:]
        said[name] = [line for line in log.splitlines() if line.startswith("sharded")]
        with (tmp_path / name / "curves.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        keys = ("loss", "accepted_length")
        curves[name] = [float(row[key]) for row in rows for key in keys if row[key]]
    assert len(curves["one"]) == 4
    # all but embedding, head, norms and adapter is halved; one process has nobody to share with
    share = r"sharded: a process holds (\d+)% of the target's 0.0 M parameters"
    assert not said["one"] + said["two"]
    assert len(said["sharded"]) == 1
    found = re.fullmatch(share, said["sharded"][0])
    assert found is not None, said
    assert 50 < int(found[1]) < 80
    for name in ("two", "sharded"):
        assert curves[name] == pytest.approx(curves["one"], rel=1e-3)
        require_equal_moves(path.parent / "llama", tmp_path / "one", tmp_path / name)


def require_equal_moves(start: Path, one: Path, other: Path) -> None:
    """Compares what two runs made of a target, by how far each of its products moved."""
    folders = (start, one / "target", other / "target")
    models = [target.load(target.resolve(str(folder)))[0] for folder in folders]
    moved = 0
    for before, a, b in zip(*(model.parameters() for model in models), strict=True):
        moved += not torch.equal(before, a)
        # Adam's first steps follow a gradient's sign, which rounding may turn where it is tiny
        assert (a - b).norm() <= 0.05 * (a - before).norm() + 1e-6
    assert moved == 28  # the seven products of four layers


def test_a_gguf_target_is_merged_and_saved(path: Path, tmp_path: Path) -> None:
    write_gguf(path.parent / "tiny.gguf")
    recipe_path = path.with_stem("gguf")
    recipe_path.write_text(path.read_text().replace("./llama", "./tiny.gguf"))
    train.run(recipe_path, [], tmp_path / "run")
    before, _ = target.load(target.resolve(str(path.parent / "tiny.gguf")))
    after, tokenizer = target.load(target.resolve(str(tmp_path / "run" / "target")))
    changed = [
        name
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert changed
    assert all("proj" in name for name in changed)
    assert tokenizer.eos_token_id == 2


def test_a_target_that_cannot_be_saved_loses_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(target, "save", fail)
        with pytest.raises(ValueError, match=r"could not write the merged target .*--resume"):
            train.run(path, [], tmp_path / "run")
    kept = sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir())
    assert kept == ["best", "checkpoints", "drafter"]
    train.run(path, [], tmp_path / "run", resume=True)
    target.load(target.resolve(str(tmp_path / "run" / "target")))


def test_files_of_others_in_the_place_of_the_target_are_found_before_training(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "target").mkdir(parents=True)
    (tmp_path / "run" / "target" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.txt\)"):
        train.run(path, [], tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_joint_drafter_is_at_home_with_its_merged_target_alone(
    path: Path, finished: Path
) -> None:
    saved, said = checkpoint.load_drafter(finished / "drafter"), Said()
    drafters.warn_of_doubts(saved, target.resolve(str(finished / "target")), said)
    assert not said.lines
    drafters.warn_of_doubts(saved, target.resolve(str(path.parent / "llama")), said)
    assert "was trained for other weights than those of llama" in said.text
