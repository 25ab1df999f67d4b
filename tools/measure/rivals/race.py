"""Lets contenders decode the same prompts in interleaved rounds, and keeps every answer in a file.

All workers of a precision are open at once. One decodes while the others wait, and whose turn comes
first rotates from prompt to prompt, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError
from tools.measure.rivals.environments import RivalError
from tools.measure.rivals.worker import Answer, Worker

Row = dict[str, Any]
REST_SECONDS = 0.1  # before each job, until threads that spin for more work have gone to sleep
WARM_UP_TOKENS = 8
KEYS = ("precision", "context", "round", "prompt", "contender")  # of a job, in its row


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
class Race:
    """What everyone decodes at one precision, and how often."""

    precision: str
    contexts: Sequence[Context]
    rounds: int
    max_new_tokens: int

    def jobs(self) -> list[tuple[Context, int, str]]:
        """Returns context, round and prompt of every job, in the order in which they are run."""
        return [
            (context, number, prompt)
            for context in self.contexts
            for number in range(self.rounds)
            for prompt in context.prompts
        ]


def is_over(race: Race, names: Iterable[str], journal: Journal) -> bool:
    """Says whether the journal has a row of every job of all these contenders."""
    done = {_key(row) for row in journal.rows}
    return all(
        (race.precision, context.name, number, prompt, name) in done
        for context, number, prompt in race.jobs()
        for name in names
    )


def run(
    race: Race,
    workers: Mapping[str, Worker],
    journal: Journal,
    announce: Callable[[str], None] = print,
) -> dict[str, str]:
    """Runs all jobs that the journal has no row of; returns the reason of each that failed.

    A contender that fails is closed and takes no further part. A row holds the figures of `Answer`,
    its tokens, the process's memory so far, and the CPU time that the waiting workers used.
    """
    done = {_key(row) for row in journal.rows}
    running = dict(workers)
    failed: dict[str, str] = {}
    warm: set[tuple[str, str]] = set()
    for turn, (context, number, prompt) in enumerate(race.jobs()):
        names = [*running]
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            key = (race.precision, context.name, number, prompt, name)
            if key in done:
                continue
            row = dict(zip(KEYS, key, strict=True))
            ids = context.prompts[prompt]
            try:
                if (name, context.name) not in warm:  # weights, caches and compiled shapes
                    running[name].generate(ids, WARM_UP_TOKENS)
                    warm.add((name, context.name))
                time.sleep(REST_SECONDS)
                others = [worker for other, worker in running.items() if other != name]
                before = _cpu_seconds(others)
                answer = running[name].generate(ids, race.max_new_tokens)
                idle = _cpu_seconds(others) - before
            except RivalError as error:
                failed[name] = str(error)
                announce(f"{name} is left out: {error}")
                running.pop(name).close()
                continue
            about = {
                "version": running[name].version,
                "prompt_tokens": len(ids),
                "others_cpu_seconds": max(0.0, round(idle, 3)),
            }
            journal.add({**row, **_figures(answer), **about, **running[name].memory()})
        announce(f"{race.precision}, {context.name} prompts, round {number + 1}: prompt {prompt}")
    return failed


def _cpu_seconds(workers: Iterable[Worker]) -> float:
    return sum(worker.cpu_seconds() for worker in workers)


def _figures(answer: Answer) -> Row:
    return {
        "tokens": answer.tokens,
        "first": answer.first,
        "prefill_seconds": round(answer.prefill_seconds, 6),
        "seconds": round(answer.seconds, 6),
    }


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in KEYS)
