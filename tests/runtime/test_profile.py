"""The machine profile on disk: how it is found, what damage does, what an engine makes of it."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_backend import ToyTarget
from toy_bundle import write_bundle
from tuning import COSTS, KEY, opened_anew

from spec_runtime.bundle import manifest as bundle
from spec_runtime.errors import UserError
from spec_runtime.files import machine, mapping
from spec_runtime.files.kept import MOST_BYTES
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.pace import first_use, profile
from spec_runtime.pace.costs import Gain, PassCosts
from spec_runtime.pace.pacer import Pacer
from spec_runtime.pace.profile import PLAIN, Candidate, Key, Profile, Trees
from spec_runtime.trees.budget import Budget, Grown, Static

pytestmark = pytest.mark.usefixtures("toy_graphs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path, ("parallelspec",))


@pytest.fixture
def key(folder: Path) -> Key:
    return profile.key_of(bundle.read(folder, verify=False), "parallelspec", 1)


def some_profile(budget: Budget | None, key: Key = KEY) -> Profile:
    candidates = (
        Candidate(PLAIN, None, 1.0, 1.0, 50.0, 1.0, 1.0),
        Candidate(
            "paying",
            None if budget is None else Trees.of(budget),
            5.0,
            1.4,
            70.0,
            1.4,
            2.1,
            Gain(1.6, 1.2),
            0.8,
        ),
    )
    chosen = "paying" if budget is not None else PLAIN
    return Profile(key, COSTS, "run", candidates if budget else candidates[:1], chosen)


PAYING = Budget(4, growth=Grown(0.01, ((0.5, 0.4),)))


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


STATIC = Budget(5, growth=Static(((0,), (0, 0))))


def test_a_static_tree_is_kept(profile_cache: Path) -> None:
    for budget in (STATIC, PAYING):
        path = profile.write(some_profile(budget))
        found = profile.find(KEY)
        assert found == some_profile(budget)
        assert found.choice.trees is not None
        assert found.choice.trees.budget() == budget
    trees = json.loads(path.read_text())["candidates"][1]["trees"]
    assert trees == {
        "max_nodes": 4,
        "min_probability": 0.01,
        "reliability": [[0.5, 0.4]],
        "paths": None,
    }


def test_a_file_of_an_older_version_is_dropped_with_a_note(
    profile_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its trees were a budget with times of its own."""
    path = profile.write(some_profile(PAYING))
    data = json.loads(path.read_text())
    for candidate in data["candidates"]:
        trees = candidate.pop("trees")
        times = {"step_ms": [1.0, 2.0, 3.0, 4.0], "level_ms": 0.5, "max_depth": None}
        candidate["budget"] = trees and trees | times
    path.write_text(json.dumps(data))
    assert profile.find(KEY) is None
    (message,) = caplog.messages
    assert "costs are measured anew, or run spec-runtime tune again" in message


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
        lambda text: text.replace('"trees": null', '"tree": null'),
        lambda text: text.replace('"trees": null', '"trees": 7'),
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


FAR = PassCosts(1400, ((1, 19.0), (4, 33.0)), 20.0)
VERIFY, CHOSEN = ("costs", "verify"), ("candidates", 1)
TREES = (*CHOSEN, "trees")

