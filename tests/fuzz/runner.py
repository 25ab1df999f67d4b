"""Runs cases in processes of their own, with limits on memory and time.

A worker draws a batch of cases and runs one after the other, because starting a process for each
would take most of the time. It announces each case before it runs, so that a crash, or a worker
that had to be killed, is put down to the right one; another worker goes on behind it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cases import ACCEPTED, FAILED, REFUSED, Kind, Outcome, draw, judge

BATCH = 250
OPENING_SECONDS = 120.0  # to import torch and to write what the cases change
# Where a batch's time goes besides its cases; otherwise the seed would decide what is tried.
Found = Callable[[str, Any, Outcome], None]


@dataclass(frozen=True)
class Batch:
    """So many cases of one kind, by seed; those before `first` have been run."""

    kind: str
    count: int
    seed: int
    first: int = 0


@dataclass
class Tally:
    """What became of the cases of one kind. `digest` is a SHA-256 over all inputs in order of the
    batches, so that two runs can be compared."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0
    digest: str = ""


@dataclass
class Report:
    """The outcomes of a whole run: a tally for each kind, and each failure with its input."""

    seed: int
    kinds: dict[str, Tally] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_cases(self) -> int:
        return sum(tally.cases for tally in self.kinds.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "cases": self.num_cases,
            "failures": len(self.failures),
            "seconds": round(self.seconds, 1),
            "kinds": {name: asdict(tally) for name, tally in self.kinds.items()},
            "failed": self.failures,
        }


def plan(kinds: Sequence[Kind], num_cases: int, seed: int) -> list[Batch]:
    """Returns batches that make up `num_cases`, shared among the kinds by their weights.

    Every batch has its own seed, so that the cases do not depend on the number of workers.
    """
    total = sum(kind.weight for kind in kinds)
    batches = []
    for kind in kinds:
        left, number = max(1, round(num_cases * kind.weight / total)), 0
        while left > 0:
            count = min(BATCH, left)
            batches.append(Batch(kind.name, count, _seed_of(seed, kind.name, number)))
            left, number = left - count, number + 1
    return batches


