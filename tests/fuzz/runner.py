"""Runs cases in processes of their own, with limits on memory and time.

A worker draws a batch of cases of one kind and runs one after the other, because starting a process
for each would take most of the time. It announces each case before it runs, so that a crash, or a
worker that had to be killed, is put down to the right one; another worker goes on after it.
"""

import gc
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
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cases import FAILED, Kind, Outcome, Run, draw, judge

BATCH = 250
MAX_BATCHES = 40  # of one process, so that what leaks in it stays little
# What every kind needs, and takes long to import.
PRELOADED = ["hypothesis.strategies", "numpy", "spec_runtime.cli", "spec_runtime.errors"]
OPENING_SECONDS = 180.0  # to import torch, to write what the cases change, to draw a batch
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
    """Runs `num_cases` cases of these kinds and returns what became of them.

    `on_case` is called with the kind's name, the case and its outcome, in no fixed order.
    """
    begin = time.monotonic()
    report = Report(seed, {kind.name: Tally() for kind in kinds})
    digests: dict[Batch, Any] = {}

    def take(batch: Batch, case: Any, outcome: Outcome, seconds: float) -> None:
        key = replace(batch, first=0)
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
        parts = [digests[b].hexdigest() for b in batches if b.kind == name and b in digests]
        tally.digest = hashlib.sha256("".join(parts).encode()).hexdigest()
        tally.seconds = round(tally.seconds, 2)
    report.seconds = time.monotonic() - begin
    return report


def run_one(kind: Kind, case: Any) -> Outcome:
    """Runs one stored case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        worker = _Worker(Path(folder))
        worker.give(kind, Batch(kind.name, 1, 0), [case])
        while True:
            wait([worker.pipe], timeout=0.2)
            for _, _, outcome, _ in worker.results():
                worker.stop()
                return outcome


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
                workers.append(_Worker(folder))
                workers[-1].give(kinds[batches[0].kind], batches.pop(0))
            wait([worker.pipe for worker in workers], timeout=0.2)
            for worker in list(workers):
                for result in worker.results():
                    take(*result)
                if not worker.is_over:
                    continue
                if worker.rest is not None:
                    batches.insert(0, worker.rest)
                if worker.is_usable and batches:
                    worker.give(kinds[batches[0].kind], batches.pop(0))
                else:
                    worker.stop()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


@cache
def _context() -> Any:
    """Returns the server of processes, which imports `PRELOADED` when it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class _Worker:
    """One process that runs batches, seen from outside.

    `is_over` says that its batch is done or that it died. Then `rest` is what is left of the
    batch, None if nothing is, and `is_usable` says whether it can take another one.
    """

    def __init__(self, folder: Path) -> None:
        self.is_over, self.is_usable = False, True
        self.rest: Batch | None = None
        self._room = Path(tempfile.mkdtemp(dir=folder))
        context = _context()
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self._room, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._running: tuple[int, Any, float] | None = None  # number, case and begin
        self._ended: tuple[int, Any, float] | None = None
        self._num_batches = 0

    def give(self, kind: Kind, batch: Batch, stored: list[Any] | None = None) -> None:
        """Makes the worker run this batch, with `stored` cases in place of drawn ones."""
        self._kind, self._batch, self.is_over, self.rest = kind, batch, False, None
        self._ended = None
        self._num_batches += 1
        self.is_usable = self._num_batches < MAX_BATCHES
        self._deadline = time.monotonic() + OPENING_SECONDS
        self.pipe.send((kind, batch, stored))

    def results(self) -> Iterator[tuple[Batch, Any, Outcome, float]]:
        """Yields the outcomes that are known by now, a dead or late worker's last one included."""
        try:
            while not self.is_over and self.pipe.poll():
                what, *facts = self.pipe.recv()
                if what == "begin":
                    number, case = facts
                    self._running = number, case, time.monotonic()
                    self._deadline = time.monotonic() + self._kind.seconds
                elif what == "end":
                    assert self._running is not None
                    number, case, begin = self._running
                    self._ended, self._running = self._running, None
                    self._deadline = time.monotonic() + OPENING_SECONDS
                    yield self._batch, case, Outcome(*facts), time.monotonic() - begin
                else:
                    self.is_over = True
        except (EOFError, OSError):
            yield from self._died(f"died: {self._how()}")
        if not self.is_over and time.monotonic() > self._deadline:
            self._process.kill()
            limit = self._kind.seconds if self._running else OPENING_SECONDS
            yield from self._died(f"took more than {limit:g} s")

    def _died(self, why: str) -> Iterator[tuple[Batch, Any, Outcome, float]]:
        self.is_over, self.is_usable = True, False
        running = self._running or self._ended  # the last one, if it died after its end
        if running is None:
            raise RuntimeError(
                f"a worker for {self._kind.name} {why} before any case\n{self._log()}"
            )
        number, case, begin = running
        if number + 1 < self._batch.count:
            self.rest = replace(self._batch, first=number + 1)
        outcome = Outcome(FAILED, f"the process {why}", self._log())
        yield self._batch, case, outcome, time.monotonic() - begin

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


def _work(room: Path, pipe: Connection) -> None:
    """Runs batches until the pipe is closed."""
    _shut_in(room)
    opened: dict[str, Run] = {}
    while True:
        try:
            kind, batch, stored = pipe.recv()
        except EOFError:
            return
        if kind.name not in opened:
            opened[kind.name] = kind.open(room / kind.name.replace(" ", "-"))
        cases = draw(kind, batch.count, batch.seed) if stored is None else stored
        for number, case in enumerate(cases[batch.first :], batch.first):
            pipe.send(("begin", number, case))
            os.ftruncate(2, 0)
            _limit_memory(kind.megabytes)
            outcome = judge(opened[kind.name], case)
            _limit_memory(None)
            os.chdir(room / "cwd")
            if outcome.verdict == FAILED:
                gc.collect()  # what a failure leaves behind must not be the next case's
            pipe.send(("end", outcome.verdict, outcome.cause, outcome.detail))
        pipe.send(("over",))


def _shut_in(room: Path) -> None:
    """Makes `room` the process's home and working folder, and keeps its output out of the way."""
    for name in ("home", "cwd"):
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


def _limit_memory(megabytes: int | None) -> None:
    """Lets the process take so much more memory than it has now; None takes the limit away."""
    limit = resource.RLIM_INFINITY
    if megabytes is not None:
        lines = Path("/proc/self/status").read_text().splitlines()
        taken = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        limit = taken * 1024 + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