# Where a profile is tampered with, and what is put there.
TAMPERED: list[tuple[tuple[str | int, ...], Any]] = [
    (("costs", "far", "context"), 200),
    (("costs", "far", "context"), 3),
    (("costs", "far", "context"), 2**62),
    (("costs", "far", "verify"), [[1, 19.0]]),
    (("costs", "far", "verify"), [[1, 19.0], [5, 33.0]]),
    (("costs", "far", "verify", 1, 1), 1e308),
    (("costs", "far", "plain"), 1e308),
    (("costs", "far"), []),
    (("costs", "context"), -200),
    (("costs", "context"), "200"),
    ((*VERIFY, 1, 0), 1),
    ((*VERIFY, 1, 0), 1e308),
    ((*VERIFY, 1, 1), 1e308),
    ((*VERIFY, 1, 1), 5e-324),
    ((*VERIFY, 1), [4, 13.0, 1.0]),
    (VERIFY, []),
    (VERIFY, [[n, 13.0] for n in range(1, 9999)]),
    (("costs", "plain"), 1e308),
    (("costs", "plain"), 5e-324),
    (("costs", "draft"), 1e308),
    (("costs", "level"), -1.0),
    (("costs", "host"), True),
    (("costs", "prefill"), 1e308),
    ((*TREES, "max_nodes"), 10**10),
    ((*TREES, "reliability"), [[0.5, 0.4, 0.1]]),
    ((*TREES, "reliability"), [[i / 9999, i / 9999] for i in range(1, 9999)]),
    ((*CHOSEN, "sampled_trust"), 1e308),
    ((*CHOSEN, "sampled_trust"), 5e-324),
    ((*TREES, "paths"), [[0], [0, 10**9, 0]]),
    ((*CHOSEN, "speedup"), 1e-300),
    ((*CHOSEN, "accepted_length"), -1.0),
    ((*CHOSEN, "sampled_gain", "speedup"), 1e308),
    ((*CHOSEN, "nodes"), 0),
    (("key", "threads"), 1.0),
]


def tampered(stored: Profile, at: tuple[str | int, ...], value: Any) -> str:
    """Returns the profile as its file has it, with another value at this place."""
    document = mapping.to_json(stored)
    within: Any = document
    for key in at[:-1]:
        within = within[key]
    within[at[-1]] = value
    return json.dumps(document)


@pytest.mark.first_use
@pytest.mark.parametrize("part", range(4))
def test_a_tampered_profile_is_dropped_and_measured_anew(
    profile_cache: Path,
    folder: Path,
    key: Key,
    toy_graphs: list[ToyTarget],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    part: int,
) -> None:
    monkeypatch.setattr(first_use, "PASS_SECONDS", 0.0)
    whole = replace(some_profile(PAYING, key), costs=replace(COSTS, context=200, far=FAR))
    path = profile.write(whole)
    assert profile.find(key) == whole
    asked: list[Any] = [{"max_new_tokens": 30}]
    asked.append({**asked[0], "temperature": 1.0, "seed": 3})
    plain = opened_anew(toy_graphs, folder, drafter="none", threads=1)
    expected = [plain.generate("hello", **options).token_ids for options in asked]
    for at, value in TAMPERED[part::4]:
        caplog.clear()
        path.write_text(tampered(whole, at, value))
        engine = opened_anew(toy_graphs, folder, threads=1)
        answers = [engine.generate("hello", **options).token_ids for options in asked]
        assert answers == expected, (at, value)
        note = caplog.messages[0]
        assert str(path) in note, (at, value)
        assert "costs are measured anew" in note
        assert len([each for each in caplog.messages if "is ignored" in each]) == 1
        assert profile.find(key) not in (None, whole), "it is overwritten"


def test_a_profile_is_used_where_options_leave_less_room(
    profile_cache: Path, folder: Path, key: Key, toy_graphs: list[ToyTarget]
) -> None:
    most = opened_anew(toy_graphs, folder, threads=1, profile=False).target.max_nodes
    grown = Budget(most, growth=Grown(0.01, ((0.5, 0.4),)))
    static = Budget(most, growth=Static(tuple((rank,) for rank in range(most - 1))))
    for budget in (grown, static):
        profile.write(some_profile(budget, key))
        whole = opened_anew(toy_graphs, folder, threads=1)
        strict = opened_anew(toy_graphs, folder, threads=1, strict=True)
        assert (whole.budget.max_nodes, strict.budget.max_nodes) == (most, most - 1)
        answers = [each.generate("hello", max_new_tokens=9).token_ids for each in (whole, strict)]
        assert answers[0] == answers[1]


def test_costs_of_a_far_context_that_was_slow_stay_positive() -> None:
    slow = replace(FAR, verify=((1, 1e5), (4, 1e5)), plain=1e5)
    costs = replace(COSTS, context=200, far=slow).at(0)
    assert costs == replace(COSTS, verify=((1, 4.5), (4, 6.5)), plain=5.0, context=200)
    assert min(costs.step_ms(4)) > 0


def lock(path: Any) -> Any:
    return path.with_name(f".{path.name}.lock")