def _seed_of(seed: int, name: str, number: int) -> int:
    digest = hashlib.sha256(f"{seed} {name} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def run(
    kinds: Sequence[Kind],
    num_cases: int,
    seed: int,
    num_workers: int = 2,
    on_case: Found | None = None,
) -> Report:
    """Runs so many cases of these kinds and returns what became of them.

    `on_case` is called with the kind's name, the case and its outcome, in no fixed order.
    """
    begin = time.monotonic()
    report = Report(seed, {kind.name: Tally() for kind in kinds})
    digests: dict[Batch, Any] = {}

    def take(batch: Batch, case: Any, outcome: Outcome, seconds: float) -> None:
        key = Batch(batch.kind, batch.count, batch.seed)
        text = json.dumps(case)
        digests.setdefault(key, hashlib.sha256()).update(text.encode() + b"\n")
        tally = report.kinds[batch.kind]
        tally.cases += 1
        tally.seconds += seconds
        setattr(tally, outcome.verdict, getattr(tally, outcome.verdict) + 1)
        if outcome.verdict == FAILED:
            report.failures.append({"kind": batch.kind, "case": case, **asdict(outcome)})
        if on_case is not None:
            on_case(batch.kind, case, outcome)

    batches = plan(kinds, num_cases, seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        _serve(list(batches), {kind.name: kind for kind in kinds}, Path(folder), num_workers, take)
    for name, tally in report.kinds.items():
        parts = [digests[batch].hexdigest() for batch in batches if batch.kind == name]
        tally.digest = hashlib.sha256("".join(parts).encode()).hexdigest()
        tally.seconds = round(tally.seconds, 2)
    report.seconds = time.monotonic() - begin
    return report


def run_one(kind: Kind, case: Any) -> Outcome:
    """Runs one stored case in a process of its own."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        worker = _Worker(kind, Path(folder), [case])
        worker.give(Batch(kind.name, 1, 0))
        while not found:
            wait([worker.pipe], timeout=0.2)
            for _, _, outcome, _ in worker.results():
                found.append(outcome)
        worker.stop()
    return found[0]


# ---- the parent's side ----

Take = Callable[[Batch, Any, Outcome, float], None]


def _serve(
    batches: list[Batch], kinds: dict[str, Kind], folder: Path, num_workers: int, take: Take
) -> None:
    """Keeps `num_workers` workers busy until no batch is left."""
    workers: list[_Worker] = []
    try:
        while batches or workers:
            while batches and len(workers) < num_workers:
                worker = _Worker(kinds[batches[0].kind], folder)
                worker.give(batches.pop(0))
                workers.append(worker)
            wait([worker.pipe for worker in workers], timeout=0.2)
            for worker in list(workers):
                for batch, case, outcome, seconds in worker.results():
                    take(batch, case, outcome, seconds)
                if not worker.is_over:
                    continue
                batch, rest = worker.batch, worker.rest
                if rest is not None:
                    batches.insert(0, rest)
                elif worker.is_usable and batches and batches[0].kind == batch.kind:
                    worker.give(batches.pop(0))
                    continue
                worker.stop()
                workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """One process that runs batches of one kind, seen from outside.

    `is_over` says that its batch is done or that it died. Then `rest` is what is left of the
    batch, None if nothing is. `stored` are cases to run in place of drawn ones.
    """

    def __init__(self, kind: Kind, folder: Path, stored: list[Any] | None = None) -> None:
        self.kind = kind
        self.is_over, self.is_usable = False, True
        self.rest: Batch | None = None
        self._room = Path(tempfile.mkdtemp(dir=folder))
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (kind, self._room, theirs, stored)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._running: tuple[int, Any, float] | None = None  # number, case and begin
        self._deadline = time.monotonic() + OPENING_SECONDS

    def give(self, batch: Batch) -> None:
        """Makes the worker run this batch."""
        self.batch, self.is_over, self.rest = batch, False, None
        self._next = batch.first
        self._deadline = time.monotonic() + OPENING_SECONDS
        self.pipe.send(batch)

    def results(self) -> Iterator[tuple[Batch, Any, Outcome, float]]:
        """Yields the outcomes that are known by now, a dead or late worker's last one included."""
        try:
            while not self.is_over and self.pipe.poll():
                kind, *facts = self.pipe.recv()
                if kind == "begin":
                    number, case = facts
                    self._running = number, case, time.monotonic()
                    self._deadline = time.monotonic() + self.kind.seconds
                elif kind == "end":
                    assert self._running is not None
                    number, case, begin = self._running
                    self._next, self._running = number + 1, None
                    self._deadline = time.monotonic() + OPENING_SECONDS
                    yield self.batch, case, Outcome(*facts), time.monotonic() - begin
                else:
                    self.is_over = True
        except (EOFError, OSError):
            yield from self._died(f"died: {self._how()}")
        if not self.is_over and time.monotonic() > self._deadline:
            self._process.kill()
            limit = self.kind.seconds if self._running else OPENING_SECONDS
            yield from self._died(f"took more than {limit:g} s")

    def _died(self, why: str) -> Iterator[tuple[Batch, Any, Outcome, float]]:
        self.is_over, self.is_usable = True, False
        if self._running is None:
            raise RuntimeError(f"a worker for {self.kind.name} {why}, outside of any case\n{self._log()}")
        number, case, begin = self._running
        self._next = number + 1
        if self._next < self.batch.count:
            self.rest = Batch(self.batch.kind, self.batch.count, self.batch.seed, self._next)
        outcome = Outcome(FAILED, f"the process {why}", self._log())
        yield self.batch, case, outcome, time.monotonic() - begin

    def _how(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"by {signal.Signals(-code).name}"
        return f"with exit code {code}"

    def _log(self) -> str:
        """Returns the end of what the process wrote to its standard error."""
        with suppress(OSError):
            return (self._room / "stderr").read_bytes()[-2000:].decode(errors="replace")
        return ""

    def stop(self) -> None:
        """Ends the process and removes its folder."""
        self.pipe.close()
        self._process.kill()
        self._process.join()
        shutil.rmtree(self._room, ignore_errors=True)


# ---- the worker's side ----


def _work(kind: Kind, room: Path, pipe: Connection, stored: list[Any] | None) -> None:
    """Runs batches until the pipe is closed."""
    _shut_in(room)
    run = kind.open(room / "work")
    _limit_memory(kind.megabytes)
    while True:
        try:
            batch: Batch = pipe.recv()
        except EOFError:
            return
        cases = draw(kind, batch.count, batch.seed) if stored is None else stored
        for number, case in enumerate(cases[batch.first :], batch.first):
            pipe.send(("begin", number, case))
            os.ftruncate(2, 0)
            outcome = judge(run, case)
            pipe.send(("end", outcome.verdict, outcome.cause, outcome.detail))
        pipe.send(("batch",))


def _shut_in(room: Path) -> None:
    """Makes `room` the process's home and working folder, and keeps its output out of the way."""
    for name in ("work", "home", "cwd"):
        (room / name).mkdir()
    os.environ.update(HOME=str(room / "home"), XDG_CACHE_HOME=str(room / "home/.cache"))
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TERM="dumb")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    os.chdir(room / "cwd")
    output = os.open(room / "stderr", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory(megabytes: int) -> None:
    """Lets the process take so much more memory than it has now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    limit = taken + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


__all__ = ["ACCEPTED", "FAILED", "REFUSED", "Batch", "Report", "Tally", "plan", "run", "run_one"]
