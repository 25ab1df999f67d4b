"""Sends good and bad requests to a server from several clients at once, and says how it bore them.

    python -m tools.measure.load_server --bundle DIR [--requests 200] [--clients 16] --compare 5
    python -m tools.measure.load_server --bundle DIR --bundle OTHER --max-loaded 1
    python -m tools.measure.load_server --bundle DIR --hostile all [--cold]

Starts `spec-runtime serve` in a process of its own. Most requests are streams, some whole answers.
About a third are unkind: readers that wait before each part, clients that leave in the midst of an
answer, JSON that is none, bytes that are no UTF-8, bodies far too large. Every request has to end
as its kind should: with a whole answer, or with the error that its fault deserves.

Several bundles are asked in turn. `--max-loaded N` lets the server have at most N of them open at a
time, so that it opens and closes them under the load.

Prints the requests by kind and outcome; the time to the first token and the tokens per second of
streams (median and 99th percentile); how often a request was overtaken by one that was sent at
least 50 ms after it; and the server's memory, threads and open files before and after. Exit code 1
if a request ended as it should not, or the server keeps threads or files.

`--hostile KIND,KIND` (or `all`) does something else: for each kind of hostile client it starts a
server, lets that client send its requests for some seconds beside eight ordinary ones, and ends the
server by SIGTERM. With `--cold` each of these servers begins with an empty cache folder and meets
the clients at once; otherwise all share one that is full. Prints, for each kind, the longest answer
of /health, the ordinary clients' waits for a first token, how many of their requests were lost, how
the hostile ones ended, the most memory of the server's processes, and its exit code. The tool's
exit code is 1 if one of these is beyond its bound, see `--help`; a busy machine needs wider ones.

`--compare` measures, in turn for this many rounds, the same streams by one client of the server and
by the engine itself in this process, both with the first bundle, and prints the ratio of their
tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

import spec_runtime
from spec_runtime.errors import UserError
from tools.figures import command_line, manifest_of, markdown, parse, run, write
from tools.measure import hostile_clients
from tools.measure.hostile_clients import CHAT, QUESTIONS
from tools.measure.hostile_load import HEAD, OWN, Bounds, besiege, row, served

NOTE = "requests of its own; not recorded: prompts"
HEADERS = {"Content-Type": "application/json"}
PATIENCE = 300.0  # seconds that a request may take
SLOW_SECONDS = 0.02  # that a slow reader waits before each part
OVERTAKEN_SECONDS = 0.05
TOO_LARGE = 2 << 20  # bytes
# How many more there may be after the load: the two threads of the queue begin with the first
# request, and stay.
MORE = {"threads": 2, "files": 0}
# Of each kind: how many of a hundred requests it makes, and how such a request has to end.
KINDS = {
    "stream": (50, "answered"),
    "whole": (15, "answered"),
    "slow reader": (10, "answered"),
    "disconnect": (10, "left"),
    "malformed JSON": (5, "400"),
    "bad UTF-8": (5, "400"),
    "oversized body": (5, "413"),
}


@dataclass
class Outcome:
    """What became of one request; times are seconds of one clock."""

    kind: str
    sent: float
    ended_as: str = "nothing"
    first: float | None = None
    last: float | None = None
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the speed after the first part; None for answers of one part."""
        if self.first is None or self.last is None or self.last == self.first or self.tokens < 2:
            return None
        return (self.tokens - 1) / (self.last - self.first)


@dataclass
class Load:
    """Holds the requests to send, and what became of those that were sent."""

    url: str
    max_new_tokens: int
    kinds: list[str]
    models: Sequence[str | None] = (None,)  # that are asked in turn; None is the server's first
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self, num_clients: int) -> None:
        """Sends all requests; each client sends its next one when the last has ended."""
        waiting = list(enumerate(self.kinds))[::-1]

        async def client(http: httpx.AsyncClient) -> None:
            while waiting:
                number, kind = waiting.pop()
                outcome = Outcome(kind, time.perf_counter())
                self.outcomes.append(outcome)
                try:
                    async with asyncio.timeout(PATIENCE):
                        model = self.models[number % len(self.models)]
                        body = body_of(kind, number, self.max_new_tokens, model)
                        await ask(http, body, outcome)
                except TimeoutError:
                    outcome.ended_as = "hung"
                except httpx.HTTPError as error:
                    outcome.ended_as = type(error).__name__

        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=OWN) as http:
            await asyncio.gather(*(client(http) for _ in range(num_clients)))


def kinds(num_requests: int, seed: int) -> list[str]:
    """Returns the kinds of some requests, in a random order."""
    names, shares = list(KINDS), [share for share, _ in KINDS.values()]
    drawn = random.Random(seed).choices(names, shares, k=num_requests)
    return names[:num_requests] + drawn[len(names) :]  # each kind at least once


def body_of(kind: str, number: int, max_new_tokens: int, model: str | None = None) -> bytes:
    """Returns the body of a request; without a model the server's first one answers."""
    question = f"{QUESTIONS[number % len(QUESTIONS)]} (Request {number})"
    if kind == "oversized body":
        question = "x" * TOO_LARGE
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "model": model,
    }
    if kind != "whole":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    if kind == "malformed JSON":
        return data[:-2]
    if kind == "bad UTF-8":
        return data.replace(b"Request", b"\xff\xfe\xc3")
    return data


