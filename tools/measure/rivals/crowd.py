"""Lets contenders answer loads of many clients in interleaved rounds, and sums up what they got.

A load is a number of prompts and of clients, each of which sends its next prompt when its last
answer is finished. Figures are computed from the journal's rows, as in report.py.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_runtime.loop.stats import ratio
from spec_runtime.measure.audit import first_difference
from tools.figures import markdown, spread, spread_text
from tools.measure.rivals import field
from tools.measure.rivals.environments import RivalError
from tools.measure.rivals.field import OURS, PLAIN, WORKERS, Contender, Options, Rival
from tools.measure.rivals.race import REST_SECONDS, Context, Journal, Row
from tools.measure.rivals.worker import Worker

Figures = dict[str, Any]
ALONE, LANES = "one at a time", "lanes"
BEFORE = f"{OURS}, {ALONE}"
WARM_UP_TOKENS = 4
KEYS = ("context", "clients", "round", "contender")  # of a load, in its row
# OpenVINO's products and cache have its default precisions, and at fp32 float32, too.
OPENVINO_MODES = (PLAIN, "lookup", f"{PLAIN} in f32", "lookup in f32")
HEAD = (
    *("contender", "prompts", "clients", "tokens/s", "over one at a time", "first ms", "p95"),
    *("gap ms", "p99", "longest", "answers as alone"),
)


def rivals(precision: str) -> list[Rival]:
    """Returns those of `field.RIVALS` that answer several at a time, in their modes for that."""
    modes = OPENVINO_MODES if precision == "fp32" else OPENVINO_MODES[:2]
    found = []
    for each in field.RIVALS:
        if each.environment is field.OPENVINO:
            found.append(replace(each, worker="openvino_clients.py", modes=modes))
        elif each.environment is field.LLAMA_CPP:
            found.append(replace(each, modes=(PLAIN,)))
    return found


def ours(bundle: Path, precision: str, options: Options, parallel: int) -> list[Contender]:
    """Returns our contenders: one call at a time, `parallel` at a time, and without drafting."""
    modes = {
        ALONE: (None, 1),
        LANES: (None, parallel),
        f"{LANES}, {PLAIN}": ("none", parallel),
    }
    settings = {
        **field.common(options),
        "model": str(bundle.absolute()),
        "lookup": None,
        "profile": options.profile,
    }
    command = (sys.executable, str(WORKERS / "ours_clients.py"))
    return [
        Contender(
            f"{OURS}, {mode}",
            OURS,
            mode,
            field.OUR_WEIGHTS[precision],
            command,
            {**settings, "drafter": drafter, "parallel": at_once},
        )
        for mode, (drafter, at_once) in modes.items()
    ]


@dataclass(frozen=True)
class Crowd:
    """What everyone answers: prompts by context, and how many by how many clients.

    With `clients` there are as many prompts as clients times the context's `answers`, and at least
    `least`; a context with fewer prompts begins again. `answers` and `clients` are by context.
    """

    contexts: Sequence[Context]
    clients: Mapping[str, Sequence[int]]
    answers: Mapping[str, int]
    least: int
    rounds: int
    max_new_tokens: int

    def loads(self) -> Iterator[tuple[int, Context, int]]:
        """Yields round, context and clients of every load, in the order in which they are run."""
        for number in range(self.rounds):
            for context in self.contexts:
                for clients in self.clients[context.name]:
                    yield number, context, clients

    def prompts(self, context: Context, clients: int) -> list[str]:
        """Returns the ids of a load's prompts."""
        count = max(self.least, clients * self.answers[context.name])
        names = list(context.prompts)
        return [names[i % len(names)] for i in range(count)]


