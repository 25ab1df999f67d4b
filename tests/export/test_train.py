"""Training on a tiny target: files, exact resumption, the measures of validation, the cache."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_target import save_llama

from spec_export import target
from spec_export.training import batches, checkpoint, features, validate
from spec_export.training import run as train
from spec_export.training.data import Example
from spec_export.training.trainer import Trainer
from spec_runtime.trees.budget import Budget

NUM_ROWS = 14
RECIPE = """
[target]
model = "./llama"

[drafter]
name = "parallelspec"
num_masks = 2
taps = [1]
top_k = 5
soft_weight = 0.5
anchor_fraction = 0.5

[data]
path = "data.jsonl"
max_length = 96
validation_fraction = 0.2

[train]
batch_tokens = 250
grad_accumulation = 2
lr = 3e-3
max_steps = 7
precision = "fp32"
log_every = 4
validate_every = 3
checkpoint_every = 2

[export]
draft_vocab = 60
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe beside its target and data; answers of many lengths."""
    folder = tmp_path_factory.mktemp("recipe")
    save_llama(folder / "llama")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": "ab, cd. " * (1 + i % 5) + str(i)},
            ]
        }
        for i in range(NUM_ROWS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    train.run(recipe, out=recipe.parent / "run")
    return recipe.parent / "run"


def curve(out: Path) -> list[dict[str, str]]:
    with (out / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_a_drafter_and_its_curves(finished: Path) -> None:
    saved = checkpoint.load_drafter(finished / "drafter")
    assert saved.name == "parallelspec"
    assert (saved.config["num_masks"], saved.config["taps"]) == (2, [1])
    assert saved.draft_token_ids is not None
    assert len(saved.draft_token_ids) == 60
    assert {0, 1} <= set(saved.draft_token_ids.tolist()), "special tokens are always in"
    rows = curve(finished)
    assert [int(row["step"]) for row in rows if row["loss"]] == [4, 7]
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
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == [
        "step-00000006",
        "step-00000007",
    ]


def test_two_processes_train_as_one_with_twice_the_batches(recipe: Path, tmp_path: Path) -> None:
    """The same optimiser steps, their gradients summed in another order."""
    losses = {}
    for processes in (1, 2):
        out = tmp_path / f"{processes}"
        launch = ["torch.distributed.run", "--nproc-per-node", "2", "-m"] * (processes == 2)
        options = f"train.grad_accumulation={2 // processes} drafter.anchor_fraction=1.0".split()
        sets = [word for option in (*options, "train.log_every=1") for word in ("--set", option)]
        folders = ["--out", str(out), "--cache", str(recipe.parent / "run" / "features")]
        subprocess.run(
            [sys.executable, "-m", *launch, "spec_export", "train", str(recipe), *folders, *sets],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )
        losses[processes] = [float(row["loss"]) for row in curve(out) if row["loss"]]
    assert len(losses[1]) >= 3
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)


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


def test_training_lowers_the_loss(finished: Path) -> None:
    losses = [float(row["loss"]) for row in curve(finished) if row["loss"]]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("num_saves", [1, 3])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    recipe: Path,
    finished: Path,
    num_saves: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped at step 2 or 6 (in the middle of a line of the curve), bit for bit."""
    save, saved = Trainer.save_checkpoint, []

    def interrupted(trainer: Trainer) -> None:
        save(trainer)
        saved.append(trainer.step)
        if len(saved) == num_saves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save_checkpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(recipe, out=tmp_path / "run", cache=finished / "features")
    assert saved[-1] == 2 * num_saves
    assert not (tmp_path / "run" / "drafter").exists()
    torch.manual_seed(99)  # nothing may depend on what the process did before
    train.run(recipe, out=tmp_path / "run", resume=True, cache=finished / "features")
    assert curve(tmp_path / "run") == curve(finished)
    name = Path("drafter", "drafter.safetensors")
    assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_a_run_is_not_overwritten_nor_continued_with_another_recipe(
    recipe: Path, finished: Path
) -> None:
    with pytest.raises(ValueError, match="already holds a training run: pass --resume"):
        train.run(recipe, out=finished)
    with pytest.raises(ValueError, match="was trained with another recipe"):
        train.run(recipe, ["train.lr=1e-4"], finished, resume=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.name=nosuch", "got drafter 'nosuch', expected one of parallelspec"),
        ("drafter.num_mask=3", "num_mask"),
        ("drafter.style=hydra", "got style 'hydra'"),
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


def test_the_share_of_padding() -> None:
    """Lengths 2 4 4 1: two to four, one alone, one to two of its own length."""
    groups = [np.array([0, 1]), np.array([3]), np.array([2, 2])]
    assert batches.padding_share(np.array([2, 4, 4, 1]), groups) == pytest.approx(2 / 17)
    assert batches.padding_share(np.array([2, 4, 4, 1]), groups[1:]) == 0


def test_training_says_how_much_is_padding(
    recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, of the batches that it trains on."""
    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "print_line", lambda trainer, line: lines.append(line))
        train.run(recipe, ["train.max_steps=1"], tmp_path, cache=finished / "features")
    held_out = features.FeatureCache(finished / "features").length_N
    said = [line for line in lines if "padding" in line]
    assert len(said) == 1
    assert said[0].startswith("batches: ")
    assert 0 < float(said[0].split()[1].rstrip("%")) < 100 * (1 - held_out.mean() / held_out.max())


# ---- validation ----

#                    0  1  2  3  4  5    answer: 6 7 8 9, root of the first step: 6
TOKENS = np.array([3, 5, 6, 7, 8, 9])
ANSWER = np.array([0, 0, 1, 1, 1, 1], dtype=bool)
WRONG = 50


def guesses(right: dict[int, list[bool]], num_guesses: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """ids and log-probabilities [R, K, 2]: the first choice right where told, else wrong."""
    ids = np.full((5, num_guesses, 2), WRONG)
    ids[..., 1] += 1
    for t, row in right.items():
        for k, is_right in enumerate(row):
            if is_right and t + 2 + k < len(TOKENS):
                ids[t, k, 0] = TOKENS[t + 2 + k]
    return ids, np.log(np.broadcast_to([0.6, 0.3], ids.shape))


@pytest.mark.parametrize(
    ("right", "steps"),
    [
        ({}, 3),  # one token a step
        ({1: [True, True]}, 1),  # 7 8 and the bonus 9
        ({1: [True, False], 3: [False]}, 2),  # 7 and bonus 8, then bonus 9
        ({1: [False, True]}, 3),  # a guess below a wrong one is of no use
        ({1: [True, True, True]}, 1),  # 7 8 9: nothing is left for the bonus
        ({2: [True], 3: [True]}, 2),  # bonus 7; then 8 and the bonus 9
    ],
)
def test_simulated_drafting(right: dict[int, list[bool]], steps: int) -> None:
    ids, log_probs = guesses(right)
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(8)) == (3, steps)


def test_simulated_drafting_takes_the_second_choice_if_the_budget_has_it() -> None:
    ids, log_probs = guesses({})
    ids[1, 0] = [WRONG, 7]
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(8)) == (3, 2)
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(2)) == (3, 3)


def test_an_answer_from_the_first_token_on_is_simulated_from_the_second() -> None:
    ids, log_probs = guesses({})
    everything = np.ones(6, dtype=bool)
    assert validate.simulate(TOKENS, everything, ids, log_probs, Budget(8)) == (4, 4)


def test_guess_accuracy_counts_answer_tokens() -> None:
    """Rows 0 … 3 guess 6 7 8 9; one and two later: 7 8 9 and 8 9."""
    ids, _ = guesses({0: [True, True, True], 1: [True, False], 2: [False, True]})
    ids[3, 0] = [WRONG, 9]
    hit, hit5, count = validate.guess_accuracy(TOKENS, ANSWER, ids)
    assert count.tolist() == [4, 3, 2]
    assert hit.tolist() == [2, 2, 1]
    assert hit5.tolist() == [3, 2, 1]
    gap = ANSWER.copy()
    gap[3] = False
    assert validate.guess_accuracy(TOKENS, gap, ids)[2].tolist() == [3, 1, 1]
    assert validate.guess_accuracy(TOKENS[:2], ANSWER[:2], ids[:1])[2].tolist() == [0, 0, 0]


# ---- the feature cache ----


@pytest.fixture(scope="module")
def model(recipe: Path) -> Any:
    return target.load(target.resolve(str(recipe.parent / "llama")))[0]


def some_examples(count: int = 7) -> list[Example]:
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, 20, count)
    return [
        Example(rng.integers(98, size=n).astype(np.int32), np.arange(n) >= n // 2) for n in lengths
    ]


def test_the_cache_holds_every_sequences_features(model: Any, tmp_path: Path) -> None:
    """In bfloat16: 8 bits, so within 2⁻⁸ of each value."""
    examples, seen = some_examples(), []
    cache = features.build(tmp_path, examples, model, "t", (1,), lambda *x: seen.append(x))
    assert cache.num_sequences == len(examples)
    total = sum(cache.length_N)
    assert seen == [(total, total)]
    files = [tmp_path / name for name in ("token_T.npy", "loss_T.npy", "feature_TF.npy")]
    on_disk = sum(file.stat().st_size - 128 for file in files)  # less their headers
    assert on_disk == features.size_estimate(examples, 64)
    for i, example in enumerate(examples):
        token_T, loss_T, feature_TF = cache.sequence(i)
        assert np.array_equal(token_T.numpy(), example.token_T)
        assert np.array_equal(loss_T.numpy(), example.loss_T)
        with torch.no_grad():
            out = model.model(token_T[None], output_hidden_states=True)
        expected = torch.cat((out.last_hidden_state[0], out.hidden_states[1][0]), -1)
        assert feature_TF.dtype == torch.bfloat16
        torch.testing.assert_close(feature_TF.float(), expected, rtol=2**-8, atol=1e-5)


def test_a_stopped_build_goes_on(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "BLOCK", 2)
    examples = some_examples()
    whole = features.build(tmp_path / "whole", examples, model, "t", ())

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features.build(tmp_path / "part", examples, model, "t", (), stop)
    done = json.loads((tmp_path / "part" / "cache.json").read_text())["sequences_done"]
    assert 0 < done < len(examples)
    with pytest.raises(ValueError, match=f"with {done} of 7 sequences, expected all"):
        features.FeatureCache(tmp_path / "part")
    forward, computed = features._forward, []

    def counted(tokens: Any, *arguments: Any) -> Any:
        computed.append(len(tokens))
        return forward(tokens, *arguments)

    monkeypatch.setattr(features, "_forward", counted)
    resumed = features.build(tmp_path / "part", examples, model, "t", ())
    assert sum(computed) == len(examples) - done
    assert np.array_equal(resumed.feature_TF, whole.feature_TF)
    assert resumed.feature_TF.any(axis=1).all()


def test_a_cache_of_something_else_is_refused(model: Any, tmp_path: Path) -> None:
    examples = some_examples()
    features.build(tmp_path, examples, model, "t", ())
    changed = [*examples[:-1], Example(examples[-1].token_T, ~examples[-1].loss_T)]
    for arguments in ((examples, "u", ()), (examples, "t", (1,)), (changed, "t", ())):
        with pytest.raises(ValueError, match="made from other data, target or taps"):
            features.build(tmp_path, arguments[0], model, arguments[1], arguments[2])


def test_a_cache_with_more_taps_serves_a_drafter_with_fewer(model: Any, tmp_path: Path) -> None:
    examples = some_examples()
    features.build(tmp_path / "both", examples, model, "t", (0, 1))
    for taps in ((), (1,), (1, 0)):
        alone = features.build(tmp_path / f"{taps}", examples, model, "t", taps)
        shared = features.build(tmp_path / "both", examples, model, "t", taps)
        for i in range(len(examples)):
            assert torch.equal(shared.sequence(i)[2], alone.sequence(i)[2])
    with pytest.raises(ValueError, match=r"with taps \[0, 1\], expected \[2\]"):
        features.FeatureCache(tmp_path / "both", (2,))


def test_a_cache_that_would_not_fit_is_refused(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 100))
    with pytest.raises(ValueError, match=r"the feature cache needs 0\.0 GB"):
        features.build(tmp_path / "new", some_examples(), model, "t", ())
    assert not (tmp_path / "new" / "cache.json").exists()
