"""Lets hostile clients at a server beside eight ordinary ones, and says how these bore it.

    python -m tools.measure.load_server --bundle DIR [--kinds KIND,KIND] [--cold]
    python -m tools.measure.load_server --bundle DIR --bundle OTHER --max-loaded 1 --kinds nobody

For each kind of client in hostile_clients.py it starts `spec-runtime serve` in a process of its
own, lets that client send its requests for some seconds, and ends the server by SIGTERM. Besides,
a thread asks for /health and /ready and looks at the memory of the server's processes every 50 ms.
With --cold each server begins with an empty cache folder and meets the clients at once; otherwise
all share one that is full. Several bundles are asked in turn; with --max-loaded 1 the load opens
and closes them.

Prints, for each kind, the longest answer of /health, the ordinary clients' waits for a first token,
how many of their requests were lost, how the hostile ones ended, the most memory of the server's
processes, how many threads and files it has more than before, and its exit code. The tool's exit
code is 1 if one of these is beyond its bound, see `--help`; a busy machine needs wider ones.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from spec_runtime.errors import UserError
from tools.figures import command_line, manifest_of, markdown, parse, run, write
from tools.measure import hostile_clients
from tools.measure.hostile_clients import CHAT, QUESTIONS, Site, chat

NOTE = "requests of its own; not recorded: prompts"

NUM_CLIENTS = 8
POLL_SECONDS = 0.05
START_SECONDS = 120.0  # until a server has to listen
GRACE_SECONDS = 10  # that it gives its answers after SIGTERM
STOP_SECONDS = 40.0  # until it has to have ended then
SILENT_SECONDS = 12.0  # for which /ready may say 200 while nobody gets a token
SETTLE_SECONDS = 10.0  # until what a client held is given back
# How many more threads and files there may be then: lanes, and processes that compile grammars.
MORE = 16
MAIN = "from spec_runtime.cli import main; main()"
OWN = httpx.Limits(max_keepalive_connections=0)  # each request has a connection of its own


@dataclass(frozen=True)
class Bounds:
    """Holds what the server has to keep to: seconds of the longest answer of /health and of the
    longest wait for a first token, and megabytes by which its processes may grow; and the seconds
    after which an ordinary request counts as lost."""

    health: float = 0.2
    first: float = 2.0
    growth: float = 1024.0
    patience: float = 60.0


# ---- the server's processes ----


class Server:
    """A server that runs in processes of its own; what it says is in the file `log`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def num_tracebacks(self) -> int:
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def stop(self) -> str:
        """Sends SIGTERM; returns the exit code, "killed" where the process had to be."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return str(self.process.wait(STOP_SECONDS))
        except subprocess.TimeoutExpired:
            return "killed"


@contextmanager
def served(words: Sequence[str], cache: Path | None = None) -> Iterator[Server]:
    """Runs `spec-runtime serve` with these words until the block ends; gives it once it listens.

    Its caches are in the folder `cache`, or where the user's are. Raises UserError if it does not
    start.
    """
    command = [sys.executable, "-c", MAIN, "serve", "--port", "0", *words]
    environment = os.environ | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        log = Path(folder) / "log"
        with open(log, "wb") as said:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=said, env=environment
            )
        try:
            yield Server(process, _url_of(process, log), log)
        finally:
            for pid in [*_children(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def _url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"http://[^\s,]+", log.read_text(errors="replace")):
            return found[0]
        time.sleep(0.02)
    raise UserError(f"the server did not start: {log.read_text(errors='replace')}")


def _children(pid: int) -> list[int]:
    """Returns the processes below this one, by Linux's /proc."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_children(int(child))]
    return found


def memory_of(pid: int) -> float:
    """Returns the megabytes of a process and those below it, without the files that they map, which
    the system may take back."""
    total = 0
    for each in [pid, *_children(pid)]:
        with suppress(OSError):
            found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{each}/status").read_text())
            total += 0 if found is None else int(found[1])
    return total * 1024 / 1e6


