"""Training on a tiny target: files, exact resumption, the measures of validation, the cache."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from said import Said
from tiny_backbone import longrope
from tiny_target import save_llama

from spec_export import target
from spec_export.bundling import drafters as bundling
from spec_export.cli import main
from spec_export.decoder import Backbone
from spec_export.training import (
    batches,
    checkpoint,
    features,
    interruption,
    pace,
    tap_codes,
    trainer,
    validate,
)
from spec_export.training import run as train
from spec_export.training.average import WeightAverage
from spec_export.training.data import Example
from spec_export.training.events import EventWriter
from spec_export.training.pace import Pace
from spec_export.training.trainer import Trainer
from spec_runtime.errors import UserError
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


def stored(out: Path, step: int, file: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of one file of a step's checkpoint."""
    folder = out / "checkpoints" / checkpoint.folder_name(step)
    return load_file(folder / f"{file}.safetensors")


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
        options.append("train.ema=0.9")
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


def test_rows_are_cut_to_a_sliding_window(copied: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    changed_target(copied, **names, sliding_window=64)
    with pytest.warns(UserWarning, match="lowered from 96 to 64, the model's sliding window"):
        train.run(copied, ["train.max_steps=1"], tmp_path / "run")
    assert features.FeatureCache(tmp_path / "run" / "features").length_N.max() == 64


def test_a_drafter_learns_with_the_rotary_factors_of_its_rows(copied: Path, tmp_path: Path) -> None:
    """Rows of 96 tokens take the short factors of an original context of 128; a bundle with the
    long ones warns."""
    rope = longrope(4) | {"original_max_position_embeddings": 128}
    changed_target(copied, rope_parameters=rope)
    saved = checkpoint.load_drafter(train.run(copied, ["train.max_steps=1"], tmp_path / "run"))
    assert saved.provenance["rope_factors"] == "short"
    model, _ = target.load(target.resolve(str(copied.parent / "llama")))
    bundling.load_module(saved, Backbone.from_transformers(model, (), 128))
    long = Backbone.from_transformers(model, (), 200)
    with pytest.warns(UserWarning, match="learnt with the target's short rotary factors"):
        bundling.load_module(saved, long)


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


def test_training_says_how_much_is_padding(recipe: Path, finished: Path, tmp_path: Path) -> None:
    """One line, of the batches that it trains on."""
    report = Said()
    train.run(recipe, ["train.max_steps=1"], tmp_path, cache=finished / "features", report=report)
    held_out = features.FeatureCache(finished / "features").length_N
    said = [line for line in report.lines if "padding" in line]
    assert len(said) == 1
    assert said[0].startswith("batches: ")
    assert 0 < float(said[0].split()[1].rstrip("%")) < 100 * (1 - held_out.mean() / held_out.max())


# ---- validation ----

#                    0  1  2  3  4  5    answer: 6 7 8 9, root of the first step: 6
TOKENS = np.array([3, 5, 6, 7, 8, 9])
ANSWER = np.array([0, 0, 1, 1, 1, 1], dtype=bool)
WRONG = 50


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


def test_each_answer_of_a_sequence_is_simulated_apart() -> None:
    """Two answers of two tokens with a question between them: 6 7 ? ? 6 7."""
    token_T = np.array([3, 5, 6, 7, 1, 2, 6, 7])
    loss_T = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=bool)
    ids = np.full((7, 2, 1), WRONG)
    ids[[1, 5], 0] = 7
    assert validate.simulate(token_T, loss_T, ids, np.zeros(ids.shape), Budget(4)) == (2, 2)


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


