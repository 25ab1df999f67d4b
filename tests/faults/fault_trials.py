"""Disturbs commands and looks at what is left: kills, full disks, read-only folders, two at once.

Every trial has a place of its own and runs the command once disturbed and once undisturbed. In
between, what was there before must be whole; afterwards, the result must be that of a run that
nobody disturbed, and no other file may lie about.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fault_processes import Death, Ended, Running
from fault_scenarios import Damaged, Scenario

ROOM = "256m"  # of a tmpfs with room for everything
PAGE = 4096
OTHER_FILE = "somebody-elses"  # takes the room on a disk
LITTER = (".tmp", ".old", ".lock")  # what temporary files, replaced folders and locks end in


@dataclass
class Trial:
    """One disturbance and what was wrong after it.

    `disturbed` says that the command did not end as usual: a signal may come after its end.
    """

    scenario: str
    kind: str
    what: str
    disturbed: bool = True
    problems: list[str] = field(default_factory=list)

    def check_kept(self, scenario: Scenario, place: Path) -> None:
        """Notes a problem unless what was there before the run is whole."""
        try:
            scenario.check_kept(place)
        except Damaged as damage:
            self.problems.append(f"not kept: {damage}")

    def __str__(self) -> str:
        found = "; ".join(self.problems) or "recovered"
        return f"{self.scenario}, {self.kind}, {self.what}: {found}"


@dataclass(frozen=True)
class Reference:
    """What a run that nobody disturbs makes in its `place`, and what it takes."""

    place: Path
    result: Any
    files: set[str]
    seconds: float
    operations: list[str]
    bytes_before: int
    bytes_written: int


class Disturber:
    """Makes the trials of one scenario, in new folders below `folder`."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self._folder = folder / scenario.name.replace(" ", "-")
        self._num_places = 0

    @cached_property
    def reference(self) -> Reference:
        """The undisturbed run, made once."""
        place, logs = self._new_place()
        self.scenario.prepare(place)
        before = {file: file.stat() for file in _files_below(place)}
        ended = Running(self.scenario.arguments(), place, logs).wait()
        if ended.exit_code != 0:
            raise RuntimeError(f"{self.scenario.name} fails undisturbed: {ended.err}")
        written = [
            file.stat().st_size
            for file in _files_below(place)
            if file not in before or before[file].st_mtime_ns != file.stat().st_mtime_ns
        ]
        return Reference(
            place,
            self.scenario.result(place),
            self.scenario.files(place),
            ended.seconds,
            ended.operations,
            sum(_pages(stat.st_size) for stat in before.values()),
            sum(_pages(size) for size in written),
        )

    # ---- kills -----------------------------------------------------------------------------------

    def random_death(self, rng: random.Random) -> Death:
        """Returns a moment of the run: two of three are operations on a file, the others times."""
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        if rng.random() < 2 / 3:
            return Death(number, operation=rng.randint(1, len(self.reference.operations)))
        return Death(number, seconds=rng.uniform(0, self.reference.seconds))

    def kill(self, death: Death) -> Trial:
        """Kills a run at a moment, and runs the command again."""
        trial = Trial(self.scenario.name, "kill", str(death))
        place, logs = self._new_place()
        self.scenario.prepare(place)
        ended = Running(self.scenario.arguments(), place, logs / "disturbed", death).wait()
        if death.operation is not None and len(ended.operations) >= death.operation:
            trial.what += f" ({ended.operations[death.operation - 1]})"
        trial.disturbed = ended.exit_code != 0
        if death.signal == signal.SIGTERM:
            trial.problems += _sigterm_problems(ended, place)
        trial.check_kept(self.scenario, place)
        if trial.disturbed:
            self._check_next(trial, place, logs)
        return trial

    def kill_before(self, operation: str) -> Trial:
        """Kills a run right before its last operation on a file that is called like this."""
        all_of_them = enumerate(self.reference.operations, 1)
        number = [i for i, each in all_of_them if each.startswith(operation)][-1]
        return self.kill(Death(signal.SIGKILL, operation=number))

    def halve(self) -> Trial:
        """Cuts the files of an undisturbed run in half, which has to be noticed."""
        trial = Trial(self.scenario.name, "cut in half", "all files of a result", disturbed=False)
        place, _ = self._new_place()
        shutil.copytree(self.reference.place, place, dirs_exist_ok=True)
        for file in _files_below(place):
            os.truncate(file, file.stat().st_size // 2)
        with suppress(Damaged):
            if self.scenario.result(place) == self.reference.result:
                trial.problems.append("nobody notices")
        return trial

    # ---- full disks and read-only folders --------------------------------------------------------

    def fill_disk(self, share: float) -> Trial:
        """Runs the command with room for a `share` of what it writes, then with room for all."""
        trial = Trial(self.scenario.name, "full disk", f"room for {share:.0%} of what it writes")
        reference = self.reference
        size = reference.bytes_before + int(share * reference.bytes_written)

        def disturbed(place: Path, logs: Path) -> Ended:
            _remount(place, f"size={max(_pages(size), PAGE)}")
            return Running(self.scenario.arguments(), place, logs).wait()

        self._try_mounted(trial, disturbed, lambda place: _remount(place, f"size={ROOM}"))
        return trial

    def fill_disk_later(self, share: float) -> Trial:
        """Lets another file take all the room when the command has done a `share` of its
        operations, and gives the room back afterwards."""
        number = int(share * len(self.reference.operations))
        trial = Trial(self.scenario.name, "full disk", f"full from operation {number} on")

        def disturbed(place: Path, logs: Path) -> Ended:
            running = self._run_until(number, place, logs)
            _fill(place / OTHER_FILE)
            return running.wait()

        self._try_mounted(trial, disturbed, lambda place: (place / OTHER_FILE).unlink())
        return trial

    def forbid_writing(self) -> Trial:
        """Runs the command in a folder that cannot be written to, then in one that can."""
        trial = Trial(self.scenario.name, "read-only", "a file system mounted read-only")

        def disturbed(place: Path, logs: Path) -> Ended:
            _remount(place, "ro")
            return Running(self.scenario.arguments(), place, logs).wait()

        ended = self._try_mounted(trial, disturbed, lambda place: _remount(place, "rw"))
        if not trial.disturbed:
            trial.problems.append("it ended well in a folder that it cannot write to")
        if self.scenario.measures and ended.has_decoded:
            trial.problems.append("it measured before it found that it cannot write")
        return trial

    def _try_mounted(
        self, trial: Trial, run: Callable[[Path, Path], Ended], make_good: Callable[[Path], None]
    ) -> Ended:
        """Runs the command on a file system of its own, then again after `make_good`.

        `run` disturbs and runs it, given its place and the folder of its logs.
        """
        place, logs = self._new_place()
        with _tmpfs(place):
            self.scenario.prepare(place)
            ended = run(place, logs / "disturbed")
            trial.disturbed = ended.exit_code != 0
            if trial.disturbed:
                trial.problems += _refusal_problems(ended)
            trial.check_kept(self.scenario, place)
            make_good(place)
            if trial.disturbed:
                self._check_next(trial, place, logs)
        return ended

    def _run_until(self, number: int, place: Path, logs: Path) -> Running:
        """Starts the command and returns when it has begun its operation `number`, or ended."""
        running = Running(self.scenario.arguments(), place, logs)
        while running.is_alive and running.num_operations() < number:
            time.sleep(0.001)
        return running

    # ---- two at once -----------------------------------------------------------------------------

    def run_two(self, share: float) -> Trial:
        """Runs two processes of the command in one place.

        The second one starts when the first has done a `share` of its operations on files.
        """
        number = int(share * len(self.reference.operations))
        trial = Trial(self.scenario.name, "two at once", f"the second at operation {number}")
        place, logs = self._new_place()
        self.scenario.prepare(place)
        first = self._run_until(number, place, logs / "first")
        second = Running(self.scenario.arguments(), place, logs / "second")
        pairs = [(first.wait(), second), (second.wait(), first)]
        losers = [(ended, winner) for ended, winner in pairs if ended.exit_code != 0]
        if len(losers) == 2:
            trial.problems.append("both failed")
        for ended, winner in losers:
            trial.problems += _refusal_problems(ended)
            names_owner = f"process {winner.pid}" in ended.err
            if not names_owner and not (self.scenario.taken and self.scenario.taken in ended.err):
                trial.problems.append(f"the loser does not name the owner: {ended.last_lines}")
        trial.what += ", one was refused" if losers else ", both ended well"
        self._check_result(trial, place)
        return trial

    # ---- after the disturbance -------------------------------------------------------------------

    def _check_next(self, trial: Trial, place: Path, logs: Path) -> None:
        """Runs the command once more, undisturbed, and compares what it makes."""
        ended = Running(self.scenario.next_arguments(place), place, logs / "next").wait()
        if ended.exit_code != 0:
            trial.problems.append(
                f"the next run ended with exit code {ended.exit_code}: {ended.last_lines}"
            )
            return
        self._check_result(trial, place)

    def _check_result(self, trial: Trial, place: Path) -> None:
        """Compares result and files with those of the undisturbed run."""
        try:
            if self.scenario.result(place) != self.reference.result:
                trial.problems.append("the result is not that of an undisturbed run")
        except Damaged as damage:
            trial.problems.append(f"the result is not whole: {damage}")
        files = self.scenario.files(place)
        if litter := sorted(files - self.reference.files):
            trial.problems.append(f"litter: {', '.join(litter[:5])}")
        if missing := sorted(self.reference.files - files):
            trial.problems.append(f"missing: {', '.join(missing[:5])}")

    def _new_place(self) -> tuple[Path, Path]:
        """Returns a new folder to run in, and where to keep what the runs print."""
        self._num_places += 1
        folder = self._folder / str(self._num_places)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "place").mkdir(parents=True)
        return folder / "place", folder / "logs"


