"""Sends mixed requests to one bundle from several threads for a while and compares every answer.

    python -m tools.ci.soak --minutes 10 --seed 0 [--bundle DIR | --toy] --json OUT

The requests are drawn from a pool made of the seed: texts, raw texts, token ids, prompts of several
hundred tokens, answers within grammars, and chats that grow turn by turn; greedy and sampled, with
penalties, biases, stop strings and log-probabilities. Some threads share engines: one for every
drafter of the bundle, those built in and plain decoding, all on one target, so that most requests
find the key/value rows of a quite different one. The other threads are more clients than an
AsyncEngine answers at a time, so that calls join and leave the passes of others all the time.
Answers are generated whole or streamed; streams are closed early, dropped and interrupted, calls
cancelled or given too little time; some requests have arguments that must be refused.

Each answer is compared with that of plain decoding without reuse, by a bundle of its own, for the
same arguments: at fp32 it must be the same token for token, or a near tie must lie where they part.
What streams give before they are closed must begin that answer. Acceptance by rejection and typical
acceptance, whose answers need not be those of plain decoding, are run and not compared; so are
hostile requests, for answers in formats that are slow to read, compile or follow: these must end by
their timeout, or be refused.

Memory, threads and open files are sampled throughout. Exit code 1 if an answer differs, bad
arguments raise anything but UserError, a request hangs, threads or open files are never again as
few in the last quarter as they were at most in the quarter before, or the memory in use grows by
more than 1 MB a minute over the last half (16 MB in all in a run of under two minutes). In use is
what glibc (2.33 or later) has handed out and Python's own blocks: resident memory, which stands
beside it, also holds what was freed between blocks in use, and so grows without a leak.
"""

import asyncio
import ctypes
import faulthandler
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime import Engine, GenerationResult, load
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.loop.target import NEAR_TIE
from spec_runtime.measure.audit import first_difference, replay
from spec_runtime.proposers import BUILT_IN
from spec_runtime.queue.async_engine import AsyncEngine
from spec_runtime.sampling import Sampler, SamplingParams
from tools.figures import command_line, manifest_of, run, write
from tools.measure import hostile_clients

ROOT = Path(__file__).parents[2]
NOTE = "a pool of requests of its own; not recorded: prompts"
POOL = 72  # different requests, chats not counted
CHATS, TURNS = 6, 3
LONG_TOKENS = 600  # of a long prompt at most, and half of the context
MAX_GROWTH = 1.0  # MB a minute
BLOCK_BYTES = 93  # of Python's blocks, which it takes from the system itself: their mean size
MAX_SHORT_GROWTH = 16.0  # MB, in a run too short for a slope
# Pipes of the two processes that try grammars, which in a short run may come late, and stay.
TRIAL_FILES = 4
PATIENCE = 120.0  # seconds that a request may take at the end
HOSTILE_SECONDS = 0.5  # that a hostile request is given
HOSTILE_PATIENCE = 20.0  # after which it has not kept to them
MOST_PAUSE = 0.2  # seconds between two requests of a client of the AsyncEngine
WARM_UP = 0.2  # of the time
LEAST_EQUAL = 10  # answers; a run of fewer shows nothing
TEXTS = (
    "say abc, 1",
    "say one two. 2",
    "say xyz3",
    "say 0123 0",
    "Why does the sea have tides?",
    "Write three short sentences about a lighthouse, then repeat them.",
    "def area(width, height):",
    "one two. one two. one two.",
    "",
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"type": "regex", "regex": "[a-z]{1,8}( [a-z]{1,8}){0,5}"},
    {"type": "regex", "regex": "(yes|no), [0-9]{1,4}"},
    {"type": "json_object"},
)
LOGPROB_TOLERANCE = 1e-3  # two passes of fp32 differ by far less


@dataclass(frozen=True)
class Request:
    """What to ask for: a text, chat messages or token ids, and the options of `generate`."""

    prompt: Any
    options: dict[str, Any]

    @property
    def key(self) -> str:
        return json.dumps([self.prompt, self.options])


@dataclass
class Findings:
    """Counts what the workers did; `failures` says what went wrong."""

    requests: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, outcome: str, tokens: int = 0) -> None:
        with self.lock:
            self.requests[kind] += 1
            self.outcomes[outcome] += 1
            self.tokens += tokens

    def fail(self, what: str) -> None:
        with self.lock:
            self.outcomes["failed"] += 1
            if len(self.failures) < 50:
                self.failures.append(what)


