"""Tests the feature cache: what it holds, and what stops, fills or damages it."""

import re
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from said import Said
from tiny_target import save_llama
from tiny_training import largest_file, stop_in

from spec_export.model import target
from spec_export.training import features
from spec_export.training import run as train
from spec_export.training.data import Example


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
    assert seen == [(0, total), (total, total)]
    seen.clear()
    features.build(tmp_path, examples, model, "t", (1,), lambda *x: seen.append(x))
    assert seen == [(total, total)], "a finished cache is shown as finished"
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


def test_a_cache_whose_array_has_another_shape_is_refused(model: Any, tmp_path: Path) -> None:
    features.build(tmp_path, some_examples(), model, "t", (0, 1))
    np.save(tmp_path / features.FEATURES, np.zeros((3, 2), np.uint16))
    with pytest.raises(ValueError, match=r"damaged \(feature_TF.npy has shape \(3, 2\)"):
        features.FeatureCache(tmp_path)


@pytest.mark.parametrize("taps", [(), (1,)])
def test_a_stopped_build_goes_on(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taps: tuple[int, ...]
) -> None:
    """Here with two processes, each of which computes its share."""
    monkeypatch.setattr(features, "BLOCK", 2)
    examples = some_examples()
    whole = features.build(tmp_path / "whole", examples, model, "t", taps)

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features.build(tmp_path / "part", examples, model, "t", taps, stop)
    done = int(np.load(tmp_path / "part" / "done_N.npy").sum())
    assert 0 < done < len(examples)
    with pytest.raises(ValueError, match=f"with {done} of 7 sequences, expected all"):
        features.FeatureCache(tmp_path / "part")
    forward, computed = features._forward, []

    def counted(tokens: Any, *arguments: Any) -> Any:
        computed.append(len(tokens))
        return forward(tokens, *arguments)

    monkeypatch.setattr(features, "_forward", counted)
    assert not features.is_built(tmp_path / "part", examples, 32, "t", taps)
    other = partial(features.build, tmp_path / "part", examples, model, "t", taps, ranks=2)
    with ThreadPoolExecutor(1) as process:
        process.submit(other, rank=1)
        resumed = other()
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


def test_a_cache_is_of_a_targets_weights_not_of_its_name(
    copied: Path, finished: Path, tmp_path: Path
) -> None:
    train.run(copied, ["train.max_steps=1"], tmp_path / "same", cache=finished / "features")
    save_llama(copied.parent / "llama", initializer_range=0.2)
    with pytest.raises(ValueError, match=r"made from other data, target or taps \(target [0-9a-f]"):
        train.run(copied, [], tmp_path / "other", cache=finished / "features")


@pytest.mark.parametrize("damage", ["cache.json", "feature_TF.npy", "offset.npy", "done_N.npy"])
def test_a_damaged_cache_is_one_line(
    recipe: Path, finished: Path, tmp_path: Path, damage: str
) -> None:
    cache = shutil.copytree(finished / "features", tmp_path / "features")
    with (cache / damage).open("r+b") as file:
        file.truncate(70)
    with pytest.raises(ValueError, match=r"cache\.json|which is damaged"):
        train.run(recipe, [], tmp_path / "run", cache=cache)


def test_the_features_say_when_they_are_done(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of two sequences, of which a build that was stopped has done one or two."""
    monkeypatch.setattr(features, "BLOCK", 2)
    first, second = Said(), Said()
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(features, "_forward", stop_in(features, "_forward", 3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train.run(recipe, ["train.max_steps=1"], out, report=first)
    assert re.search(
        r"training takes up to .* of memory \(.* are free\) and .* on the disk \(.* are free\): "
        r"features of \d+\.\d .B, 4 checkpoints of \d+\.\d .B$",
        first.lines[1],
    )
    assert any(first.shares["features"])
    train.run(recipe, ["train.max_steps=1"], out, report=second)
    shares = second.shares["features"]
    assert len(shares) >= 2
    assert shares == sorted(set(shares))
    assert len(shares) <= 10
