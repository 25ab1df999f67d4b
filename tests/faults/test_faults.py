"""Proves that trials find faults in commands.

`tools/ci/faults.py` makes any number of them with ours, and docs/reliability.md has its figures.
"""

from collections.abc import Callable
from pathlib import Path

import fault_processes
import pytest
from fault_scenarios import Damaged, Scenario, Shop
from fault_trials import Disturber, why_no_mounts

fault_processes.PRELOADED = ["spec_runtime.loop.target"]  # scripts need no more
WHOLE = """
with open("out.tmp", "w") as file:
    file.write("new")
os.rename("out.tmp", "out")
"""
IN_PLACE = """
with open("out", "w") as file:
    file.write("n")
    file.flush()
    os.mkdir("more")
    os.rmdir("more")
    file.write("ew")
"""
LITTERING = WHOLE.replace('"out.tmp"', 'f"out.{os.getpid()}.tmp"')
SILENT = """
try:
    with open("out", "w") as file:
        file.write("new")
except OSError:
    pass
"""


class Writing(Scenario):
    """Runs a script that has to replace the text of a file."""

    name = "writing"

    def __init__(self, script: Path) -> None:
        super().__init__(Shop(script.parent))
        self._script = script

    def prepare(self, place: Path) -> None:
        (place / "out").write_text("old")

    def arguments(self) -> list[str]:
        return [str(self._script)]

    def check_kept(self, place: Path) -> None:
        if (place / "out").read_text() not in ("old", "new"):
            raise Damaged("the text is cut")

    def result(self, place: Path) -> str:
        self.check_kept(place)
        return (place / "out").read_text()


@pytest.fixture
def disturber(tmp_path: Path) -> Callable[[str], Disturber]:
    """Returns a function that makes the disturber of a script."""

    def make(script: str) -> Disturber:
        file = tmp_path / "script.py"
        file.write_text("import os, pathlib\n" + script)
        return Disturber(Writing(file), tmp_path)

    return make


@pytest.mark.parametrize(
    ("script", "operation", "problem"),
    [
        (WHOLE, "os.rename ", ""),
        (IN_PLACE, "os.rmdir ", "not kept: the text is cut"),
        (LITTERING, "os.rename ", "litter: out."),
    ],
    ids=["whole", "in place", "littering"],
)
def test_what_a_kill_leaves_is_found(
    script: str, operation: str, problem: str, disturber: Callable[[str], Disturber]
) -> None:
    trial = disturber(script).kill_before(operation)
    assert trial.disturbed
    assert [each[: len(problem)] for each in trial.problems[:1]] == [problem] * bool(problem)


def test_a_result_that_nobody_reads_is_found(disturber: Callable[[str], Disturber]) -> None:
    each = disturber(WHOLE)
    assert each.halve().problems == []
    each.scenario.result = lambda place: "new"  # type: ignore[method-assign]
    assert each.halve().problems == ["nobody notices"]


def test_a_command_that_hides_that_it_cannot_write_is_found(
    disturber: Callable[[str], Disturber], tmp_path: Path
) -> None:
    if reason := why_no_mounts(tmp_path / "mount"):
        pytest.skip(reason)

    def problems(script: str) -> list[str]:
        return disturber(script).forbid_writing().problems

    assert problems(SILENT) == ["it ended well in a folder that it cannot write to"]
    (refusal,) = problems(WHOLE)
    assert refusal.startswith("exit code 1, expected 2 and one line: ")