def _refusal_problems(ended: Ended) -> list[str]:
    """Returns what is wrong with a command that had to refuse: exit code 2 and one line."""
    if ended.exit_code < 0:
        return [f"it died of {signal.Signals(-ended.exit_code).name}: {ended.last_lines}"]
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    if ended.exit_code != 2 or len(errors) != 1 or "Traceback" in ended.err:
        return [f"exit code {ended.exit_code}, expected 2 and one line: {ended.last_lines}"]
    return []


def _sigterm_problems(ended: Ended, place: Path) -> list[str]:
    """Returns what is wrong after a SIGTERM: it ends in no traceback and leaves no litter.

    If it came while the command was removing something, the rest of that may stay for the next run.
    """
    problems = []
    if "Traceback" in ended.err:
        trace = ended.err[ended.err.index("Traceback") :]
        problems.append(f"SIGTERM ends in a traceback: {' / '.join(trace.splitlines())[-2000:]}")
    last = ended.operations[-1] if ended.operations else ""
    if last.startswith(("os.remove", "os.rmdir")) or last.endswith(".old"):
        return problems
    left = sorted(path.name for path in place.rglob(".*") if path.suffix in LITTER)
    left += sorted(path.name for path in place.rglob(".*.tmp.*"))
    if left:
        problems.append(f"SIGTERM leaves {', '.join(left[:5])}")
    return problems


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _pages(size: int) -> int:
    """Returns how many bytes a file of this size takes on a tmpfs."""
    return -(-size // PAGE) * PAGE


# ---- small file systems ----


def why_no_mounts(folder: Path) -> str | None:
    """Returns why this process may not mount file systems, None if it may."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _tmpfs(folder):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"mounting a tmpfs needs root: {said.strip()}"


@contextmanager
def _tmpfs(place: Path) -> Iterator[None]:
    """Mounts a file system in memory at the folder `place`."""
    _run_as_root("mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(place))
    try:
        yield
    finally:
        _run_as_root("umount", "--lazy", str(place))


def _fill(file: Path) -> None:
    """Writes to a file until its file system is full."""
    with suppress(OSError), open(file, "wb", buffering=0) as stream:
        for size in (1 << 20, PAGE):
            with suppress(OSError):
                while stream.write(bytes(size)) == size:
                    pass


def _remount(place: Path, options: str) -> None:
    _run_as_root("mount", "-o", f"remount,{options}", str(place))


def _run_as_root(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