def conditioned() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, log q [5, 2, 2] and pairs [5, 1, 2, 2]: row 1 (root 6) guesses 7 or 50, then 50 or 8,
    which is likelier only behind 7."""
    ids, log_probs = guesses({1: [True]}, 2)
    ids[1, 1] = [WRONG, 8]
    pairs = np.log(np.broadcast_to([[0.1, 0.8], [0.7, 0.2]], (5, 1, 2, 2)))
    return ids, log_probs, pairs


def test_conditioned_guesses_are_measured_behind_the_true_token() -> None:
    ids, log_probs, pairs = conditioned()
    assert validate.guess_accuracy(TOKENS, ANSWER, ids)[0].tolist() == [1, 0]
    behind, log_behind = validate.behind_truth(TOKENS, ids, log_probs, pairs)
    assert behind[1].tolist() == [[7, 51], [8, WRONG]]
    assert np.allclose(np.exp(log_behind[1]), [[0.6, 0.3], [0.8, 0.1]])
    # where the true token is no candidate, q stays
    assert behind[2].tolist() == ids[2].tolist()
    assert np.array_equal(log_behind[2], log_probs[2])
    assert validate.guess_accuracy(TOKENS, ANSWER, behind)[0].tolist() == [1, 1]


def test_the_conditioned_tree_is_simulated() -> None:
    """With two nodes the second one is 8 behind 7 (.48), not the 50 that q prefers there."""
    ids, log_probs, pairs = conditioned()
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(3)) == (3, 2)
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(3), pairs) == (3, 1)


def test_the_calibration_error_is_by_bins() -> None:
    """Guess 0 says 0.6 four times and is right twice; one of 0.95 is wrong in another sequence."""
    ids, log_probs = guesses({0: [True], 1: [True]}, 1)
    calibration = validate.Calibration()
    calibration.add(TOKENS, ANSWER, ids, log_probs)
    assert calibration.errors() == pytest.approx((0.1,))
    calibration.add(TOKENS[:3], ANSWER[:3], np.full((2, 1, 1), WRONG), np.log([[[0.95]]] * 2))
    assert calibration.errors() == pytest.approx(((4 * 0.1 + 0.95) / 5,))


# ---- the feature cache ----


@pytest.fixture(scope="module")
def model(recipe: Path) -> Any:
    return target.load(target.resolve(str(recipe.parent / "llama")))[0]


NARROW_FILES = ("token_T", "loss_T", "feature_TF", "tap_TF", "tap_exponent_TN")


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
    assert seen == [(0, total), (total, total)]
    files = [tmp_path / name for name in ("token_T.npy", "loss_T.npy", "feature_TF.npy")]
    on_disk = sum(file.stat().st_size - 128 for file in files)  # less their headers
    assert on_disk == features.size_estimate(examples, 32, 1)
    for i, example in enumerate(examples):
        token_T, loss_T, feature_TF = cache.sequence(i)
        assert np.array_equal(token_T.numpy(), example.token_T)
        assert np.array_equal(loss_T.numpy(), example.loss_T)
        with torch.no_grad():
            out = model.model(token_T[None], output_hidden_states=True)
        expected = torch.cat((out.last_hidden_state[0], out.hidden_states[1][0]), -1)
        assert feature_TF.dtype == torch.bfloat16
        torch.testing.assert_close(feature_TF.float(), expected, rtol=2**-8, atol=1e-5)


def test_packed_taps_are_within_six_percent() -> None:
    """But for numbers that are tiny beside the row's greatest; powers of two are exact."""
    torch.manual_seed(0)
    tap_TND = torch.randn(50, 2, 64) * torch.logspace(-15, 20, 50)[:, None, None]
    tap_TND[0, 1] = 0
    tap_TND[2, 0, :3] = torch.tensor([4096.0, 0.5, -0.25])
    tap_TND = tap_TND.bfloat16()
    code_TND, exponent_TN = tap_codes.pack(tap_TND)
    assert (code_TND.dtype, exponent_TN.dtype) == (torch.uint8, torch.int8)
    got, tap = tap_codes.unpack(code_TND, exponent_TN), tap_TND.double()
    assert got.dtype == torch.bfloat16
    greatest = tap.abs().amax(-1, keepdim=True)
    assert bool(((got.double() - tap).abs() <= tap.abs() / 17 + greatest * 2**-17).all())
    of_torch = code_TND.view(torch.float8_e4m3fn).double()
    assert torch.equal(got.double(), torch.ldexp(of_torch, exponent_TN.double()[..., None]))
    is_small = tap.abs() < greatest * 2**-13
    assert is_small.float().mean() < 0.1
    error = ((got.double() - tap).abs() / tap.abs())[~is_small & (tap != 0)]
    assert 0.02 < error.max() < 0.06
    assert got[2, 0, :3].tolist() == [4096.0, 0.5, -0.25]


