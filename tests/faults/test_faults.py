"""Kills commands, fills their disks, forbids them to write and runs them in pairs: a few of each.

`tools/ci/faults.py` makes any number of these trials; docs/reliability.md has its figures.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from fault_processes import Death
from fault_scenarios import SCENARIOS, Damaged, Shop
from fault_trials import Disturber, Trial, why_no_mounts

if TYPE_CHECKING:
    from workshop import Workshop

# Those that take a second or two; builds take several.
QUICK = [name for name in SCENARIOS if not name.startswith("build")]
MEASURING = [name for name, scenario in SCENARIOS.items() if scenario.measures]


@pytest.fixture(scope="module")
def disturber(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Disturber]:
    """Returns a function that gives the disturber of a scenario, each made once."""
    folder = tmp_path_factory.mktemp("faults")
    workshop.bundle("medusa")
    shop = Shop.open(folder / "shop", workshop.folder)
    made: dict[str, Disturber] = {}

    def get(name: str) -> Disturber:
        if name not in made:
            made[name] = Disturber(SCENARIOS[name](shop), folder)
        return made[name]

    return get


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips a test where file systems may not be mounted."""
    if reason := why_no_mounts(tmp_path_factory.mktemp("mount")):
        pytest.skip(reason)


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def check(trial: Trial) -> None:
    assert not trial.problems, str(trial)


KILLS = [
    # right before its last renaming, when all of the new content is there under another name
    *(pytest.param(name, "SIGKILL", r"os\.rename .*", id=name) for name in QUICK),
    # right before the new bundle takes the place of the old one
    pytest.param(
        "build over", "SIGKILL", r"os\.rename /?\.bundle\.\w+\.tmp", marks=pytest.mark.slow
    ),
    *(
        pytest.param(
            name, "SIGTERM", r"open .*", id=f"{name}, asked to end", marks=pytest.mark.slow
        )
        for name in ("distill", "train", "tune")
    ),
]


@pytest.mark.parametrize(("name", "number", "operation"), KILLS)
def test_a_command_killed_while_it_writes_loses_nothing(
    name: str, number: str, operation: str, disturber: Callable[[str], Disturber]
) -> None:
    each = disturber(name)
    fits = [i for i, op in enumerate(each.reference.operations, 1) if re.fullmatch(operation, op)]
    check(each.kill(Death(signal.Signals[number], operation=fits[-1])))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "train", "features"])
@pytest.mark.usefixtures("mounts")
def test_a_full_disk_is_said_in_one_line(name: str, disturber: Callable[[str], Disturber]) -> None:
    each = disturber(name)
    check(each.fill_disk(0.5))
    check(each.fill_disk_later(0.3))


@pytest.mark.parametrize("name", [*MEASURING, *slow("distill", "train")])
@pytest.mark.usefixtures("mounts")
def test_a_read_only_folder_is_said_in_one_line_before_anything_is_measured(
    name: str, disturber: Callable[[str], Disturber]
) -> None:
    check(disturber(name).forbid_writing())


@pytest.mark.parametrize("name", ["distill", *slow("train", "tune")])
def test_of_two_at_once_one_is_refused_or_both_bring_the_result_of_one(
    name: str, disturber: Callable[[str], Disturber]
) -> None:
    check(disturber(name).run_two(0))


@pytest.mark.parametrize("name", QUICK)
def test_the_suite_notices_a_half_written_result(
    name: str, disturber: Callable[[str], Disturber], tmp_path: Path
) -> None:
    each = disturber(name)
    place = tmp_path / "place"
    shutil.copytree(each.reference.place, place)
    assert each.scenario.result(place) == each.reference.result
    for file in place.rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    with suppress(Damaged):
        assert each.scenario.result(place) != each.reference.result
