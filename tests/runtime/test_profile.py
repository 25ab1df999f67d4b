"""The machine profile on disk: how it is found, what damage does, what an engine makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from toy_backend import ToyTarget
from toy_bundle import write_bundle
from tuning import COSTS, KEY, opened_anew

from spec_runtime.bundle import manifest as bundle
from spec_runtime.files import machine
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.pace import profile
from spec_runtime.pace.adaptive import DraftPauser
from spec_runtime.pace.profile import PLAIN, Candidate, Gain, Key, Profile
from spec_runtime.trees.budget import Budget, Grown, Static

pytestmark = pytest.mark.usefixtures("toy_graphs")


def some_profile(budget: Budget | None, key: Key = KEY) -> Profile:
    candidates = (
        Candidate(PLAIN, None, 1.0, 1.0, 50.0, 1.0, 1.0),
        Candidate("paying", budget, 5.0, 1.4, 70.0, 1.4, 2.1, Gain(1.6, 1.2)),
    )
    chosen = "paying" if budget is not None else PLAIN
    return Profile(key, COSTS, "run", candidates if budget else candidates[:1], chosen)


PAYING = Budget(4, growth=Grown(0.01, (1.0, 2.0, 3.0, 4.0), 0.5, ((0.5, 0.4),)))


def test_a_profile_is_found_by_its_key_alone(profile_cache: Path) -> None:
    stored = some_profile(PAYING)
    path = profile.write(stored)
    assert list(profile_cache.iterdir()) == [path]
    assert profile.find(KEY) == stored
    assert profile.write(some_profile(None)) == path
    assert profile.find(KEY) == some_profile(None)
    others = {"manifest": "1", "cpu": "", "threads": 1, "precision": "fp32", "drafter": "eagle"}
    for name, value in others.items():
        assert profile.find(replace(KEY, **{name: value})) is None, name  # type: ignore[arg-type]


STATIC = Budget(5, max_depth=3, growth=Static(((0,), (0, 0))))


def test_a_static_tree_is_kept_and_an_older_file_is_read(profile_cache: Path) -> None:
    """Files of older versions have two keys that no budget ever filled, and one by another name."""
    for budget in (STATIC, PAYING):
        path = profile.write(some_profile(budget))
        assert profile.find(KEY) == some_profile(budget)
        data = json.loads(path.read_text())
        for candidate in data["candidates"]:
            if candidate["budget"] is not None:
                candidate["sampled_pace"] = candidate.pop("sampled_gain")
                candidate["budget"] |= {"truth": None, "draw": None}
        path.write_text(json.dumps(data))
        assert profile.find(KEY) == some_profile(budget)
    assert data["candidates"][1]["budget"] == {
        "max_nodes": 4,
        "min_probability": 0.01,
        "max_depth": None,
        "paths": None,
        "step_ms": [1.0, 2.0, 3.0, 4.0],
        "level_ms": 0.5,
        "reliability": [[0.5, 0.4]],
        "truth": None,
        "draw": None,
    }


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"chosen": "paying"', '"chosen": "fast"'),
        lambda text: text.replace('"threads": 2', '"threads": 3'),
        lambda text: text.replace('"host"', '"guest"'),
        lambda text: text.replace('"max_nodes": 4', '"max_nodes": 0'),
        lambda text: text.replace('"max_nodes": 4', '"most_nodes": 4'),
        lambda text: text.replace('"budget": null', '"budgets": null'),
        lambda text: text.replace('"budget": null', '"budget": 7'),
        lambda text: text.replace('"candidates": [', '"candidates": [3,'),
        lambda text: text.replace('"plain": 10.0', '"plain": -1.0'),
        lambda text: text.replace('"verify": [', '"verify": [[],', 1),
        lambda text: "\x00\xff",
    ],
)
def test_a_damaged_profile_is_a_warning(
    profile_cache: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    path = profile.write(some_profile(PAYING))
    text = path.read_text()
    assert damage(text) != text
    path.write_bytes(damage(text).encode("latin-1"))
    assert profile.find(KEY) is None
    (message,) = caplog.messages
    assert str(path) in message
    assert message.endswith("run spec-runtime tune again")


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU\nstepping\t: 1\n\nmodel name\t: B\n"
    )
    assert machine.cpu_model(file) == "Some CPU 17 1"
    assert machine.cpu_model(tmp_path / "none")


def test_an_engine_is_opened_as_the_profile_says(
    profile_cache: Path,
    tmp_path: Path,
    toy_graphs: list[ToyTarget],
) -> None:
    folder = write_bundle(tmp_path, ("parallelspec",))
    opened = bundle.read(folder, verify=False)
    key = profile.key_of(opened, "parallelspec", 1)
    assert (key.precision, key.threads) == ("fp32", 1)
    untuned = opened_anew(toy_graphs, folder, threads=1)
    expected = untuned.generate("hello", max_new_tokens=30).token_ids
    profile.write(some_profile(PAYING, key))
    tuned = opened_anew(toy_graphs, folder, threads=1)
    assert tuned.budget == PAYING
    assert tuned.is_tuned
    assert isinstance(tuned.proposer, DraftPauser)
    assert tuned.generate("hello", max_new_tokens=30).token_ids == expected
    for other in (
        tuned.with_drafter("prompt_lookup"),
        tuned.with_drafter(None, lookup=True),
        opened_anew(toy_graphs, folder, threads=1, profile=False),
        opened_anew(toy_graphs, folder, threads=2),
    ):
        assert other.budget != PAYING
        assert not other.is_tuned
        assert not isinstance(other.proposer, DraftPauser)
    profile.write(some_profile(None, key))
    plain = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(plain.proposer, PlainProposer)
    result = plain.generate("hello", max_new_tokens=30)
    assert (result.token_ids, result.stats.accepted_length) == (expected, 1.0)
    assert plain.drafter == "parallelspec"
    # whatever the folder's manifest becomes, it is another bundle
    bundle.write_manifest(folder, replace(opened.manifest, name="other"))
    other = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(other.proposer, type(untuned.proposer))