def run(
    crowd: Crowd,
    workers: Mapping[str, Worker],
    journal: Journal,
    announce: Callable[[str], None] = print,
) -> dict[str, str]:
    """Runs all loads that the journal has no row of; returns the reason of each that failed.

    Whose turn comes first rotates from load to load. A contender that fails is closed and takes no
    further part.
    """
    done = {tuple(row[key] for key in KEYS) for row in journal.rows}
    running = dict(workers)
    failed: dict[str, str] = {}
    warm: set[tuple[str, str, int]] = set()
    for turn, (number, context, clients) in enumerate(crowd.loads()):
        names = [*running]
        first = turn % max(1, len(names))
        said = []
        for name in names[first:] + names[:first]:
            key = (context.name, clients, number, name)
            if key in done:
                continue
            prompts = crowd.prompts(context, clients)
            ids = [list(context.prompts[prompt]) for prompt in prompts]
            load = {"clients": clients, "max_new_tokens": crowd.max_new_tokens, "prompts": ids}
            try:
                worker = running[name]
                if (name, context.name, clients) not in warm:  # caches, and what is compiled late
                    few = clients if context is crowd.contexts[0] else 1
                    worker.ask({**load, "prompts": ids[:few], "max_new_tokens": WARM_UP_TOKENS})
                    warm.add((name, context.name, clients))
                time.sleep(REST_SECONDS)
                reply = checked(worker.ask(load), len(prompts), crowd.max_new_tokens)
            except RivalError as error:
                failed[name] = str(error)
                announce(f"{name} is left out: {error}")
                running.pop(name).close()
                continue
            row = dict(zip(KEYS, key, strict=True))
            about = {"version": worker.version, **worker.memory(), "prompts": prompts}
            journal.add({**row, **reply, **about})
            said.append(f"{name} {speed(reply):.1f}")
        announce(f"round {number + 1}, {context.name}, {clients} clients: {'; '.join(said)}")
    return failed


def is_over(crowd: Crowd, names: Sequence[str], journal: Journal) -> bool:
    """Says whether the journal has a row of every load of all these contenders."""
    done = {tuple(row[key] for key in KEYS) for row in journal.rows}
    return all(
        (context.name, clients, number, name) in done
        for number, context, clients in crowd.loads()
        for name in names
    )


def rows_of(crowd: Crowd, journal: Journal, contenders: Sequence[Contender]) -> list[Row]:
    """Returns the journal's rows of these loads and contenders."""
    loads = {(number, context.name, clients) for number, context, clients in crowd.loads()}
    names = {each.name for each in contenders}
    return [
        row
        for row in journal.rows
        if (row["round"], row["context"], row["clients"]) in loads and row["contender"] in names
    ]


def checked(reply: Mapping[str, Any], num_answers: int, num_tokens: int) -> Row:
    """Returns a load's seconds and answers; raises RivalError for what no load can have taken."""
    try:
        seconds, answers = float(reply["seconds"]), list(reply["answers"])
        counts = [sum(count for _, count in each["parts"]) for each in answers]
        lengths = [len(each["tokens"]) for each in answers]
        times = [time for each in answers for time in (each["sent"], *dict(each["parts"]))]
    except (KeyError, TypeError, ValueError) as error:
        raise RivalError(f"got a reply with {', '.join(reply)}: {error!r}") from None
    expected = [num_tokens] * num_answers
    if counts != expected or lengths != expected:
        raise RivalError(
            f"got answers of {lengths} tokens, in parts of {counts}, expected {num_answers} of "
            f"{num_tokens}"
        )
    if not 0 <= min(times) <= max(times) <= seconds:
        raise RivalError(f"got times up to {max(times)} s in a load of {seconds} s")
    return {"seconds": seconds, "answers": answers}


# ---- figures ----


def speed(row: Mapping[str, Any]) -> float:
    """Returns the tokens per second of all answers, with their prompts' passes."""
    return ratio(sum(len(each["tokens"]) for each in row["answers"]), row["seconds"])


def summarise(rows: Sequence[Row], contenders: Sequence[Contender]) -> list[Figures]:
    """Returns a row of figures for each context, contender and number of clients.

    Tokens a second are by round. Times to the first token and gaps, those between parts of one
    answer, of one token or several, are over all answers of all rounds, in milliseconds.
    """
    rows = sorted(rows, key=lambda row: row["round"])
    alone: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["contender"] == BEFORE:
            for prompt, answer in zip(row["prompts"], row["answers"], strict=True):
                alone.setdefault((row["context"], prompt), answer["tokens"])
    cells: dict[tuple[str, str, int], list[Row]] = {}
    for context in dict.fromkeys(row["context"] for row in rows):
        for each in contenders:
            for row in rows:
                if (row["context"], row["contender"]) == (context, each.name):
                    cells.setdefault((context, each.name, row["clients"]), []).append(row)
    weights = {each.name: each.weights for each in contenders}
    found = []
    for (context, name, clients), own in cells.items():
        before = cells.get((context, BEFORE, clients), [])
        gains = [ratio(speed(a), speed(b)) for a, b in zip(own, before, strict=False)]
        found.append(
            {
                "context": context,
                "contender": name,
                "weights": weights[name],
                "ours": name.startswith(OURS),
                "clients": clients,
                **_times(own),
                "gain": spread(gains) if gains else None,
                "as_alone": _agreement(own, alone),
                "peak_rss": max(row.get("peak_rss", 0) for row in own),
            }
        )
    return found