# ---- what is asked ----


def options(rng: random.Random) -> dict[str, Any]:
    """Returns random options whose answer is that of plain decoding."""
    found: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40)}
    if rng.random() < 0.5:
        found |= {"temperature": rng.choice((0.2, 0.7, 1.0, 1.5)), "seed": rng.randrange(1000)}
        found |= rng.choice(({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}))
    if rng.random() < 0.3:
        found |= rng.choice(
            (
                {"repetition_penalty": 1.2},
                {"presence_penalty": 0.5, "frequency_penalty": 0.2},
                {"logit_bias": {5: 2.0, 40: -3.0}},
            )
        )
    if rng.random() < 0.2:
        found["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        found["stop"] = rng.choice((["a"], ["the", "two."], ["\n"]))
    if rng.random() < 0.3:
        found["ignore_eos"] = True
    return found


def pool(rng: random.Random, engine: Engine) -> Iterator[Request]:
    """Yields the requests of a run."""
    longest = min(LONG_TOKENS, engine.target.max_length // 2)
    shapes = (*("text", "raw", "ids", "system") * 2, "long", "grammar")
    for _ in range(POOL):
        text, asked, shape = rng.choice(TEXTS), options(rng), rng.choice(shapes)
        prompt: Any = text
        if shape == "ids":
            prompt = engine.encode(text)
        elif shape == "raw":
            asked |= {"raw": True}
        elif shape == "system":
            asked |= {"system": "Be brief."}
        elif shape == "long":
            words = (engine.encode(each) for each in rng.choices(TEXTS, k=longest))
            prompt = [token for ids in words for token in ids]
            prompt = prompt[: rng.randint(longest // 4, longest)]
        elif shape == "grammar":
            asked = {key: asked[key] for key in ("temperature", "seed") if key in asked}
            asked |= {"max_new_tokens": rng.randint(4, 40), "response_format": rng.choice(GRAMMARS)}
        yield Request(prompt, asked)


REFUSED: tuple[tuple[Any, dict[str, Any]], ...] = (
    ("a b c " * 2_000, {}),
    ([10**9], {}),
    ([-1], {}),
    ([], {}),
    (b"hi", {}),
    ([{"role": "user"}], {}),
    ([{"role": "user", "content": None}], {}),
    ("hi", {"temperature": -1.0}),
    ("hi", {"temperature": float("nan")}),
    ("hi", {"temperature": None}),
    ("hi", {"top_p": 2.0}),
    ("hi", {"max_new_tokens": 0}),
    ("hi", {"max_new_tokens": "8"}),
    ("hi", {"stop": None}),
    ("hi", {"stop": [""]}),
    ("hi", {"seed": "1"}),
    ("hi", {"acceptance": "best"}),
    ("hi", {"logit_bias": {10**9: 1.0}}),
)


# ---- what must come ----


class Reference:
    """Answers by plain decoding without reuse, each request once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[str, GenerationResult] = {}
        self._lock = threading.Lock()

    def answer(self, request: Request) -> GenerationResult:
        with self._lock:
            if request.key not in self._answers:
                found = self._engine.generate(request.prompt, reuse=False, **request.options)
                self._answers[request.key] = found
            return self._answers[request.key]

    def has(self, request: Request) -> bool:
        """Answers a request; says that it cannot be where the library for grammars is not there or
        cannot read the tokenizer."""
        try:
            self.answer(request)
        except UserError:
            if "response_format" not in request.options:
                raise
            return False
        return True

    def is_near_tie(self, request: Request, position: int) -> bool:
        """Says whether the answer's token at `position` would be another one if its logit were
        lower by what rounding may do at fp32; what a grammar forbids is not known here."""
        token_ids = self.answer(request).token_ids
        if position >= len(token_ids) or "response_format" in request.options:
            return False
        named = {k: v for k, v in request.options.items() if k not in ("raw", "system")}
        asked = (request.options.get("raw", False), request.options.get("system"))
        with self._lock:
            prompt = self._engine.encode(request.prompt, *asked)
            target = self._engine.target
            logits_V = replay(target, [*prompt, *token_ids[:position]])
            target.forget()
        sampler = Sampler(SamplingParams(**named), target.vocab_size, prompt)
        sampler.commit(token_ids[:position])
        logits_V = logits_V.astype(np.float32)
        logits_V[token_ids[position]] -= NEAR_TIE * float(np.ptp(logits_V))
        return sampler(logits_V, len(prompt) + position) != token_ids[position]


# ---- the requests ----


@dataclass
class Worker:
    """Sends requests from a thread of its own until the time is over, and judges the answers."""

    rng: random.Random
    requests: list[Request]
    reference: Reference
    findings: Findings

    @property
    def kinds(self) -> list[tuple[int, Callable[[Request], None]]]:
        """Returns ways to ask, by how often."""
        raise NotImplementedError

    def run(self, deadline: float) -> None:
        asks, weights = [ask for _, ask in self.kinds], [weight for weight, _ in self.kinds]
        while time.monotonic() < deadline:
            (ask,), request = self.rng.choices(asks, weights), self.rng.choice(self.requests)
            try:
                ask(request)
            except Exception:
                last = traceback.format_exc().strip().splitlines()[-1]
                self.findings.fail(f"{ask}: {request.key[:200]}: {last}")

    def hostile(self, generate: Callable[..., GenerationResult]) -> None:
        """Asks for an answer in a format that is slow to read, to compile or to follow; of each
        kind there are few, so that what an engine remembers of them does not grow."""
        make = self.rng.choice(list(hostile_clients.FORMATS.values()))
        asked = {"response_format": make(self.rng.randrange(4)), "timeout": HOSTILE_SECONDS}
        begun, said = time.monotonic(), ""
        try:
            generate("say abc, 1", max_new_tokens=8, **asked)
        except UserError as error:
            said = str(error)
        if (seconds := time.monotonic() - begun) > HOSTILE_PATIENCE or "\n" in said:
            self.findings.fail(f"hostile: {asked!r:.200}: took {seconds:.0f} s, {said}")
        else:
            self.findings.add("hostile", "not compared")

    def judge(self, kind: str, request: Request, got: list[int], is_whole: bool = True) -> bool:
        """Counts an answer's tokens, or those of its beginning; says whether they are right."""
        expected = self.reference.answer(request).token_ids
        expected = expected if is_whole else expected[: len(got)]
        position = first_difference(expected, got)
        if position is None:
            self.findings.add(kind, "equal", len(got))
        elif self.reference.is_near_tie(request, position):
            self.findings.add(kind, "near tie", len(got))
        else:
            self.findings.fail(
                f"{kind}: {request.key[:200]}: parts at token {position}: got {got!r:.200}, "
                f"expected {expected!r:.200}"
            )
        return position is None

    def judge_result(self, kind: str, request: Request, got: GenerationResult) -> None:
        expected = self.reference.answer(request)
        if self.judge(kind, request, got.token_ids) and not (
            (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            and _logprobs_agree(got, expected)
        ):
            self.findings.fail(
                f"{kind}: {request.key[:200]}: same tokens, other text, reason or log-probabilities"
            )

    def judge_chunks(self, kind: str, request: Request, chunks: list[Any]) -> None:
        """Judges what a stream has given, to its end or not."""
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        result = chunks[-1].result if chunks else None
        if result is None:
            self.judge(kind, request, tokens, is_whole=False)
            return
        if (tokens, "".join(chunk.text for chunk in chunks)) != (result.token_ids, result.text):
            self.findings.fail(f"{kind}: {request.key[:200]}: its parts are not its result")
        self.judge_result(kind, request, result)


def _logprobs_agree(got: GenerationResult, expected: GenerationResult) -> bool:
    if got.logprobs is None or expected.logprobs is None:
        return got.logprobs is expected.logprobs
    pairs = zip(got.logprobs, expected.logprobs, strict=True)
    return all(abs(a.logprob - b.logprob) < LOGPROB_TOLERANCE for a, b in pairs)


@dataclass
class Caller(Worker):
    """Asks engines that several threads share, by name."""

    engines: dict[str, Engine]

    @property
    def kinds(self) -> list[tuple[int, Callable[[Request], None]]]:
        return [
            (6, self.generate),
            (4, partial(self.stream, "stream")),
            (2, self.steps),
            (2, partial(self.stream, "closed early")),
            (2, partial(self.stream, "dropped")),
            (2, partial(self.stream, "interrupted")),
            (2, self.chat),
            (1, self.open_another),
            (1, self.other_rules),
            (2, self.refuse),
            (1, lambda _: self.hostile(self.engine.generate)),
        ]

    @property
    def engine(self) -> Engine:
        """Returns another engine each time."""
        return self.rng.choice(list(self.engines.values()))

    def generate(self, request: Request) -> None:
        got = self.engine.generate(request.prompt, **request.options)
        self.judge_result("generate", request, got)

    def steps(self, request: Request) -> None:
        steps = self.engine.steps(request.prompt, **request.options)
        self.judge("steps", request, [token for step in steps for token in step.tokens])

    def stream(self, kind: str, request: Request) -> None:
        """Reads a stream whole, or some chunks of it before its end comes as `kind` says."""
        chunks = self.engine.chunks(request.prompt, **request.options)
        found = [*islice(chunks, None if kind == "stream" else self.rng.randint(0, 4))]
        if kind == "closed early":
            chunks.close()
        elif kind == "dropped":
            del chunks
        elif kind == "interrupted":
            with suppress(KeyboardInterrupt):
                chunks.throw(KeyboardInterrupt())
        self.judge_chunks(kind, request, found)

    def chat(self, request: Request) -> None:
        """Asks turn after turn; each repeats all messages before it, as clients do."""
        rng, engine = random.Random(f"chat {self.rng.randrange(CHATS)}"), self.engine
        asked = options(rng) | {"max_new_tokens": 8}
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": rng.choice(TEXTS[:4])})
            turn = Request(list(messages), asked)
            self.judge_result("chat turn", turn, engine.generate(turn.prompt, **asked))
            messages.append({"role": "assistant", "content": self.reference.answer(turn).text})

    def open_another(self, request: Request) -> None:
        """Opens a further engine on the same target, and lets it go again."""
        engine = self.engine
        name = self.rng.choice([*BUILT_IN, engine.drafter.partition("+")[0]])
        got = engine.with_drafter(name).generate(request.prompt, **request.options)
        self.judge_result("new engine", request, got)

    def other_rules(self, request: Request) -> None:
        rule = self.rng.choice(("rejection", "typical"))
        asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "seed": 1}
        got = self.engine.generate("say abc, 1", acceptance=rule, **asked)
        if not 1 <= len(got.token_ids) <= 12:
            self.findings.fail(f"{rule}: {len(got.token_ids)} tokens, expected 1 to 12")
        self.findings.add(rule, "not compared", len(got.token_ids))

    def refuse(self, request: Request) -> None:
        prompt, asked = self.rng.choice(REFUSED)
        what = f"{str(prompt)[:20]!r} {asked}"
        try:
            self.engine.generate(prompt, **asked)
        except UserError as error:
            if "\n" in str(error):
                self.findings.fail(f"refused in several lines: {error}")
            self.findings.add("bad arguments", "refused")
        except Exception as error:
            self.findings.fail(f"{what}: {type(error).__name__}: {error}")
        else:
            self.findings.fail(f"not refused: {what}")


@dataclass
class Client(Worker):
    """Asks an engine that answers several at a time, in a loop that runs in another thread."""

    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop

    @property
    def kinds(self) -> list[tuple[int, Callable[[Request], None]]]:
        return [
            (5, self.whole),
            (5, lambda request: self.stream("shared: stream", None, request)),
            (2, lambda request: self.stream("shared: left", self.rng.randint(1, 4), request)),
            (2, self.cancel),
            (1, self.hurry),
            (1, lambda _: self.hostile(self._generate)),
        ]

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Returns what a coroutine returns; then pauses, most times."""
        found = asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        if self.rng.random() < 0.7:
            time.sleep(self.rng.uniform(0, MOST_PAUSE))
        return found

    def _generate(self, prompt: Any, **asked: Any) -> GenerationResult:
        found: GenerationResult = self._wait(self.engine.generate(prompt, **asked))
        return found

    def whole(self, request: Request) -> None:
        got = self._generate(request.prompt, **request.options)
        self.judge_result("shared: whole", request, got)

    def stream(self, kind: str, count: int | None, request: Request) -> None:
        """Reads a stream whole, or closes it after some chunks."""

        async def read() -> list[Any]:
            chunks, found = self.engine.stream(request.prompt, **request.options), []
            async for chunk in chunks:
                found.append(chunk)
                if len(found) == count:
                    break
            await chunks.aclose()
            return found

        self.judge_chunks(kind, request, self._wait(read()))

    def cancel(self, request: Request) -> None:
        """Cancels a task while it waits, its prompt is read or its answer is decoded."""

        async def leave() -> GenerationResult | None:
            task = asyncio.create_task(self.engine.generate(request.prompt, **request.options))
            done, _ = await asyncio.wait({task}, timeout=self.rng.uniform(0, 1.0))
            if done:
                return task.result()
            task.cancel()
            await asyncio.wait({task})
            return None

        if (got := self._wait(leave())) is None:
            self.findings.add("shared: cancelled", "not compared")
        else:
            self.judge_result("shared: not cancelled", request, got)

    def hurry(self, request: Request) -> None:
        """Gives a call little time."""
        asked = {**request.options, "timeout": self.rng.uniform(0.01, 0.5)}
        got = self._generate(request.prompt, **asked)
        if got.finish_reason == "timeout":
            self.judge("shared: timeout", request, got.token_ids, is_whole=False)
        else:
            self.judge_result("shared: in time", request, got)


# ---- memory, threads and files ----


@dataclass(frozen=True)
class Sample:
    """The size of this process at `seconds` after the start.

    `memory_mb` is resident memory of its own, of which `in_use_mb` is in use. The rest of `rss_mb`
    are pages of mapped weights, which become resident as tokens are first met, and which the system
    may take back.
    """

    seconds: float
    rss_mb: float
    memory_mb: float
    in_use_mb: float
    threads: int
    files: int


class MallocInfo(ctypes.Structure):
    """Holds what glibc's `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    )


def in_use() -> float:
    """Returns the megabytes that libraries and Python have allocated and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    found = mallinfo2()
    return float(found.uordblks + found.hblkhd + BLOCK_BYTES * sys.getallocatedblocks()) / 1e6


def sample(started: float) -> Sample:
    with open("/proc/self/status") as status:
        kb = {name: int(rest[0]) for name, *rest in map(str.split, status) if rest[1:] == ["kB"]}
    threads = len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    rss, own = (kb[name] * 1024 / 1e6 for name in ("VmRSS:", "RssAnon:"))
    return Sample(time.monotonic() - started, rss, own, in_use(), threads, files)


def sizes(samples: list[Sample]) -> dict[str, Any]:
    """Returns the figures of a run's samples, and in "failures" what grew.

    "threads" and "files" are the most of the third quarter and the least of the last one.
    """
    seconds = samples[-1].seconds
    warm = next(s for s in samples if s.seconds >= WARM_UP * seconds)
    half = [s for s in samples if s.seconds >= seconds / 2]
    memory = {}
    for name in ("in_use_mb", "memory_mb"):
        mb = [getattr(s, name) for s in half]
        memory[name] = {
            "warm": round(getattr(warm, name), 1),
            "end": round(mb[-1], 1),
            "peak": round(max(getattr(s, name) for s in samples), 1),
            "mb_per_minute": round(float(np.polyfit([s.seconds / 60 for s in half], mb, 1)[0]), 2),
        }
    slope, failures = memory["in_use_mb"]["mb_per_minute"], []
    grown = half[-1].in_use_mb - half[0].in_use_mb
    if (grown > MAX_SHORT_GROWTH) if seconds < 120 else (slope > MAX_GROWTH):
        failures.append(f"memory in use grows by {slope:.1f} MB a minute")
    # An engine that is opened meanwhile holds some for a moment, so that single samples vary.
    third = [s for s in half if s.seconds < 0.75 * seconds]
    last = half[len(third) :]
    counts = {
        name: [max(getattr(s, name) for s in third), min(getattr(s, name) for s in last)]
        for name in ("threads", "files")
    }
    failures += [
        f"{name} grow from {was} to {now}"
        for name, (was, now) in counts.items()
        if now > was + (TRIAL_FILES if name == "files" and seconds < 120 else 0)
    ]
    return {
        **memory,
        "rss_mb": {"warm": round(warm.rss_mb, 1), "end": round(half[-1].rss_mb, 1)},
        **counts,
        "failures": failures,
    }


# ---- the run ----


@contextmanager
def shared_engine(folder: Path, parallel: int, prompts: list[list[int]]) -> Iterator[Any]:
    """Gives an AsyncEngine and its loop, which runs in a thread.

    Each lane has answered the longest prompt there is before: the pages of a cache become this
    process's own when they are first written.
    """
    loop, engine = (
        asyncio.new_event_loop(),
        AsyncEngine(load(folder, profile=False), parallel=parallel),
    )
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    longest = max(prompts, key=len)
    turned = [longest[k:] + longest[:k] for k in range(parallel)]

    async def warm_up() -> None:
        await asyncio.gather(*(engine.generate(ids, max_new_tokens=64) for ids in turned))

    asyncio.run_coroutine_threadsafe(warm_up(), loop).result()
    yield engine, loop
    asyncio.run_coroutine_threadsafe(engine.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def soak(
    folder: Path, seconds: float, seed: int, workers: int, parallel: int
) -> tuple[Findings, list[Sample]]:
    """Runs the workers for some seconds; returns what they found and the samples."""
    engine = load(folder, profile=False)
    engines = {"first": engine}
    for name in [*(info.name for info in manifest_of(folder).drafters), *BUILT_IN, "none"]:
        engines[name] = engine.with_drafter(
            name, False if name not in (*BUILT_IN, "none") else None
        )
    reference, findings = Reference(load(folder, drafter="none", profile=False)), Findings()
    requests = [each for each in pool(random.Random(seed), engine) if reference.has(each)]
    prompts = [each.prompt for each in requests if isinstance(each.prompt, list)]

    def about(number: int) -> tuple[random.Random, list[Request], Reference, Findings]:
        return random.Random(f"{seed} worker {number}"), requests, reference, findings

    with shared_engine(folder, parallel, prompts) as shared:
        asking: list[Worker] = [Caller(*about(i), engines) for i in range(workers)]
        clients = parallel + parallel // 2 + 1
        asking += [Client(*about(workers + i), *shared) for i in range(clients)]
        started = time.monotonic()
        deadline = started + seconds
        threads = [threading.Thread(target=w.run, args=(deadline,), daemon=True) for w in asking]
        for thread in threads:
            thread.start()
        samples = [sample(started)]
        while time.monotonic() < deadline:
            time.sleep(min(1.0, seconds / 20))
            if time.monotonic() < deadline:  # until then all workers are there
                samples.append(sample(started))
        for thread in threads:
            thread.join(max(0.0, deadline + PATIENCE - time.monotonic()))
            if thread.is_alive():
                faulthandler.dump_traceback()
                findings.fail(f"a request still runs {PATIENCE:.0f} s after the end")
                break
    return findings, samples


@contextmanager
def chosen_bundle(folder: Path | None, is_toy: bool) -> Iterator[Path]:
    """Gives the bundle to soak: that of a tiny target that has learned to repeat words, with a
    drafter that often guesses them (which needs the extra `export`), or the one that is asked for;
    raises UserError if it is not fp32."""
    if is_toy:
        sys.path.insert(0, str(ROOT / "tests/export"))
        from workshop import FluentWorkshop

        with tempfile.TemporaryDirectory(prefix="soak-") as made:
            yield FluentWorkshop(Path(made)).bundle("medusa")
        return
    folder = folder or bundles.find()
    precision = manifest_of(folder).target.precision
    if precision != "fp32":
        raise UserError(
            f"got a bundle of {precision}, expected fp32: rounding of other precisions makes other "
            "answers"
        )
    yield folder


def main(words: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--bundle", "--json")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="a tiny bundle made for this run")
    parser.add_argument("--workers", type=int, default=4, help="threads that share engines")
    parser.add_argument("--parallel", type=int, default=3, help="calls at a time of the other one")
    args = parser.parse_args(words)
    settings = {name: getattr(args, name) for name in ("seed", "minutes", "workers", "parallel")}
    with chosen_bundle(args.bundle, args.toy) as folder:
        manifest = manifest_of(folder)
        findings, samples = soak(folder, 60 * args.minutes, args.seed, args.workers, args.parallel)
    size = sizes(samples)
    failures = [*findings.failures, *size.pop("failures")]
    if findings.outcomes["equal"] < LEAST_EQUAL:
        failures.append(f"only {findings.outcomes['equal']} answers are compared and equal")
    figures = {
        **settings,
        "requests": sum(findings.requests.values()),
        "by_kind": dict(sorted(findings.requests.items())),
        "outcomes": dict(sorted(findings.outcomes.items())),
        "tokens": findings.tokens,
        **size,
        "failed": len(failures),
        "failures": failures,
    }
    for name, found in figures.items():
        print(f"{name:9} {found}")
    write(args.json, figures, manifest=manifest, note=NOTE)
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
