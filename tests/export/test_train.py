"""Tests training runs on a tiny target: what they learn, leave and refuse."""

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from said import Said
from tiny_backbone import longrope
from tiny_target import save_llama
from tiny_training import curve, stored, train_in_processes

from spec_export.build import drafters as bundling
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training import checkpoint, features, precision, trainer
from spec_export.training import run as train
from spec_export.training.trainer import Trainer


def test_a_run_leaves_a_drafter_and_its_curves(finished: Path) -> None:
    saved = checkpoint.load_drafter(finished / "drafter")
    assert saved.name == "parallelspec"
    assert (saved.config["num_masks"], saved.config["taps"]) == (2, [1])
    assert saved.draft_token_ids is not None
    assert len(saved.draft_token_ids) == 60
    assert {0, 1} <= set(saved.draft_token_ids.tolist()), "special tokens are always in"
    rows = curve(finished)
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert [int(row["step"]) for row in rows if row["loss"]] == [4, 7]
    assert losses[1] < losses[0]
    validated = [row for row in rows if row["accepted_length"]]
    assert [int(row["step"]) for row in validated] == [3, 6, 7]
    assert all(1 <= float(row["accepted_length"]) <= 4 for row in validated)
    for row in validated:
        for k in range(3):
            assert 0 <= float(row[f"top1_{k}"]) <= float(row[f"top5_{k}"]) <= 1
    measured = saved.provenance["validation"]
    assert measured["accepted_length"] == float(validated[-1]["accepted_length"])
    assert saved.provenance["steps"] == 7
    assert saved.provenance["target"] == "llama"
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == [
        "step-00000006",
        "step-00000007",
    ]