def held(pid: int) -> dict[str, int]:
    """Returns how many threads and open files a process has, by Linux's /proc."""
    folders = {"threads": "task", "files": "fd"}
    return {name: len(os.listdir(f"/proc/{pid}/{each}")) for name, each in folders.items()}


def kept(pid: int, before: dict[str, int]) -> dict[str, int]:
    """Returns how many more it has than before, once they are few or the time is over."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        more = {name: count - before[name] for name, count in held(pid).items()}
        if max(more.values()) <= MORE or time.monotonic() > until:
            return more
        time.sleep(0.1)


# ---- ordinary clients ----


@dataclass
class Answer:
    """What became of one ordinary request; times are seconds of one clock."""

    sent: float
    first: float | None = None  # the end, where no token came
    ended_as: str = "nothing"


@dataclass
class Ordinary:
    """Eight clients that ask for short streamed answers, again and again until `is_over`."""

    url: str
    patience: float
    models: Sequence[str | None] = (None,)  # that are asked in turn; None is the server's first
    answers: list[Answer] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)  # when a part came to anyone
    is_over: bool = False

    async def run(self, most: int | None = None) -> None:
        """Lets all ask, each at most so many times."""
        async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=OWN) as client:
            await asyncio.gather(*(self._client(client, k, most) for k in range(NUM_CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, number: int, most: int | None) -> None:
        count = 0
        while not count or not (self.is_over or count == most):
            answer = Answer(time.monotonic())
            self.answers.append(answer)
            question = QUESTIONS[number % len(QUESTIONS)]
            asked = f"{question} (Request {number} {count})"
            model = self.models[(number + count) % len(self.models)]
            body = chat(asked, stream=True, max_tokens=8, model=model)
            try:
                async with asyncio.timeout(self.patience):
                    await self._ask(client, body, answer)
            except TimeoutError:
                answer.ended_as = "hung"
            except httpx.HTTPError as error:
                answer.ended_as = type(error).__name__
                await asyncio.sleep(POLL_SECONDS)  # else a dead server is asked without an end
            answer.first = answer.first or time.monotonic()
            count += 1

    async def _ask(self, client: httpx.AsyncClient, body: Any, answer: Answer) -> None:
        async with client.stream("POST", CHAT, json=body) as reply:
            answer.ended_as = str(reply.status_code) if reply.status_code != 200 else "cut off"
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    answer.ended_as = "answered"
                elif line.startswith("data: {") and reply.status_code == 200:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        answer.ended_as = str(event["error"]["code"])
                        return
                    if event["choices"] and event["choices"][0]["delta"].get("content"):
                        self.heard.append(time.monotonic())
                        answer.first = answer.first or self.heard[-1]


# ---- probes ----


class Watch:
    """Asks for /health and /ready and weighs the server every 50 ms, in a thread, while the block
    runs. Ends a server that grows by more than it may, because others use the machine too."""

    def __init__(self, server: Server, bounds: Bounds) -> None:
        self._server, self._bounds = server, bounds
        self._port = hostile_clients.port_of(server.url)
        self._threads = [threading.Thread(target=each) for each in (self._run, self._weigh)]
        self._is_over = threading.Event()
        self.health: list[float] = []  # seconds of each answer
        self.unhealthy = 0  # answers other than 200
        self.ready: list[tuple[float, int]] = []  # when, and the status
        self.before_mb = self.peak_mb = memory_of(server.pid)
        self.is_too_large = False

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _get(self, path: str) -> int:
        """Returns the status of an answer, 0 if none came."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, self._bounds.patience)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def _run(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            begun = time.monotonic()
            is_well = self._get("/health") == 200
            self.health.append(time.monotonic() - begun)
            self.unhealthy += not is_well
            self.ready.append((time.monotonic(), self._get("/ready")))

    def _weigh(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            self.peak_mb = max(self.peak_mb, memory_of(self._server.pid))
            if self.peak_mb > self.before_mb + self._bounds.growth and not self.is_too_large:
                self.is_too_large = True
                self._server.process.kill()


def longest_lie(times: Sequence[float], ready: Sequence[tuple[float, int]]) -> float:
    """Returns for how many seconds at most nobody heard anything while /ready had said 200. `times`
    are the beginning, those at which anyone heard a part, and the end.

    Example: from a part at 0 s to one at 9 s, 200 at 1 s and 503 at 4 s: it lied for 4 s.
    """
    longest = 0.0
    for begin, until in pairwise(times):
        between = [(at, status) for at, status in ready if begin < at <= until]
        if any(status == 200 for _, status in between):
            told = [at for at, status in between if status == 503]
            longest = max(longest, min([*told, until]) - begin)
    return longest


# ---- a kind ----


def measure(
    server: Server,
    kind: str,
    bounds: Bounds,
    rounds: int = 1000,
    seconds: float = 10.0,
    models: Sequence[str | None] = (None,),
) -> dict[str, Any]:
    """Lets a hostile client of a kind send its rounds beside eight ordinary ones; returns what that
    did to them, and in "broken" the bounds that did not hold."""
    with httpx.Client(base_url=server.url, timeout=bounds.patience) as client:
        room = int(client.get("/tokenizer_info").json()["model_max_length"])
    site = Site(hostile_clients.port_of(server.url), room)
    ordinary, ends = Ordinary(server.url, bounds.patience, models), Counter[str]()
    begun, before = time.monotonic(), held(server.pid)

    def attack() -> None:
        try:
            ends.update(asyncio.run(hostile_clients.attack(kind, site, rounds, seconds)))
        finally:
            ordinary.is_over = True

    with Watch(server, bounds) as watch:
        attacker = threading.Thread(target=attack)  # its bodies cost the others no time
        attacker.start()
        asyncio.run(ordinary.run())
        attacker.join()
    end = time.monotonic()
    waits = [each.first - each.sent for each in ordinary.answers if each.first is not None]
    lost = Counter(a.ended_as for a in ordinary.answers if a.ended_as != "answered")
    figures = {
        "kind": kind,
        "seconds": round(end - begun, 1),
        "unhealthy": watch.unhealthy,
        "health": round(max(watch.health, default=0.0), 3),
        "first": first_tokens(waits),
        "asked": len(ordinary.answers),
        "lost": dict(lost),
        "hostile": dict(ends),
        "before_mb": round(watch.before_mb),
        "peak_mb": round(watch.peak_mb),
        "too_large": watch.is_too_large,
        "ready_in_vain": round(longest_lie([begun, *ordinary.heard, end], watch.ready), 1),
        "tracebacks": server.num_tracebacks,
        "kept": {} if watch.is_too_large else kept(server.pid, before),
    }
    return figures | {"broken": broken(figures, bounds)}


def first_tokens(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median of the waits for the first token, the 99th percentile and the longest."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    found = {"p50": cuts[49], "p99": cuts[98], "longest": max(seconds)}
    return {name: round(value, 3) for name, value in found.items()}


def broken(figures: dict[str, Any], bounds: Bounds) -> list[str]:
    """Names the bounds that did not hold."""
    wrong = hostile_clients.faults(figures["kind"], figures["hostile"])
    checks = {
        "health": figures["health"] > bounds.health or figures["unhealthy"],
        "first token": figures["first"]["longest"] > bounds.first,
        "lost requests": figures["lost"],
        "memory": figures["too_large"],
        "threads or files": max(figures["kept"].values(), default=0) > MORE,
        "ready": figures["ready_in_vain"] > SILENT_SECONDS,
        "tracebacks": figures["tracebacks"],
        f"hostile requests end as {', '.join(wrong)}": wrong,
    }
    return [name for name, is_broken in checks.items() if is_broken]


def besiege(
    args: argparse.Namespace, kinds: Sequence[str], bounds: Bounds
) -> Iterator[dict[str, Any]]:
    """Yields the figures of each kind, of a server of its own.

    Where it is cold, its cache folder is empty and its first requests are these; otherwise a server
    before them has filled the folder, and each has answered some requests before.
    """
    models = [f"bundle-{number}" for number, _ in enumerate(args.bundle, 1)]
    words = ["--grace", str(GRACE_SECONDS)]
    for name, folder in zip(models, args.bundle, strict=True):
        words += ["--bundle", f"{name}={folder}"]
    for name in ("drafter", "threads", "max_loaded"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    with tempfile.TemporaryDirectory(prefix="load-cache-") as root:
        cache = Path(root) / "cache"
        if not args.cold:
            with served(words, cache) as server:
                _warm_up(server, cache, models)
        for kind in kinds:
            with served(words, cache) as server:
                if not args.cold:
                    asyncio.run(Ordinary(server.url, bounds.patience, models).run(most=2))
                figures = measure(server, kind, bounds, seconds=args.seconds, models=models)
                figures["exit"] = server.stop()
                if figures["exit"] != "0":
                    figures["broken"].append("exit code")
            yield figures
            if args.cold:
                shutil.rmtree(cache, ignore_errors=True)


def _warm_up(server: Server, cache: Path, models: Sequence[str]) -> None:
    """Asks until nothing more is written to the cache folder; at most five minutes."""
    before, until = -1, time.monotonic() + 300
    while time.monotonic() < until:
        asyncio.run(Ordinary(server.url, 300, models).run(most=2))
        size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        if size == before:
            return
        before = size
        time.sleep(3)


HEAD = (
    *("kind", "/health s", "first token p50", "p99", "longest", "asked", "lost", "hostile ends"),
    *("MB before", "at most", "more held", "exit", "broken"),
)


def row(figures: dict[str, Any]) -> list[str]:
    """Returns a row of the table that has the columns HEAD."""
    first = figures["first"]
    counts = [
        ", ".join(f"{end}: {count}" for end, count in sorted(figures[name].items())) or "none"
        for name in ("lost", "hostile", "kept")
    ]
    return [
        figures["kind"],
        f"{figures['health']:.2f}",
        *(f"{first[name]:.2f}" for name in ("p50", "p99", "longest")),
        str(figures["asked"]),
        *counts[:2],
        *(str(figures[name]) for name in ("before_mb", "peak_mb")),
        counts[2],
        figures["exit"],
        ", ".join(figures["broken"]) or "nothing",
    ]


# ---- the run ----


def kinds_of(text: str) -> list[str]:
    """Returns the kinds of hostile clients that a list names, `all` for all."""
    names = list(hostile_clients.KINDS) if text == "all" else text.split(",")
    if unknown := set(names) - set(hostile_clients.KINDS):
        known = ", ".join(hostile_clients.KINDS)
        raise UserError(f"got --kinds {sorted(unknown)[0]!r}, expected some of {known}, or all")
    return names


def main(words: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "--drafter", "--threads", "--json")
    parser.add_argument("--bundle", type=Path, action="append", required=True, help="repeatable")
    parser.add_argument("--max-loaded", type=int, metavar="BUNDLES", help="default: all of them")
    parser.add_argument("--kinds", type=kinds_of, default="all", metavar="KIND[,KIND]")
    parser.add_argument("--cold", action="store_true", help="an empty cache folder for each kind")
    for name, value, text in (
        ("seconds", 10.0, "seconds of each kind"),
        ("max-health", Bounds.health, "seconds of an answer of /health"),
        ("max-first", Bounds.first, "seconds until a first token"),
        ("max-growth", Bounds.growth, "MB by which the server grows, which is then ended"),
        ("patience", Bounds.patience, "seconds after which a request counts as lost"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{text}; {value:g}")
    args = parse(parser, words)
    bounds = Bounds(args.max_health, args.max_first, args.max_growth, args.patience)
    measured = []
    for found in besiege(args, args.kinds, bounds):
        measured.append(found)
        print(f"{len(measured)} of {len(args.kinds)}: {' | '.join(row(found))}", file=sys.stderr)
    cache, broken = "empty" if args.cold else "full", sum(bool(each["broken"]) for each in measured)
    print(f"Cache folder: {cache}\n\n{markdown(HEAD, map(row, measured))}")
    figures = {"cache": cache, "bounds": asdict(bounds), "kinds": measured, "broken": broken}
    manifest = manifest_of(args.bundle[0])
    write(args.json, figures, threads=args.threads, manifest=manifest, note=NOTE)
    return int(bool(broken))


if __name__ == "__main__":
    run(main)