def test_narrow_taps_take_a_byte_a_number(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final feature is the same bit for bit, the taps are what their codes stand for."""
    examples = some_examples()
    wide = features.build(tmp_path / "wide", examples, model, "t", (0, 1))
    narrow = features.build(tmp_path / "narrow", examples, model, "t", (0, 1), None, "fp8")
    for i in range(len(examples)):
        before, after = wide.sequence(i)[2], narrow.sequence(i)[2]
        assert torch.equal(after[:, :32], before[:, :32])
        taps = tap_codes.unpack(*tap_codes.pack(before[:, 32:].unflatten(1, (2, 32))))
        assert torch.equal(after[:, 32:], taps.flatten(1))
        one = features.FeatureCache(tmp_path / "narrow", (1,)).sequence(i)[2]
        assert torch.equal(one, torch.cat([after[:, :32], after[:, 64:]], 1))
        none = features.build(tmp_path / "narrow", examples, model, "t", ()).sequence(i)[2]
        assert torch.equal(none, before[:, :32])
    files = [tmp_path / "narrow" / f"{name}.npy" for name in NARROW_FILES]
    on_disk = sum(np.load(file).nbytes for file in files)
    assert on_disk == features.size_estimate(examples, 32, 2, "fp8")
    assert on_disk == sum(len(e.token_T) for e in examples) * (2 * 32 + 2 * 33 + 5)
    with pytest.raises(ValueError, match="tap_store fp8 instead of bf16"):
        features.build(tmp_path / "narrow", examples, model, "t", (1,))
    np.save(files[-1], np.zeros((3, 2), np.int8))
    with pytest.raises(ValueError, match=r"damaged \(tap_exponent_TN.npy has shape \(3, 2\)"):
        features.FeatureCache(tmp_path / "narrow")


def test_a_drafter_trains_on_narrow_taps(recipe: Path, tmp_path: Path) -> None:
    train.run(recipe, ["data.tap_store=fp8", "train.max_steps=2"], tmp_path)
    assert checkpoint.load_drafter(tmp_path / "drafter").config["taps"] == [1]
    assert (tmp_path / "features" / "tap_TF.npy").is_file()


@pytest.mark.parametrize(("taps", "store"), [((), "bf16"), ((1,), "fp8")])
def test_a_stopped_build_goes_on(
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    taps: tuple[int, ...],
    store: features.TapStore,
) -> None:
    monkeypatch.setattr(features, "BLOCK", 2)
    examples = some_examples()
    whole = features.build(tmp_path / "whole", examples, model, "t", taps, None, store)

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features.build(tmp_path / "part", examples, model, "t", taps, stop, store)
    done = json.loads((tmp_path / "part" / "cache.json").read_text())["sequences_done"]
    assert 0 < done < len(examples)
    with pytest.raises(ValueError, match=f"with {done} of 7 sequences, expected all"):
        features.FeatureCache(tmp_path / "part")
    forward, computed = features._forward, []

    def counted(tokens: Any, *arguments: Any) -> Any:
        computed.append(len(tokens))
        return forward(tokens, *arguments)

    monkeypatch.setattr(features, "_forward", counted)
    resumed = features.build(tmp_path / "part", examples, model, "t", taps, None, store)
    assert sum(computed) == len(examples) - done
    for i in range(len(examples)):
        assert torch.equal(resumed.sequence(i)[2], whole.sequence(i)[2])
        assert resumed.sequence(i)[2].any(dim=1).all()


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


# ---- divergence ----


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


# ---- two at once ----


def fail_at_call(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Returns a function that raises KeyboardInterrupt when it is called that often."""
    calls: list[int] = []

    def failing(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return function(*given)

    return failing


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


def test_two_processes_cannot_write_one_feature_cache(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples, forward, refused = some_examples(), features._forward, []

    def another(*arguments: Any) -> Any:
        with pytest.raises(ValueError, match="is being written by process"):
            features.build(tmp_path / "f", examples, model, "t", ())
        refused.append(True)
        return forward(*arguments)

    monkeypatch.setattr(features, "_forward", another)
    features.build(tmp_path / "f", examples, model, "t", ())
    assert refused
    assert features.build(tmp_path / "f", examples, model, "t", ()).num_sequences == len(examples)


# One of two processes takes longer for its features than the group waits for anybody.
SLOW_FEATURES = """
import datetime, os, sys, time
import accelerate
from spec_export.training import features, run
made, forward = run.Accelerator, features._forward
limit = accelerate.InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=4))
run.Accelerator = lambda kwargs_handlers: made(kwargs_handlers=[*kwargs_handlers, limit])
def slow(*arguments):
    time.sleep(6)
    return forward(*arguments)
features._forward = slow
from pathlib import Path
run.run(Path(sys.argv[1]), ["train.max_steps=1"], Path(sys.argv[2]))
"""


def test_other_processes_wait_for_the_features_however_long(recipe: Path, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW_FEATURES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(script), str(recipe), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "drafter").is_dir()


# ---- full disks ----


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond this size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_features_are_allocated_before_they_are_computed(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole in the file would kill the process with SIGBUS when the disk is full later."""
    monkeypatch.setattr(features, "_forward", lambda *_: pytest.fail("allocated too late"))
    examples = some_examples(200)
    with largest_file(50_000), pytest.raises(ValueError, match="cannot write features of") as error:
        features.build(tmp_path / "f", examples, model, "t", ())
    assert "(File too large)" in str(error.value)
    assert "are free there: make room and run it again" in str(error.value)
    with pytest.raises(pytest.fail.Exception):
        features.build(tmp_path / "f", examples, model, "t", ())
    status = (tmp_path / "f" / "feature_TF.npy").stat()
    assert status.st_blocks * 512 >= status.st_size > 100_000


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


# ---- features and answers of another model ----


@pytest.fixture
def copied(recipe: Path, tmp_path: Path) -> Path:
    """A recipe of its own, in a folder of its own."""
    shutil.copytree(recipe.parent / "llama", tmp_path / "own" / "llama")
    for name in ("data.jsonl", "recipe.toml"):
        shutil.copy(recipe.parent / name, tmp_path / "own" / name)
    return tmp_path / "own" / "recipe.toml"


def test_a_cache_is_of_a_targets_weights_not_of_its_name(
    copied: Path, finished: Path, tmp_path: Path
) -> None:
    train.run(copied, ["train.max_steps=1"], tmp_path / "same", cache=finished / "features")
    save_llama(copied.parent / "llama", initializer_range=0.2)
    with pytest.raises(ValueError, match=r"made from other data, target or taps \(target [0-9a-f]"):
        train.run(copied, [], tmp_path / "other", cache=finished / "features")


@pytest.mark.parametrize("damage", ["cache.json", "feature_TF.npy", "offset.npy", "token_T.npy"])
def test_a_damaged_cache_is_one_line(
    recipe: Path, finished: Path, tmp_path: Path, damage: str
) -> None:
    cache = shutil.copytree(finished / "features", tmp_path / "features")
    with (cache / damage).open("r+b") as file:
        file.truncate(70)
    with pytest.raises(ValueError, match=r"cache\.json|which is damaged"):
        train.run(recipe, [], tmp_path / "run", cache=cache)


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


# ---- resuming ----


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


def test_a_resumed_run_has_as_many_processes(recipe: Path, finished: Path, tmp_path: Path) -> None:
    path = shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints") / "step-00000007"
    header = json.loads((path / "checkpoint.json").read_text())
    assert header["progress"]["processes"] == 1
    header["progress"]["processes"] = 2
    (path / "checkpoint.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match="was trained by 2 processes, got 1"):
        train.run(recipe, out=tmp_path, resume=True, cache=finished / "features")
    header["progress"]["curve"] = "none"
    (path / "checkpoint.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"progress\.curve: got str 'none', expected a list"):
        train.run(recipe, out=tmp_path, resume=True, cache=finished / "features")


# ---- interruption ----


def stop_in(name: str, call: int, error: BaseException) -> Callable[..., Any]:
    """Returns a Trainer's method that raises `error` when it is called that often."""
    method, calls = getattr(Trainer, name), []

    def stopping(trainer: Trainer, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return method(trainer, *arguments, **more)

    return stopping


@pytest.mark.parametrize(
    ("name", "call", "step"),
    [
        ("_backward", 4, 1),  # in the middle of step 2, between its two micro-batches
        ("_backward", 11, 5),
        ("_log_training", 1, 4),
        ("validate", 1, 3),
        ("validate", 3, 7),
        ("_write_curve", 2, 6),  # the step is validated, and not yet kept as the best
        ("_write_curve", 3, 7),
    ],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=str)
def test_ctrl_c_and_sigterm_save_a_checkpoint(
    recipe: Path,
    finished: Path,
    tmp_path: Path,
    name: str,
    call: int,
    step: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last whole step is kept, and the run ends as an uninterrupted one, bit for bit."""
    said = Said()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, name, stop_in(name, call, error))
        with pytest.raises(type(error)):
            train.run(recipe, out=tmp_path, cache=finished / "features", report=said)
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert int(newest.name.removeprefix("step-")) == step
    line = f"interrupted: {newest} holds step {step}; the same command with --resume goes on"
    assert line in said.lines
    train.run(recipe, out=tmp_path, resume=True, cache=finished / "features")
    assert curve(tmp_path) == curve(finished)
    weights = Path("drafter", "drafter.safetensors")
    assert (tmp_path / weights).read_bytes() == (finished / weights).read_bytes()
    best = [sorted(p.name for p in (run / "best").rglob("*")) for run in (tmp_path, finished)]
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
        patch.setattr(Trainer, "_backward", stop_in("_backward", 1, KeyboardInterrupt()))
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


# ---- averaged weights ----


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


@pytest.fixture(scope="module")
def averaged(recipe: Path, finished: Path) -> Path:
    """The folder of the run `finished` with averaged weights, which nothing interrupted."""
    out = recipe.parent / "averaged"
    train.run(recipe, ["train.ema=0.9"], out, cache=finished / "features")
    return out


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


@pytest.mark.parametrize(
    ("name", "call", "step"),
    [
        ("_backward", 11, 5),  # between the two micro-batches of step 6
        ("_guesses", 1, 3),  # in a validation, while the average is in use
        ("write_results", 1, 7),
    ],
)
def test_an_interrupted_run_goes_on_with_its_averaged_weights(
    recipe: Path,
    finished: Path,
    averaged: Path,
    tmp_path: Path,
    name: str,
    call: int,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit."""
    options, cache = ["train.ema=0.9"], finished / "features"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, name, stop_in(name, call, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train.run(recipe, options, tmp_path, cache=cache)
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == checkpoint.folder_name(step)
    train.run(recipe, options, tmp_path, True, cache)
    assert curve(tmp_path) == curve(averaged)
    for file in (
        "drafter/drafter.safetensors",
        "checkpoints/step-00000007/model.safetensors",
        "checkpoints/step-00000007/average.safetensors",
    ):
        assert (tmp_path / file).read_bytes() == (averaged / file).read_bytes(), file


def test_a_run_goes_on_averaging_or_not(recipe: Path, finished: Path, averaged: Path) -> None:
    cache = finished / "features"
    with pytest.raises(ValueError, match=r"has no averaged weights, expected those of train\.ema"):
        train.run(recipe, ["train.ema=0.9"], finished, True, cache)
    with pytest.raises(ValueError, match=r"another recipe \(train\.ema was 0\.9, is absent\)"):
        train.run(recipe, [], averaged, True, cache)
    with pytest.raises(ValueError, match=r"\[train\] ema is 1\.0, expected 0 <= x < 1"):
        train.run(recipe, ["train.ema=1"], averaged, True, cache)


# ---- the best step ----


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_best_step_is_kept_and_exported(
    recipe: Path,
    finished: Path,
    tmp_path: Path,
    ema: float,
    monkeypatch: pytest.MonkeyPatch,
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


# ---- what is said ----


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


def test_the_features_say_when_they_are_done(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With blocks of two sequences, of which a build that was stopped has done one or two."""
    monkeypatch.setattr(features, "BLOCK", 2)
    first, second = Said(), Said()
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(features, "_forward", fail_at_call(features._forward, 3))
        with pytest.raises(KeyboardInterrupt):
            train.run(recipe, ["train.max_steps=1"], out, report=first)
    assert re.search(
        r"features take \d+\.\d .B in .*features, where \d.* are free$", first.lines[0]
    )
    assert any(first.shares["features"])
    train.run(recipe, ["train.max_steps=1"], out, report=second)
    shares = second.shares["features"]
    assert len(shares) >= 2
    assert shares == sorted(set(shares))
    assert len(shares) <= 10


# ---- TensorBoard ----

Points = dict[tuple[str, int], list[float]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Points:
    """Replaces TensorBoard's writer; returns what a reader sees, by tag and step."""
    points: Points = {}

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert Path(folder).name == "tensorboard"
            for key in [key for key in points if key[1] >= purge_step]:
                del points[key]

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            points.setdefault((tag, step), []).append(value)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    module = types.ModuleType("torch.utils.tensorboard")
    monkeypatch.setattr(module, "SummaryWriter", SummaryWriter, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return points


def test_events_are_the_curve_also_of_a_resumed_run(
    recipe: Path, finished: Path, tmp_path: Path, events: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after step 5, of which it has logged everything, and goes on from step 4.

    Steps 5 and on are written twice, and a reader sees the second time alone.
    """
    options, cache = ["train.log_every=1"], finished / "features"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_interrupted", lambda trainer: None)
        patch.setattr(Trainer, "_optimizer_step", stop_in("_optimizer_step", 6, SystemExit(1)))
        with pytest.raises(SystemExit):
            train.run(recipe, options, tmp_path, cache=cache, tensorboard=True)
    assert ("train/loss", 5) in events
    train.run(recipe, options, tmp_path, True, cache, tensorboard=True)
    assert all(len(values) == 1 for values in events.values())
    steps = {tag: sorted(step for t, step in events if t == tag) for tag, _ in events}
    every = [*range(1, 8)]
    for name in ("loss", "lr", "gradient_norm", "tokens_per_second", "top1_0", "top1_2"):
        assert steps[f"train/{name}"] == every, name
    for name in ("accepted_length", "top1_0", "top5_2", "ece_1"):
        assert steps[f"validation/{name}"] == [3, 6, 7], name
    rows = [row for row in curve(tmp_path) if row["loss"]]
    assert [events["train/loss", k][0] for k in every] == [float(row["loss"]) for row in rows]
    assert max(events["train/lr", k][0] for k in every) == 3e-3


def test_real_event_files_have_each_point_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, losses in ((0, (3.0, 2.0, 1.5)), (2, (1.0,))):
        writer = EventWriter(tmp_path, first)
        for step, loss in enumerate(losses, first + 1):
            writer.add("train", {"step": step, "loss": loss, "train_top1_0": 0.5})
        writer.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [(1, 3), (2, 2), (3, 1)]
    assert len(reader.Scalars("train/top1_0")) == 3


def test_missing_tensorboard_is_one_line_before_anything_is_written(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), "--tensorboard", "--out", str(out)])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "TensorBoard is not installed: pip install 'specsplit[tensorboard]'" in said
    assert not out.exists()


def test_a_finished_cache_is_shown_as_finished(model: Any, tmp_path: Path) -> None:
    examples, seen = some_examples(), []
    features.build(tmp_path, examples, model, "t", ())
    features.build(tmp_path, examples, model, "t", (), lambda *x: seen.append(x))
    total = sum(len(example.token_T) for example in examples)
    assert seen == [(total, total)]