# The first process computes its features while the second waits for them, out of the group's sight,
# which would give up.
LATE_FEATURES = """
import pathlib, time
from spec_export.training import features
here, wait, forward = pathlib.Path({!r}), features.wait, features._forward
def waiting(*arguments):
    (here / "waits").touch()
    wait(*arguments)
    (here / "goes on").touch()
def late(*arguments):
    for _ in range(6000):
        if (here / "waits").exists():
            break
        time.sleep(0.01)
    found = forward(*arguments)
    if (here / "goes on").exists():
        (here / "early").touch()
    return found
features.wait, features._forward = waiting, late
"""


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batches(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    """The same optimiser steps, their gradients summed in another order. The second process waits
    for the features of the first, however long they take."""
    losses = {}
    for processes in (1, 2):
        out = tmp_path / f"{processes}"
        options = [f"train.grad_accumulation={2 // processes}", "drafter.anchor_fraction=1.0"]
        options += ["train.ema=0.9", "train.log_every=1"]
        if processes == 1:
            train.run(recipe, options, out, cache=finished / "features")
        else:
            sets = [word for option in options for word in ("--set", option)]
            words = ["train", str(recipe), "--out", str(out), *sets]
            late = LATE_FEATURES.format(str(tmp_path))
            train_in_processes([(2, {}, str(tmp_path / "log"), words)], late)
            assert (tmp_path / "waits").exists()
            assert not (tmp_path / "early").exists()
        losses[processes] = [float(row["loss"]) for row in curve(out) if row["loss"]]
    assert len(losses[1]) >= 3
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    one, two = (stored(tmp_path / n, 7, "average") for n in "12")
    # Adam's first steps follow a gradient's sign, which rounding may turn where it is tiny
    assert all((one[name] - two[name]).norm() <= 0.01 * one[name].norm() for name in one)


def test_a_step_of_fewer_batches_is_their_mean(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    """An epoch of one batch gives the same steps, however many batches a step may have."""
    losses = []
    for most in (1, 16):
        options = ["train.batch_tokens=10000", "train.log_every=1", "train.max_steps=2"]
        options.append(f"train.grad_accumulation={most}")
        train.run(recipe, options, tmp_path / f"{most}", cache=finished / "features")
        losses.append([row["loss"] for row in curve(tmp_path / f"{most}")])
    assert losses[0] == losses[1]


def test_features_computed_in_each_step_are_the_stored_ones(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    """But for how bfloat16 products of other batches round."""
    train.run(recipe, ["data.store_features=false"], tmp_path)
    assert not (tmp_path / "features").exists()
    rows, expected = ([row for row in curve(out) if row["loss"]] for out in (tmp_path, finished))
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert float(row["loss"]) == pytest.approx(float(other["loss"]), rel=1e-2)


@pytest.mark.parametrize("num_batches", range(1, 6))
def test_all_processes_have_equally_many_batches(num_batches: int) -> None:
    """A sharded target needs them all in each forward pass; every batch is somebody's."""
    shares = []
    for process in range(2):
        run = types.SimpleNamespace(
            accelerator=types.SimpleNamespace(process_index=process, num_processes=2),
            steps_per_epoch=1,
            batches_per_step=6,
            _epoch=0,
            _order=list(range(num_batches)),
        )
        shares.append(Trainer._micro_batches(run, 0))  # type: ignore[arg-type]
    assert len(shares[0]) == len(shares[1]) == -(-num_batches // 2)
    assert {batch for share in shares for batch in share} == set(range(num_batches))


def changed_target(recipe: Path, **changes: Any) -> None:
    """Changes the config of a recipe's target."""
    path = recipe.parent / "llama" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_drafter_learns_with_the_rotary_factors_of_its_rows(copied: Path, tmp_path: Path) -> None:
    """Rows of 96 tokens take the short factors of an original context of 128; a bundle with the
    long ones warns."""
    rope = longrope(4) | {"original_max_position_embeddings": 128}
    changed_target(copied, rope_parameters=rope)
    saved = checkpoint.load_drafter(train.run(copied, ["train.max_steps=1"], tmp_path / "run"))
    assert saved.provenance["rope_factors"] == "short"
    model, _ = target.load(target.resolve(str(copied.parent / "llama")))
    short, long = (Backbone.from_transformers(model, (), length) for length in (128, 200))
    bundling.load_module(saved, short.config, target.ends(short))
    with pytest.warns(UserWarning, match="learnt with the target's short rotary factors"):
        bundling.load_module(saved, long.config, target.ends(long))


def test_a_one_pass_drafter_has_a_table_of_bigrams_unless_the_recipe_wants_none(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    table = checkpoint.load_drafter(finished / "drafter").bigrams
    assert table is not None
    assert len(table["bias"]) == len(table["previous"]) > 0
    settings = ["train.max_steps=1", "export.bigrams=false"]
    train.run(recipe, settings, tmp_path, cache=finished / "features")
    assert checkpoint.load_drafter(tmp_path / "drafter").bigrams is None


def test_training_starts_from_another_drafter(recipe: Path, finished: Path, tmp_path: Path) -> None:
    train.run(
        recipe, ["train.lr=1e-12"], tmp_path, cache=finished / "features", init=finished / "drafter"
    )
    before, after = (
        checkpoint.load_drafter(folder / "drafter").state for folder in (finished, tmp_path)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_ends_when_its_time_is_over(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.0, 0.3, 1.1])
    monkeypatch.setattr(Trainer, "time_share", lambda trainer, started: next(shares))
    train.run(recipe, ["train.max_minutes=1", "train.log_every=1"], tmp_path)
    assert [int(row["step"]) for row in curve(tmp_path) if row["loss"]] == [1, 2, 3]
    assert checkpoint.load_drafter(tmp_path / "drafter").provenance["steps"] == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.name=nosuch", "got drafter 'nosuch', expected one of parallelspec"),
        ("drafter.num_mask=3", "num_mask"),
        ("drafter.style=hydra", "style: got str 'hydra'"),
        ("target.model=./nowhere", "nowhere"),
        ("drafter.taps=[7]", "got taps"),
    ],
)
def test_bad_recipes_write_nothing(
    recipe: Path, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train.run(recipe, [override], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("bf16", "chosen"), [(50.0, "fp32"), (1.5, "bf16")])
def test_what_is_slow_here_is_not_chosen(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: float, chosen: str
) -> None:
    """A CPU without instructions for bfloat16 takes 50 times as long: features, too, are fp32."""
    found, build = [], features.build
    monkeypatch.setattr(precision, "seconds", {torch.bfloat16: bf16, torch.float32: 1.0}.get)

    def building(cache: Path, examples: Any, model: Any, *more: Any) -> Any:
        found.append(str(model.dtype))
        return build(cache, examples, model, *more)

    monkeypatch.setattr(features, "build", building)
    said = Said()
    words = ["train.precision=auto", "train.max_steps=1"]
    train.run(recipe, words, tmp_path / "run", report=said)
    assert f"training in {chosen}, the faster on this machine" in said.lines
    assert found == [{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[chosen]]
    saved = checkpoint.load_drafter(tmp_path / "run" / "drafter")
    assert saved.provenance["recipe"]["train"]["precision"] == chosen


def test_freed_memory_goes_back_to_the_system(
    recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of all sizes leave gaps in glibc's heap: a long run would fill the machine."""
    given_back = []
    monkeypatch.setattr(trainer, "GIVE_BACK_EVERY", 2)
    monkeypatch.setattr(trainer, "give_back_memory", lambda: given_back.append("training"))
    monkeypatch.setattr(features, "give_back_memory", lambda: given_back.append("features"))
    train.run(recipe, ["train.max_steps=5"], tmp_path / "run", cache=finished / "features")
    assert given_back == ["training"] * 2
    train.run(recipe, ["train.max_steps=1"], tmp_path / "other")
    assert given_back == ["training"] * 2 + ["features"]


def test_answers_of_another_target_are_refused(
    copied: Path, finished: Path, tmp_path: Path
) -> None:
    fingerprint = target.fingerprint(target.resolve(str(copied.parent / "llama")))
    sidecar = copied.parent / "data.jsonl.state.json"

    def run(*options: str) -> None:
        cache = finished / "features"
        train.run(copied, ["train.max_steps=1", *options], tmp_path / "run", cache=cache)

    for writer, message in (
        ({"target": "qwen"}, "holds answers of qwen, expected those of the target llama"),
        ({"target": "qwen", "fingerprint": "1"}, "holds answers of qwen, expected"),
        ({"target": "llama", "fingerprint": "1"}, "of llama of the same name with other weights"),
        ({}, "cannot read .*state.json: 'target', expected what distill wrote"),
    ):
        sidecar.write_text(json.dumps({"settings": writer}))
        with pytest.raises(ValueError, match=message):
            run()
    sidecar.write_text("[" * 5000)
    with pytest.raises(ValueError, match=r"cannot read .*state\.json: it is nested too deeply"):
        run()
    sidecar.write_text(json.dumps({"settings": {"target": "qwen"}}))
    run("data.allow_other_target=true")
    shutil.rmtree(tmp_path / "run")
    sidecar.write_text(json.dumps({"settings": {"target": "renamed", "fingerprint": fingerprint}}))
    run()


def test_tokens_that_the_target_does_not_have_are_refused(copied: Path, tmp_path: Path) -> None:
    """A tokenizer may know more of them than its model."""
    save_llama(copied.parent / "llama", vocab_size=40)
    with pytest.raises(ValueError, match=r"token id \d+ in the data, expected ids below 40"):
        train.run(copied, [], tmp_path / "run")
