"""Lets contenders answer the same loads in interleaved rounds.

A load is some prompts and a number of clients, each of which sends its next prompt when its last
answer is finished; one prompt of one client is a load, too. All workers of a precision are open at
once. One answers while the others wait, and whose turn comes first rotates from load to load, so
that a machine that slows down slows all of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.measure.rivals.environments import RivalError
from tools.measure.rivals.worker import Worker

Row = dict[str, Any]
REST_SECONDS = 0.1  # before each load, until threads that spin for more work have gone to sleep
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Context:
    """Prompts of one kind of length, as token ids by the prompt's id."""

    name: str
    prompts: Mapping[str, Sequence[int]]


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

    def run(
        self, workers: Mapping[str, Worker], announce: Callable[[str], None] = print
    ) -> tuple[list[Row], dict[str, str]]:
        """Runs all loads; returns the rows of those who took part in all of them, and the reason of
        each that failed.

        A contender that fails is closed and takes no further part. A row holds the answers and the
        process's peak memory so far.
        """
        running, rows = dict(workers), list[Row]()
        failed: dict[str, str] = {}
        warm: set[tuple[str, str, int]] = set()
        for turn, load in enumerate(self.loads):
            names = [*running]
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                worker, num_prompts = running[name], len(load.prompts)
                try:
                    # weights, caches and what is compiled late
                    if (about := (name, load.context.name, load.clients)) not in warm:
                        few = load.clients if load.context is self.loads[0].context else 1
                        worker.ask(self._job(load, few, WARM_UP_TOKENS))
                        warm.add(about)
                    time.sleep(REST_SECONDS)
                    reply = worker.ask(self._job(load, num_prompts, self.max_new_tokens))
                    row = checked(reply, num_prompts, self.max_new_tokens, self.may_end)
                except RivalError as error:
                    failed[name] = str(error)
                    announce(f"{name} is left out: {error}")
                    running.pop(name).close()
                    continue
                row |= {"context": load.context.name, "clients": load.clients, "round": load.round}
                row |= {"contender": name, "prompts": load.prompts, "version": worker.version}
                row["prompt_tokens"] = sum(len(load.context.prompts[each]) for each in load.prompts)
                rows.append({**row, "peak_rss": worker.peak_rss()})
            what = f"{load.context.name} prompts, {load.clients} clients, round {load.round + 1}"
            announce(f"{self.precision}, {what}: {' '.join(load.prompts[:4])}")
        return [row for row in rows if row["contender"] not in failed], failed

    def _job(self, load: Load, count: int, max_new_tokens: int) -> dict[str, Any]:
        ids = [list(load.context.prompts[prompt]) for prompt in load.prompts[:count]]
        return {"prompts": ids, "clients": load.clients, "max_new_tokens": max_new_tokens}


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