IN_ITS_PLACE: dict[str, Callable[[Any], object]] = {
    "a folder": lambda path: (path / "x").mkdir(parents=True),
    "a loop of links": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
    "an unreadable file": lambda path: (path.write_text("{}"), path.chmod(0)),
    "an endless file": lambda path: path.write_bytes(bytes(MOST_BYTES + 1)),
    "nested": lambda path: path.write_text("[" * 100_000),
    "not a number": lambda path: path.write_text('{"key": NaN}'),
    "not UTF-8": lambda path: path.write_bytes(b'{"key": "\xff"}'),
    "a folder for a lock": lambda path: (path.write_text("{"), lock(path).mkdir()),
    "a loop for a lock": lambda path: (path.write_text("{"), lock(path).symlink_to(lock(path))),
    "a file for the folder": lambda path: (path.parent.rmdir(), path.parent.write_text("")),
    "a loop for the folder": lambda path: (
        path.parent.rmdir(),
        path.parent.symlink_to(path.parent),
    ),
}


@pytest.mark.first_use
@pytest.mark.parametrize("what", IN_ITS_PLACE)
def test_whatever_is_in_the_place_of_a_profile_requests_are_answered(
    profile_cache: Path,
    folder: Path,
    key: Key,
    toy_graphs: list[ToyTarget],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setattr(first_use, "PASS_SECONDS", 0.0)
    path = profile.path_of(key)
    path.parent.mkdir(parents=True)
    IN_ITS_PLACE[what](path)
    plain = opened_anew(toy_graphs, folder, drafter="none", threads=1)
    expected = plain.generate("hello", max_new_tokens=9).token_ids
    engine = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(engine.proposer, Pacer)
    assert engine.generate("hello", max_new_tokens=9).token_ids == expected


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU\nstepping\t: 1\n\nmodel name\t: B\n"
    )
    assert machine.cpu_model(file) == "Some CPU 17 1"
    assert machine.cpu_model(tmp_path / "none")


def test_an_engine_is_opened_as_the_profile_says(
    profile_cache: Path, folder: Path, key: Key, toy_graphs: list[ToyTarget]
) -> None:
    assert (key.precision, key.threads) == ("fp32", 1)
    untuned = opened_anew(toy_graphs, folder, threads=1)
    expected = untuned.generate("hello", max_new_tokens=30).token_ids
    profile.write(some_profile(PAYING, key))
    tuned = opened_anew(toy_graphs, folder, threads=1)
    assert tuned.budget == PAYING
    assert tuned.is_tuned
    assert isinstance(tuned.proposer, Pacer)
    assert tuned.generate("hello", max_new_tokens=30).token_ids == expected
    for other in (
        tuned.with_drafter("prompt_lookup"),
        tuned.with_drafter(None, lookup=True),
        opened_anew(toy_graphs, folder, threads=1, profile=False),
        opened_anew(toy_graphs, folder, threads=2),
    ):
        assert other.budget != PAYING
        assert not other.is_tuned
        assert not isinstance(other.proposer, Pacer)
    profile.write(some_profile(None, key))
    plain = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(plain.proposer, PlainProposer)
    result = plain.generate("hello", max_new_tokens=30)
    assert (result.token_ids, result.stats.accepted_length) == (expected, 1.0)
    assert plain.drafter == "parallelspec"
    # whatever the folder's manifest becomes, it is another bundle
    bundle.write_manifest(folder, replace(bundle.read(folder, verify=False).manifest, name="other"))
    other = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(other.proposer, type(untuned.proposer))


@pytest.mark.parametrize("verify", [((4, 13.0), (1, 9.0)), ((1, 9.0), (1, 9.0))])
def test_costs_are_of_ascending_numbers_of_nodes(verify: Any) -> None:
    with pytest.raises(UserError, match="expected ascending numbers"):
        replace(COSTS, far=None, verify=verify)


def test_native_operators_have_costs_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes another time with them, so that what was measured without does not hold."""
    keys = set()
    for wanted in ("0", "1"):
        monkeypatch.setenv("SPECSPLIT_KERNELS", wanted)
        keys.add(profile.key_of(bundle.read(folder, verify=False), "parallelspec", 1))
    assert len(keys) == 2