async def ask(client: httpx.AsyncClient, body: bytes, outcome: Outcome) -> None:
    """Sends one request and notes how it ends."""
    async with client.stream("POST", CHAT, content=body, headers=HEADERS) as reply:
        if reply.status_code != 200:
            outcome.ended_as = str(reply.status_code)
        elif outcome.kind == "whole":
            outcome.tokens = json.loads(await reply.aread())["usage"]["completion_tokens"]
            outcome.ended_as = "answered"
        else:
            await read_stream(reply, outcome)


async def read_stream(reply: httpx.Response, outcome: Outcome) -> None:
    """Reads events to the end, or leaves after a few, as the outcome's kind wants."""
    num_parts = 0
    outcome.ended_as = "cut off"
    async for line in reply.aiter_lines():
        if line == "data: [DONE]":
            outcome.ended_as = "answered"
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            outcome.ended_as = str(event["error"]["code"])
        elif event.get("usage"):
            outcome.tokens = event["usage"]["completion_tokens"]
        elif event["choices"] and event["choices"][0]["delta"].get("content"):
            outcome.last = time.perf_counter()
            outcome.first = outcome.first or outcome.last
            num_parts += 1
        if outcome.kind == "disconnect" and num_parts == 3:
            outcome.ended_as = "left"
            return
        if outcome.kind == "slow reader":
            await asyncio.sleep(SLOW_SECONDS)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the figures of a load."""
    by_kind = {
        kind: dict(Counter(each.ended_as for each in outcomes if each.kind == kind))
        for kind in KINDS
    }
    # A slow reader sees its parts later than they came.
    timed = [each for each in outcomes if each.kind in ("stream", "disconnect")]
    firsts = [each.first - each.sent for each in timed if each.first is not None]
    rates = [rate for each in timed if (rate := each.tokens_per_second) is not None]
    return {
        "requests": len(outcomes),
        "outcomes": by_kind,
        "wrong": sum(each.ended_as != KINDS[each.kind][1] for each in outcomes),
        "tokens": sum(each.tokens for each in outcomes),
        "first_token_seconds": quantiles(firsts),
        "tokens_per_second": quantiles(rates),
        "overtaken": num_overtaken(timed),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile; of speeds, the slow end is `p1`."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p1": cuts[0], "p50": cuts[49], "p99": cuts[98]}


def num_overtaken(outcomes: Sequence[Outcome]) -> int:
    """Counts the requests whose first token came after that of one sent well after them."""
    timed = [(each.sent, each.first) for each in outcomes if each.first is not None]
    return sum(
        any(other > sent + OVERTAKEN_SECONDS and its_first < first for other, its_first in timed)
        for sent, first in timed
    )


# ---- the server's process ----


def resources(pid: int) -> dict[str, float]:
    """Returns a process's memory in MB, its threads and its open files, by Linux's /proc."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
    return {
        "resident_mb": round(int(fields["VmRSS"]) / 1024, 1),
        "peak_mb": round(int(fields["VmHWM"]) / 1024, 1),
        "threads": int(fields["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the words after `spec-runtime serve`."""
    words = []
    for name, folder in zip(names_of(arguments.bundle), arguments.bundle, strict=True):
        words += ["--bundle", f"{name}={folder}"]
    for name in ("drafter", "threads", "max_loaded"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def names_of(bundles: Sequence[Path]) -> list[str]:
    """Returns names that tell bundles apart, also those of one checkpoint."""
    return [f"bundle-{number}" for number in range(1, len(bundles) + 1)]


def openings(url: str) -> dict[str, int]:
    """Returns how often the server has opened each of several bundles."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    found = re.findall(r'^specsplit_openings_total\{model="(.+)"\} (\S+)$', text, re.MULTILINE)
    return {name: int(float(count)) for name, count in found}


def kept(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Names what the server has not given back."""
    return [name for name, more in MORE.items() if after[name] > before[name] + more]


def settle(pid: int, before: dict[str, float]) -> dict[str, float]:
    """Returns the resources once threads and files are as few as before, at most 10 s later."""
    until = time.monotonic() + 10
    while True:
        after = resources(pid)
        if not kept(before, after) or time.monotonic() > until:
            return after
        time.sleep(0.1)


# ---- against the bare engine ----


def compare(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the tokens per second of one client and of the engine in this process, in turn."""
    engine = spec_runtime.load(
        arguments.bundle[0], drafter=arguments.drafter, threads=arguments.threads
    )
    rates: list[tuple[float, float]] = []
    with httpx.Client(base_url=url, timeout=PATIENCE, limits=OWN) as client:
        for number in range(arguments.compare + 1):
            bodies = [
                body_of("stream", 1000 * number + i, arguments.max_new_tokens)
                for i in range(len(QUESTIONS))
            ]
            begun = time.perf_counter()
            served = sum(num_streamed(client, body) for body in bodies)
            middle = time.perf_counter()
            bare = sum(
                len(chunk.token_ids)
                for body in bodies
                for chunk in engine.chunks(
                    json.loads(body)["messages"], max_new_tokens=arguments.max_new_tokens
                )
            )
            rates.append((served / (middle - begun), bare / (time.perf_counter() - middle)))
    served_rates, bare_rates = zip(*rates[1:], strict=True)  # the first round warms both up
    ratios = [mine / other for mine, other in rates[1:]]
    return {
        "rounds": arguments.compare,
        "served_tokens_per_second": statistics.median(served_rates),
        "engine_tokens_per_second": statistics.median(bare_rates),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def num_streamed(client: httpx.Client, body: bytes) -> int:
    """Returns the number of tokens in a stream.

    The client's own work takes no time from the engine: events are looked at when all are there.
    """
    reply = client.post(CHAT, content=body, headers=HEADERS)
    *_, last, done, _ = reply.content.split(b"\n\n")
    assert done == b"data: [DONE]", done
    return int(json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"])


# ---- hostile clients ----


def kinds_of(text: str) -> list[str]:
    """Returns the kinds of hostile clients that a list names, `all` for all."""
    names = list(hostile_clients.KINDS) if text == "all" else text.split(",")
    if unknown := set(names) - set(hostile_clients.KINDS):
        known = ", ".join(hostile_clients.KINDS)
        raise UserError(f"got --hostile {sorted(unknown)[0]!r}, expected some of {known}, or all")
    return names


def measure_hostile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures each kind of hostile client, and prints a table of them."""
    kinds = kinds_of(arguments.hostile)
    bounds = Bounds(
        arguments.max_health, arguments.max_first, arguments.max_growth, arguments.patience
    )
    cache = "empty" if arguments.cold else "full"
    measured = []
    words, seconds = words_of(arguments), arguments.hostile_seconds
    for found in besiege(words, kinds, bounds, seconds, arguments.cold):
        measured.append(found)
        print(f"{len(measured)} of {len(kinds)}: {' | '.join(row(found))}", file=sys.stderr)
    print(f"Cache folder: {cache}\n")
    print(markdown(HEAD, map(row, measured)))
    broken = sum(bool(each["broken"]) for each in measured)
    return {"cache": cache, "bounds": asdict(bounds), "kinds": measured, "broken": broken}


# ---- the run ----


def measure_load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends the load; "broken" says whether anything ended as it should not."""
    models = names_of(arguments.bundle)
    with served(words_of(arguments)) as server:

        def warm_up() -> None:
            """Asks each bundle, the first one last, so that the same ones are open after it."""
            for model in reversed(models):
                load = Load(server.url, arguments.max_new_tokens, 3 * list(KINDS), [model])
                asyncio.run(load.run(arguments.clients))

        warm_up()
        before = resources(server.pid)
        drawn = kinds(arguments.requests, arguments.seed)
        load = Load(server.url, arguments.max_new_tokens, drawn, models)
        begun = time.perf_counter()
        asyncio.run(load.run(arguments.clients))
        figures = summary(load.outcomes)
        figures["seconds"] = time.perf_counter() - begun
        figures["clients"] = arguments.clients
        if len(models) > 1:
            figures["bundles"], figures["max_loaded"] = len(models), arguments.max_loaded
            figures["openings"] = openings(server.url)
            warm_up()
        figures["before"], figures["after"] = before, settle(server.pid, before)
        if arguments.compare:
            figures["one_client"] = compare(server.url, arguments)
        figures["exit_code"] = server.stop()
    is_bad = figures["wrong"] or kept(before, figures["after"]) or figures["exit_code"] != "0"
    print(json.dumps(figures, indent=2))
    return figures | {"broken": bool(is_bad)}


def main(words: Sequence[str] | None = None) -> int:
    flags = ("--drafter", "--max-new-tokens", "--threads", "--json")
    parser = command_line(__doc__, *flags, max_new_tokens=48)
    parser.add_argument("--bundle", type=Path, action="append", required=True, help="repeatable")
    parser.add_argument("--max-loaded", type=int, metavar="BUNDLES", help="default: all of them")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--hostile", metavar="KIND[,KIND]", help="or all")
    parser.add_argument("--cold", action="store_true", help="an empty cache folder for each kind")
    for name, value, text in (
        ("hostile-seconds", 10.0, "seconds of each kind"),
        ("max-health", Bounds.health, "seconds of an answer of /health"),
        ("max-first", Bounds.first, "seconds until a first token"),
        ("max-growth", Bounds.growth, "MB by which the server grows, which is then ended"),
        ("patience", Bounds.patience, "seconds after which a request counts as lost"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{text}; {value:g}")
    arguments = parse(parser, words)
    figures = (measure_hostile if arguments.hostile else measure_load)(arguments)
    manifest = manifest_of(arguments.bundle[0])
    write(arguments.json, figures, threads=arguments.threads, manifest=manifest, note=NOTE)
    return 1 if figures["broken"] else 0


if __name__ == "__main__":
    run(main)