def _times(rows: Sequence[Row]) -> Figures:
    answers = [answer for row in rows for answer in row["answers"]]
    firsts = [answer["parts"][0][0] - answer["sent"] for answer in answers]
    gaps = [
        after - before
        for answer in answers
        for (before, _), (after, _) in zip(answer["parts"], answer["parts"][1:], strict=False)
    ]
    return {
        "answers": len(answers),
        "tokens_per_second": spread([speed(row) for row in rows]),
        "first_ms": {"median": quantile(firsts, 50), "p95": quantile(firsts, 95)},
        "gap_ms": {
            "median": quantile(gaps, 50),
            "p99": quantile(gaps, 99),
            "longest": quantile(gaps, 100),
        },
    }


def quantile(seconds: Sequence[float], percent: int) -> float:
    """Returns a percentile in milliseconds; 0 of none."""
    if not seconds:
        return 0.0
    if percent == 100 or len(seconds) == 1:
        return 1000 * max(seconds)
    return 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def _agreement(rows: Sequence[Row], alone: Mapping[tuple[str, str], list[int]]) -> Figures:
    """Counts the answers that equal ours of one at a time; `parted` are where others first differ,
    each by its prompt and position."""
    parted = []
    compared = 0
    for row in rows:
        for prompt, answer in zip(row["prompts"], row["answers"], strict=True):
            expected = alone.get((row["context"], prompt))
            if expected is None:
                continue
            compared += 1
            at = first_difference(expected, answer["tokens"])
            if at is not None:
                parted.append({"prompt": prompt, "position": at})
    return {"prompts": compared, "identical": compared - len(parted), "parted": parted}


def best(rows: Sequence[Figures]) -> list[Figures]:
    """Returns, by context and clients, our lanes over the rivals' fastest and over no drafting."""
    found = []
    for context, clients in dict.fromkeys((row["context"], row["clients"]) for row in rows):
        here = {
            row["contender"]: row["tokens_per_second"]
            for row in rows
            if (row["context"], row["clients"]) == (context, clients)
        }
        if (lanes := here.get(f"{OURS}, {LANES}")) is None:
            continue
        others = {name: each for name, each in here.items() if not name.startswith(OURS)}
        rival = max(others, key=lambda name: others[name]["median"], default=None)
        plain = here.get(f"{OURS}, {LANES}, {PLAIN}")
        over = None if rival is None else ratio(lanes["median"], others[rival]["median"])
        found.append(
            {
                "context": context,
                "clients": clients,
                "rival": rival,
                "over_rival": over,
                "over_plain": None if plain is None else ratio(lanes["median"], plain["median"]),
            }
        )
    return found


def best_line(row: Figures) -> str:
    """Returns a line for a row of `best`."""
    ratios = [
        f"{row[key]:.2f} over {name}"
        for key, name in (("over_rival", row["rival"]), ("over_plain", "no drafting"))
        if row[key] is not None
    ]
    return f"{row['context']}, {row['clients']} clients: lanes {', '.join(ratios)}"


def table(rows: Sequence[Figures]) -> str:
    """Returns a Markdown table for the terminal."""
    return markdown(
        HEAD,
        [
            [
                row["contender"],
                row["context"],
                str(row["clients"]),
                spread_text(row["tokens_per_second"], ".1f"),
                "" if row["gain"] is None else f"{row['gain']['median']:.2f}",
                *(f"{row['first_ms'][key]:.0f}" for key in ("median", "p95")),
                *(f"{row['gap_ms'][key]:.0f}" for key in ("median", "p99", "longest")),
                f"{row['as_alone']['identical']} of {row['as_alone']['prompts']}",
            ]
            for row in rows
        ],
        left=2,
    )
