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

import pytest

pytest.importorskip("torch")

from fault_processes import Death
from fault_scenarios import SCENARIOS, Damaged, Shop
from fault_trials import Disturber, Trial, why_no_mounts

# Those that take a second or two; builds take several.
QUICK = [name for name in SCENARIOS if not name.startswith("build")]
MEASURING = [name for name, scenario in SCENARIOS.items() if scenario.measures]


@pytest.fixture(scope="module")
def disturber(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Disturber]:
    """Returns a function that gives the disturber of a scenario, each made once."""
    folder = tmp_path_factory.mktemp("faults")
    shop = Shop.open(folder / "shop")
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


def check(trial: Trial) -> None:
    assert not trial.problems, str(trial)


@pytest.mark.parametrize("name", QUICK)
def test_a_command_killed_while_it_writes_loses_nothing(
    name: str, disturber: Callable[[str], Disturber]
) -> None:
    each = disturber(name)
    # right before its last renaming, when all of the new content is there under another name
    last = max(i for i, op in enumerate(each.reference.operations, 1) if op.startswith("os.rename"))
    check(each.kill(Death(signal.SIGKILL, operation=last)))


@pytest.mark.slow
def test_a_build_killed_while_it_replaces_a_bundle_loses_nothing(
    disturber: Callable[[str], Disturber],
) -> None:
    each = disturber("build over")
    # right before the new bundle takes the place of the old one
    put = [
        i
        for i, op in enumerate(each.reference.operations, 1)
        if re.fullmatch(r"os\.rename /?\.bundle\.\w+\.tmp", op)
    ]
    check(each.kill(Death(signal.SIGKILL, operation=put[-1])))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "train", "tune"])
def test_a_command_asked_to_end_leaves_no_litter(
    name: str, disturber: Callable[[str], Disturber]
) -> None:
    each = disturber(name)
    written = [i for i, op in enumerate(each.reference.operations, 1) if op.startswith("open")]
    check(each.kill(Death(signal.SIGTERM, operation=written[-1])))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "train", "features"])
@pytest.mark.usefixtures("mounts")
def test_a_full_disk_is_said_in_one_line(name: str, disturber: Callable[[str], Disturber]) -> None:
    each = disturber(name)
    check(each.fill_disk(0.5))
    check(each.fill_disk_later(0.3))


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.usefixtures("mounts")
def test_figures_that_cannot_be_written_are_refused_before_measuring(
    name: str, disturber: Callable[[str], Disturber]
) -> None:
    check(disturber(name).forbid_writing())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "train"])
@pytest.mark.usefixtures("mounts")
def test_a_read_only_folder_is_said_in_one_line(
    name: str, disturber: Callable[[str], Disturber]
) -> None:
    check(disturber(name).forbid_writing())


@pytest.mark.parametrize("name", ["distill"])
def test_of_two_at_once_one_is_refused_or_waits(
    name: str, disturber: Callable[[str], Disturber]
) -> None:
    check(disturber(name).run_two(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "tune"])
def test_of_two_at_once_the_result_is_that_of_one(
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
