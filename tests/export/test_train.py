"""Tests training runs on a tiny target: what they learn, leave and refuse."""

import json
import shutil
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from said import Said
from tiny_backbone import longrope
from tiny_target import save_llama
from tiny_training import curve, stored, train_in_processes
from workshop import Workshop

import spec_runtime
from spec_export.build import drafters as bundling
from spec_export.check import drafting
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training import checkpoint, features, precision, trainer
from spec_export.training import run as train
from spec_export.training.recipe import Recipe
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


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batches(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    """The same optimiser steps, their gradients summed in another order: with features that each
    process computes its share of, and with a sharded target in each step. One process goes on where
    two were stopped."""
    shared = ["train.ema=0.9", "train.log_every=1", "train.schedule=constant"]
    one = [*shared, "train.grad_accumulation=2"]
    train.run(recipe, one, tmp_path / "one", cache=finished / "features")
    two, runs = [*shared, "train.grad_accumulation=1"], []
    for name, environment, options in (
        ("stored", {}, ["train.max_steps=4"]),
        ("online", {"ACCELERATE_USE_FSDP": "true"}, ["data.store_features=false"]),
    ):
        sets = [word for option in (*two, *options) for word in ("--set", option)]
        words = ["train", str(recipe), "--out", str(tmp_path / name), *sets]
        runs.append((2, environment, str(tmp_path / f"{name}.log"), words))
    train_in_processes(runs)
    assert "sharded: a process holds" in (tmp_path / "online.log").read_text()
    assert len(curve(tmp_path / "stored")) == 4 + 2, "validated at 3 and 4"
    said = Said()
    train.run(recipe, two, tmp_path / "stored", True, report=said)
    assert "was trained by 2 processes, now 1: each step keeps its batches" in said.text
    expected = [float(row["loss"]) for row in curve(tmp_path / "one") if row["loss"]]
    assert len(expected) == 7
    for name in ("stored", "online"):
        losses = [float(row["loss"]) for row in curve(tmp_path / name) if row["loss"]]
        assert losses == pytest.approx(expected, rel=1e-4 if name == "stored" else 1e-2)
    weights, others = (stored(tmp_path / name, 7, "average") for name in ("one", "stored"))
    # Adam's first steps follow a gradient's sign, which rounding may turn where it is tiny
    for name, weight in weights.items():
        assert (weight - others[name]).norm() <= 0.01 * weight.norm()


def test_a_steps_loss_is_a_mean_over_its_answer_tokens(copied: Path, tmp_path: Path) -> None:
    """However they are cut into batches: one of all sequences, or one for each, whose answers are
    of 8 to 40 tokens. A step of fewer batches than it may have is of these alone."""
    head, data, rest = copied.read_text().partition("[data]")
    sizes = "hidden_size = 16\nintermediate_size = 16\nlayers = 1\nnum_heads = 2\ntop_k = 5\n"
    head = head.partition("[drafter]")[0] + f'[drafter]\nname = "draft_model"\n{sizes}'
    copied.write_text(head + data + rest)
    losses = []
    for size in (10_000, 1):
        options = ["train.max_steps=3", "train.log_every=1", "train.grad_accumulation=64"]
        train.run(copied, [*options, f"train.batch_tokens={size}"], tmp_path / f"{size}")
        losses.append([float(row["loss"]) for row in curve(tmp_path / f"{size}") if row["loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_features_computed_in_each_step_are_the_stored_ones(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit in fp32, where both run the same batches: here each sequence alone."""
    monkeypatch.setitem(features.BATCH_TOKENS, "cpu", 1)
    for stores in ("true", "false"):
        options = ["train.batch_tokens=1", "train.max_steps=4", f"data.store_features={stores}"]
        train.run(recipe, options, tmp_path / stores)
    assert not (tmp_path / "false" / "features").exists()
    assert curve(tmp_path / "true") == curve(tmp_path / "false")
    drafters = [tmp_path / stores / "drafter" for stores in ("true", "false")]
    weights = [(drafter / "drafter.safetensors").read_bytes() for drafter in drafters]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("num_batches", range(1, 6))
def test_all_processes_have_equally_many_batches(num_batches: int) -> None:
    """A sharded target needs them all in each forward pass; every batch counts once, by its answer
    tokens."""
    shares = []
    for process in range(2):
        run = types.SimpleNamespace(
            accelerator=types.SimpleNamespace(process_index=process, num_processes=2),
            sequences=types.SimpleNamespace(answers_N=np.arange(1, 6)),
            steps_per_epoch=1,
            batches_per_step=6,
            _epoch=0,
            _order=[np.array([i]) for i in range(num_batches)],
        )
        shares.append(Trainer._micro_batches(run, 0))  # type: ignore[arg-type]
    assert len(shares[0]) == len(shares[1]) == -(-num_batches // 2)
    assert [[each.is_last for each in share].index(True) for share in shares] == [
        len(shares[0]) - 1
    ] * 2
    weights = np.zeros(num_batches)
    for each in (*shares[0], *shares[1]):
        weights[each.indices] += each.weight
    assert weights == pytest.approx(np.arange(1, num_batches + 1) / sum(range(num_batches + 1)))


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


def test_a_validation_may_draft_in_the_runtime(
    recipe: Path,
    finished: Path,
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its accepted length is that of a bundle's answers to the held-out questions; here of one that
    is there already."""
    bundle = workshop.bundle("parallelspec")
    built: list[Any] = []
    asked: list[Any] = []

    def build(options: Any) -> Path:
        built.append(options)
        return bundle

    monkeypatch.setattr(drafting, "build", build)

    def drafts(plan: Recipe, drafter: Path, sequences: Any) -> float:
        asked.extend(sequences)
        return drafting.accepted_length(plan, drafter, sequences)

    options, cache = ["validate.engine=true", "train.max_steps=1"], finished / "features"
    folder = train.run(recipe, options, tmp_path, cache=cache, drafts=drafts)
    assert built[0].drafter_checkpoints == (tmp_path / "drafting" / "drafter",)
    assert checkpoint.load_drafter(tmp_path / "drafting").provenance["steps"] == 1
    lengths = [len(token_T) for token_T, _ in asked]
    assert lengths == features.FeatureCache(cache).length_N[-len(asked) :].tolist()
    with spec_runtime.load(bundle, lookup=False, profile=False) as engine:
        answers = [
            engine.generate(token_T[:start].tolist(), max_new_tokens=len(token_T) - start)
            for token_T, loss_T in asked
            for start in [loss_T.tolist().index(True)]
        ]
    tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    steps = sum(answer.stats.steps for answer in answers)
    found = checkpoint.load_drafter(folder).provenance["validation"]
    assert found["accepted_length"] == pytest.approx(tokens / steps)


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
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
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
