"""Lets contenders answer the same loads in interleaved rounds, and keeps every answer in a file.

A load is some prompts and a number of clients, each of which sends its next prompt when its last
answer is finished; one prompt of one client is a load, too. All workers of a precision are open at
once. One answers while the others wait, and whose turn comes first rotates from load to load, so
that a machine that slows down slows all of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError
from tools.measure.rivals.environments import RivalError
from tools.measure.rivals.worker import Worker

Row = dict[str, Any]
REST_SECONDS = 0.1  # before each load, until threads that spin for more work have gone to sleep
WARM_UP_TOKENS = 8
KEYS = ("precision", "context", "clients", "round", "prompts", "contender")  # of a load, in its row


@dataclass(frozen=True)
class Context:
    """Prompts of one kind of length, as token ids by the prompt's id."""

    name: str
    prompts: Mapping[str, Sequence[int]]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(sorted(self.prompts.items())).encode()).hexdigest()[:16]


class Journal:
    """Keeps rows in a JSON Lines file, the first of which holds the run's settings.

    Every row is appended at once, so that a run that was killed goes on after its last whole row.
    Raises UserError if the file is there with other settings.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file = file
        self.rows: list[Row] = []
        whole = json.dumps({"settings": settings})
        if file.is_file() and (text := file.read_text(encoding="utf-8")):
            first, *rest = text.split("\n")
            if json.loads(first) != json.loads(whole):
                raise UserError(
                    f"{file} holds answers to other settings (prompts, tokens, threads, "
                    "precisions, bundles or versions): remove it to measure again"
                )
            self.rows = [json.loads(line) for line in rest[:-1]]  # a torn row has no line's end
        text = "".join(line + "\n" for line in (whole, *map(json.dumps, self.rows)))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def add(self, row: Row) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)


@dataclass(frozen=True)
class Load:
    """Prompts of a context that so many clients ask, in one round."""

    context: Context
    clients: int
    round: int
    prompts: tuple[str, ...]


def one_by_one(contexts: Sequence[Context], rounds: int) -> list[Load]:
    """Returns a load for each prompt in each round."""
    return [
        Load(context, 1, number, (prompt,))
        for context in contexts
        for number in range(rounds)
        for prompt in context.prompts
    ]


def by_many(
    contexts: Sequence[Context],
    clients: Mapping[str, Sequence[int]],
    answers: Mapping[str, int],
    least: int,
    rounds: int,
) -> Iterator[Load]:
    """Yields a load for each number of clients in each round: as many prompts as clients times the
    context's `answers`, and at least `least`; a context with fewer prompts begins again."""
    for number in range(rounds):
        for context in contexts:
            names = list(context.prompts)
            for count in clients[context.name]:
                asked = range(max(least, count * answers[context.name]))
                yield Load(context, count, number, tuple(names[i % len(names)] for i in asked))


@dataclass(frozen=True)
class Race:
    """What everyone answers at one precision. Without `may_end`, answers go on past the end of a
    text, to `max_new_tokens`."""

    precision: str
    loads: Sequence[Load]
    max_new_tokens: int
    may_end: bool

    def rows(self, journal: Journal, names: Iterable[str]) -> list[Row]:
        """Returns the journal's rows of these loads and contenders."""
        wanted = {self._key(load, name) for load in self.loads for name in names}
        return [row for row in journal.rows if _key_of(row) in wanted]

    def is_over(self, names: Sequence[str], journal: Journal) -> bool:
        """Says whether the journal has a row of every load of all these contenders."""
        return len(self.rows(journal, names)) == len(self.loads) * len(names)

    def run(
        self,
        workers: Mapping[str, Worker],
        journal: Journal,
        announce: Callable[[str], None] = print,
    ) -> dict[str, str]:
        """Runs all loads that the journal has no row of; returns the reason of each that failed.

        A contender that fails is closed and takes no further part. A row holds the answers and the
        process's peak memory so far.
        """
        done = {_key_of(row) for row in journal.rows}
        running = dict(workers)
        failed: dict[str, str] = {}
        warm: set[tuple[str, str, int]] = set()
        for turn, load in enumerate(self.loads):
            names = [*running]
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                key = self._key(load, name)
                if key in done:
                    continue
                try:
                    # weights, caches and what is compiled late
                    if (about := (name, load.context.name, load.clients)) not in warm:
                        few = load.clients if load.context is self.loads[0].context else 1
                        running[name].ask(self._job(load, few, WARM_UP_TOKENS))
                        warm.add(about)
                    time.sleep(REST_SECONDS)
                    num_prompts = len(load.prompts)
                    job = self._job(load, num_prompts, self.max_new_tokens)
                    reply = running[name].ask(job)
                    row = checked(reply, num_prompts, self.max_new_tokens, self.may_end)
                except RivalError as error:
                    failed[name] = str(error)
                    announce(f"{name} is left out: {error}")
                    running.pop(name).close()
                    continue
                row["version"], row["peak_rss"] = running[name].version, running[name].peak_rss()
                row["prompt_tokens"] = sum(len(load.context.prompts[each]) for each in load.prompts)
                journal.add({**dict(zip(KEYS, key, strict=True)), **row})
            what = f"{load.context.name} prompts, {load.clients} clients, round {load.round + 1}"
            announce(f"{self.precision}, {what}: {' '.join(load.prompts[:4])}")
        return failed

    def _job(self, load: Load, count: int, max_new_tokens: int) -> dict[str, Any]:
        ids = [list(load.context.prompts[prompt]) for prompt in load.prompts[:count]]
        return {"prompts": ids, "clients": load.clients, "max_new_tokens": max_new_tokens}

    def _key(self, load: Load, name: str) -> tuple[Any, ...]:
        about = (load.context.name, load.clients, load.round, load.prompts)
        return (self.precision, *about, name)


def _key_of(row: Row) -> tuple[Any, ...]:
    return tuple(tuple(row[key]) if key == "prompts" else row[key] for key in KEYS)


def checked(reply: Mapping[str, Any], num_answers: int, most: int, may_end: bool = False) -> Row:
    """Returns a load's seconds and answers; raises RivalError for what no load can have taken."""
    try:
        seconds, answers = float(reply["seconds"]), list(reply["answers"])
        counts = [sum(count for _, count in each["parts"]) for each in answers]
        lengths = [len(each["tokens"]) for each in answers]
        times = [time for each in answers for time in (each["sent"], *dict(each["parts"]))]
    except (KeyError, TypeError, ValueError) as error:
        raise RivalError(f"got a reply with {', '.join(reply)}: {error!r}") from None
    is_right = all(0 < each <= most if may_end else each == most for each in lengths)
    if not is_right or counts != lengths or len(answers) != num_answers:
        raise RivalError(
            f"got answers of {lengths} tokens, in parts of {counts}, expected {num_answers} of "
            f"{'at most ' if may_end else ''}{most}"
        )
    if not 0 <= min(times) <= max(times) <= seconds:
        raise RivalError(f"got times up to {max(times)} s in a load of {seconds} s")
    return {"seconds": seconds, "answers": answers}
