"""Measures what a hostile client does to eight ordinary ones of the same server.

Besides them, a thread asks for /health and /ready and looks at the memory of the server's processes
every 50 ms. load_server.py starts the servers and prints the figures.
"""

from __future__ import annotations

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
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from spec_runtime.errors import UserError
from tools.measure import hostile_clients
from tools.measure.hostile_clients import CHAT, QUESTIONS, Site, chat

NUM_CLIENTS = 8
POLL_SECONDS = 0.05
START_SECONDS = 120.0  # until a server has to listen
GRACE_SECONDS = 10  # that it gives its answers after SIGTERM
STOP_SECONDS = 40.0  # until it has to have ended then
SILENT_SECONDS = 12.0  # for which /ready may say 200 while nobody gets a token
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
            body = chat(f"{question} (Request {number} {count})", stream=True, max_tokens=8)
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
) -> dict[str, Any]:
    """Lets a hostile client of a kind send its rounds beside eight ordinary ones; returns what that
    did to them, and in "broken" the bounds that did not hold."""
    with httpx.Client(base_url=server.url, timeout=bounds.patience) as client:
        room = int(client.get("/tokenizer_info").json()["model_max_length"])
    site = Site(hostile_clients.port_of(server.url), room)
    ordinary, ends = Ordinary(server.url, bounds.patience), Counter[str]()
    begun = time.monotonic()

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
        "ready": figures["ready_in_vain"] > SILENT_SECONDS,
        "tracebacks": figures["tracebacks"],
        f"hostile requests end as {', '.join(wrong)}": wrong,
    }
    return [name for name, is_broken in checks.items() if is_broken]


def besiege(
    words: Sequence[str], kinds: Sequence[str], bounds: Bounds, seconds: float, is_cold: bool
) -> Iterator[dict[str, Any]]:
    """Yields the figures of each kind, of a server of its own.

    Where `is_cold`, its cache folder is empty and its first requests are these; otherwise a server
    before them has filled the folder, and each has answered some requests before.
    """
    words = [*words, "--grace", str(GRACE_SECONDS)]
    with tempfile.TemporaryDirectory(prefix="load-cache-") as root:
        cache = Path(root) / "cache"
        if not is_cold:
            with served(words, cache) as server:
                _warm_up(server, cache)
        for kind in kinds:
            with served(words, cache) as server:
                if not is_cold:
                    asyncio.run(Ordinary(server.url, bounds.patience).run(most=2))
                figures = measure(server, kind, bounds, seconds=seconds)
                figures["exit"] = server.stop()
                if figures["exit"] != "0":
                    figures["broken"].append("exit code")
            yield figures
            if is_cold:
                shutil.rmtree(cache, ignore_errors=True)


def _warm_up(server: Server, cache: Path) -> None:
    """Asks until nothing more is written to the cache folder; at most five minutes."""
    before, until = -1, time.monotonic() + 300
    while time.monotonic() < until:
        asyncio.run(Ordinary(server.url, 300).run(most=2))
        size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        if size == before:
            return
        before = size
        time.sleep(3)


HEAD = (
    *("kind", "/health s", "first token p50", "p99", "longest", "asked", "lost", "hostile ends"),
    *("MB before", "at most", "exit", "broken"),
)


def row(figures: dict[str, Any]) -> list[str]:
    """Returns a row of the table that has the columns HEAD."""
    first = figures["first"]
    counts = [
        ", ".join(f"{end}: {count}" for end, count in sorted(figures[name].items())) or "none"
        for name in ("lost", "hostile")
    ]
    return [
        figures["kind"],
        f"{figures['health']:.2f}",
        *(f"{first[name]:.2f}" for name in ("p50", "p99", "longest")),
        str(figures["asked"]),
        *counts,
        str(figures["before_mb"]),
        str(figures["peak_mb"]),
        figures["exit"],
        ", ".join(figures["broken"]) or "nothing",
    ]
