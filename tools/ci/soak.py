"""Sends mixed requests to one bundle from several threads for a while and compares every answer.

    python -m tools.ci.soak --minutes 10 --seed 0 [--bundle DIR | --toy] --json OUT

The requests are drawn from a pool made of the seed: texts, raw texts, token ids and chats that
grow turn by turn; greedy and sampled, with penalties, biases, stop strings and log-probabilities;
through every drafter of the bundle, those built in and plain decoding. They are generated whole,
streamed, and streams are closed early, dropped and interrupted; some requests have arguments that
must be refused. All threads share one target, so that most requests find the key/value rows of a
quite different one.

Each answer is compared with that of plain decoding without reuse, by a bundle of its own, for the
same arguments: at fp32 it must be the same token for token, or a near tie must lie where they part.
What streams give before they are closed must begin that answer. Acceptance by rejection and typical
acceptance, whose answers need not be those of plain decoding, are run and not compared; so are
hostile requests, for answers in formats that are slow to read, compile or follow: these must end by
their timeout, or be refused.

Resident memory, threads and open files are sampled throughout. Exit code 1 if an answer differs,
bad arguments raise anything but UserError, a request hangs, threads or open files are never again
as few in the last quarter as they were at most in the quarter before, or memory grows by more than
1 MB a minute over the last half (16 MB in all in a run of under two minutes).
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
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
from spec_runtime.sampling import Sampler, SamplingParams
from tools.figures import command_line, manifest_of, run, write
from tools.measure import hostile_clients

ROOT = Path(__file__).parents[2]
NOTE = "a pool of requests of its own; not recorded: prompts"
POOL = 48  # different requests, chats not counted
CHATS, TURNS = 6, 3
MAX_GROWTH = 1.0  # MB a minute
MAX_SHORT_GROWTH = 16.0  # MB, in a run too short for a slope
# Pipes of the two processes that try grammars, which in a short run may come late, and stay.
TRIAL_FILES = 4
PATIENCE = 120.0  # seconds that a request may take at the end
HOSTILE_SECONDS = 0.5  # that a hostile request is given
HOSTILE_PATIENCE = 20.0  # after which it has not kept to them
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

    def judge_hostile(
        self, request: Request, seconds: float, found: GenerationResult | UserError
    ) -> None:
        """Counts a hostile request that ended after so many seconds."""
        if seconds > HOSTILE_PATIENCE:
            self.fail(f"hostile: {request.key[:200]}: took {seconds:.0f} s")
        elif isinstance(found, UserError) and "\n" in str(found):
            self.fail(f"hostile: {request.key[:200]}: refused in several lines: {found}")
        else:
            self.add("hostile", "not compared")

    def fail(self, what: str) -> None:
        with self.lock:
            self.outcomes["failed"] += 1
            if len(self.failures) < 50:
                self.failures.append(what)

    def judge(
        self,
        kind: str,
        reference: Reference,
        request: Request,
        position: int | None,
        pair: tuple[Any, Any],
        who: str = "",
    ) -> bool:
        """Counts an answer that parts from the reference at `position`, None if it does not; says
        whether a near tie lies there. `pair` are what was got and what was expected."""
        got, expected = pair
        tokens = len(got) if isinstance(got, list) else 0
        # `is_near_tie` knows no grammar
        is_free = "response_format" not in request.options
        if position is None:
            self.add(kind, "equal", tokens)
        elif is_free and reference.is_near_tie(request, position):
            self.add(kind, "near tie", tokens)
            return True
        else:
            self.fail(
                f"{kind}{who}: {request.key[:200]}: parts at token {position}: got {got!r:.200}, "
                f"expected {expected!r:.200}"
            )
        return False


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


def pool(rng: random.Random, encode: Callable[[str], list[int]]) -> list[Request]:
    """Returns the requests of a run."""
    requests = []
    for _ in range(POOL):
        text = rng.choice(TEXTS)
        asked = options(rng)
        prompt: Any = text
        shape = rng.choice(("text", "raw", "ids", "system"))
        if shape == "ids":
            prompt = encode(text)
        elif shape != "text":
            asked |= {"raw": True} if shape == "raw" else {"system": "Be brief."}
        requests.append(Request(prompt, asked))
    return requests


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


def hostile(rng: random.Random) -> Request:
    """Returns a request for an answer in a format that is slow to read, to compile or to follow; of
    each kind there are few, so that what an engine remembers of them does not grow."""
    make = rng.choice(list(hostile_clients.FORMATS.values()))
    asked = {"response_format": make(rng.randrange(4)), "timeout": HOSTILE_SECONDS}
    return Request("say abc, 1", {**asked, "max_new_tokens": 8})


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

    def text_until(self, request: Request, position: int) -> str:
        """Returns the text of the first `position` tokens of the answer."""
        return self._engine.tokenizer.decode(self.answer(request).token_ids[:position])

    def is_near_tie(self, request: Request, position: int) -> bool:
        """Says whether the answer's token at `position` would be another one if its logit were
        lower by what rounding may do at fp32."""
        token_ids = self.answer(request).token_ids
        if position >= len(token_ids):
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


class Worker:
    """Sends requests until the time is over; several share the engines."""

    def __init__(
        self,
        number: int,
        seed: int,
        engines: dict[str, Engine],
        requests: list[Request],
        reference: Reference,
        findings: Findings,
    ) -> None:
        self.rng = random.Random(f"{seed} worker {number}")
        self.engines, self.requests = engines, requests
        self.reference, self.findings = reference, findings

    def run(self, deadline: float) -> None:
        kinds: list[tuple[int, Callable[[Engine, Request], None]]] = [
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
            (1, self.hostile),
        ]
        weights = [weight for weight, _ in kinds]
        while time.monotonic() < deadline:
            _, ask = self.rng.choices(kinds, weights)[0]
            name = self.rng.choice(list(self.engines))
            request = self.rng.choice(self.requests)
            try:
                ask(self.engines[name], request)
            except Exception:
                last = traceback.format_exc().strip().splitlines()[-1]
                self.findings.fail(f"{ask} with {name}: {request.key[:200]}: {last}")

    def generate(self, engine: Engine, request: Request, kind: str = "generate") -> None:
        got = engine.generate(request.prompt, **request.options)
        expected = self.reference.answer(request)
        if not self._judge_tokens(kind, engine, request, got.token_ids):
            return
        same = (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
        if not same or not _logprobs_agree(got, expected):
            self.findings.fail(
                f"{kind} with {engine.drafter}: {request.key[:200]}: same tokens, other "
                "text, reason or log-probabilities"
            )

    def steps(self, engine: Engine, request: Request) -> None:
        steps = engine.steps(request.prompt, **request.options)
        self._judge_tokens("steps", engine, request, [t for step in steps for t in step.tokens])

    def stream(self, kind: str, engine: Engine, request: Request) -> None:
        """Reads a stream whole, or some pieces of it before its end comes as `kind` says."""
        pieces = engine.stream(request.prompt, **request.options)
        count = None if kind == "stream" else self.rng.randint(0, 4)
        text = "".join(islice(pieces, count))
        if kind == "closed early":
            pieces.close()
        elif kind == "dropped":
            del pieces
        elif kind == "interrupted":
            with suppress(KeyboardInterrupt):
                pieces.throw(KeyboardInterrupt())
        expected = self.reference.answer(request)
        agrees = expected.text == text if count is None else expected.text.startswith(text)
        position = None
        if not agrees:  # it parts at the first token whose text the stream does not have
            num_tokens = len(expected.token_ids)
            texts = (self.reference.text_until(request, i + 1) for i in range(num_tokens))
            parted = (i for i, each in enumerate(texts) if not text.startswith(each))
            position = next(parted, num_tokens)
        who = f" with {engine.drafter}"
        pair = (text, expected.text)
        self.findings.judge(kind, self.reference, request, position, pair, who)

    def chat(self, engine: Engine, request: Request) -> None:
        """Asks turn after turn; each repeats all messages before it, as clients do."""
        rng = random.Random(f"chat {self.rng.randrange(CHATS)}")
        asked = options(rng) | {"max_new_tokens": 8}
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": rng.choice(TEXTS[:4])})
            turn = Request(list(messages), asked)
            self.generate(engine, turn, kind="chat turn")
            messages.append({"role": "assistant", "content": self.reference.answer(turn).text})

    def open_another(self, engine: Engine, request: Request) -> None:
        """Opens a further engine on the same target, and lets it go again."""
        name = self.rng.choice([*BUILT_IN, engine.drafter.partition("+")[0]])
        self.generate(engine.with_drafter(name), request, kind="new engine")

    def other_rules(self, engine: Engine, request: Request) -> None:
        rule = self.rng.choice(("rejection", "typical"))
        asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "seed": 1}
        got = engine.generate("say abc, 1", acceptance=rule, **asked)
        if not 1 <= len(got.token_ids) <= 12:
            self.findings.fail(f"{rule}: {len(got.token_ids)} tokens, expected 1 to 12")
        self.findings.add(rule, "not compared", len(got.token_ids))

    def refuse(self, engine: Engine, request: Request) -> None:
        prompt, asked = self.rng.choice(REFUSED)
        try:
            engine.generate(prompt, **asked)
        except UserError as error:
            if "\n" in str(error):
                self.findings.fail(f"refused in several lines: {error}")
            self.findings.add("bad arguments", "refused")
        except Exception as error:
            self.findings.fail(f"{str(prompt)[:20]!r} {asked}: {type(error).__name__}: {error}")
        else:
            self.findings.fail(f"not refused: {str(prompt)[:20]!r} {asked}")

    def hostile(self, engine: Engine, request: Request) -> None:
        asked, begun = hostile(self.rng), time.monotonic()
        found: GenerationResult | UserError
        try:
            found = engine.generate(asked.prompt, **asked.options)
        except UserError as error:
            found = error
        self.findings.judge_hostile(asked, time.monotonic() - begun, found)

    def _judge_tokens(
        self, kind: str, engine: Engine, request: Request, token_ids: list[int]
    ) -> bool:
        """Counts an answer's tokens; says whether they are those of the reference."""
        expected = self.reference.answer(request).token_ids
        position = first_difference(expected, token_ids)
        pair, who = (token_ids, expected), f" with {engine.drafter}"
        self.findings.judge(kind, self.reference, request, position, pair, who)
        return position is None


def _logprobs_agree(got: GenerationResult, expected: GenerationResult) -> bool:
    if got.logprobs is None or expected.logprobs is None:
        return got.logprobs is expected.logprobs
    pairs = zip(got.logprobs, expected.logprobs, strict=True)
    return all(abs(a.logprob - b.logprob) < LOGPROB_TOLERANCE for a, b in pairs)


# ---- memory, threads and files ----


@dataclass(frozen=True)
class Sample:
    """The size of this process at `seconds` after the start.

    `memory_mb` is resident memory of its own. The rest of `rss_mb` are pages of mapped weights,
    which become resident as tokens are first met, and which the system may take back.
    """

    seconds: float
    rss_mb: float
    memory_mb: float
    threads: int
    files: int


def sample(started: float) -> Sample:
    with open("/proc/self/status") as status:
        kb = {name: int(rest[0]) for name, *rest in map(str.split, status) if rest[1:] == ["kB"]}
    threads = len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    rss, own = (kb[name] * 1024 / 1e6 for name in ("VmRSS:", "RssAnon:"))
    return Sample(time.monotonic() - started, rss, own, threads, files)


def sizes(samples: list[Sample]) -> dict[str, Any]:
    """Returns the figures of a run's samples, and in "failures" what grew.

    "threads" and "files" are the most of the third quarter and the least of the last one.
    """
    seconds = samples[-1].seconds
    warm = next(s for s in samples if s.seconds >= WARM_UP * seconds)
    half = [s for s in samples if s.seconds >= seconds / 2]
    slope = float(np.polyfit([s.seconds / 60 for s in half], [s.memory_mb for s in half], 1)[0])
    grown, failures = half[-1].memory_mb - half[0].memory_mb, []
    if (grown > MAX_SHORT_GROWTH) if seconds < 120 else (slope > MAX_GROWTH):
        failures.append(f"memory grows by {slope:.1f} MB a minute")
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
        "memory_mb": {
            "warm": round(warm.memory_mb, 1),
            "end": round(half[-1].memory_mb, 1),
            "peak": round(max(s.memory_mb for s in samples), 1),
            "mb_per_minute": round(slope, 2),
        },
        "rss_mb": {"warm": round(warm.rss_mb, 1), "end": round(half[-1].rss_mb, 1)},
        **counts,
        "failures": failures,
    }


# ---- the run ----


def soak(folder: Path, seconds: float, seed: int, workers: int) -> tuple[Findings, list[Sample]]:
    """Runs the workers for some seconds; returns what they found and the samples."""
    engine = load(folder, profile=False)
    manifest = manifest_of(folder)
    engines = {"first": engine}
    for name in [*(info.name for info in manifest.drafters), *BUILT_IN, "none"]:
        engines[name] = engine.with_drafter(
            name, False if name not in (*BUILT_IN, "none") else None
        )
    reference = Reference(load(folder, drafter="none", profile=False))
    requests = pool(random.Random(seed), lambda text: engine.encode(text))
    findings, started = Findings(), time.monotonic()
    deadline = started + seconds
    threads = [
        threading.Thread(
            target=Worker(i, seed, engines, requests, reference, findings).run,
            args=(deadline,),
            daemon=True,
        )
        for i in range(workers)
    ]
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
def toy_bundle() -> Iterator[Path]:
    """Gives a bundle of a tiny target that has learned to repeat words, and a drafter that often
    guesses them; needs the extra `export`."""
    sys.path.insert(0, str(ROOT / "tests/export"))
    from workshop import FluentWorkshop

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        yield FluentWorkshop(Path(folder)).bundle("medusa")


@contextmanager
def chosen_bundle(folder: Path | None, is_toy: bool) -> Iterator[Path]:
    """Gives the bundle to soak; raises UserError if it is not fp32."""
    if is_toy:
        with toy_bundle() as made:
            yield made
        return
    folder = folder or bundles.find()
    precision = manifest_of(folder).target.precision
    if precision != "fp32":
        raise UserError(
            f"got a bundle of {precision}, expected fp32: rounding of other precisions makes other "
            "answers"
        )
    yield folder


def report(
    out: Path | None,
    figures: dict[str, Any],
    findings: Findings,
    samples: list[Sample],
    manifest: Any,
) -> int:
    """Prints and writes figures and findings of a soak; returns 1 if something failed, else 0."""
    size = sizes(samples)
    failures = [*findings.failures, *size.pop("failures")]
    if findings.outcomes["equal"] < LEAST_EQUAL:
        failures.append(f"only {findings.outcomes['equal']} answers are compared and equal")
    figures |= {
        "by_kind": dict(sorted(findings.requests.items())),
        "outcomes": dict(sorted(findings.outcomes.items())),
        "tokens": findings.tokens,
        **size,
        "failed": len(failures),
        "failures": failures,
    }
    for name, found in figures.items():
        print(f"{name:9} {found}")
    write(out, figures, manifest=manifest, note=NOTE)
    return 1 if failures else 0


def main(words: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--bundle", "--json")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="a tiny bundle made for this run")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args(words)
    with chosen_bundle(args.bundle, args.toy) as folder:
        manifest = manifest_of(folder)
        findings, samples = soak(folder, 60 * args.minutes, args.seed, args.workers)
    settings = {"seed": args.seed, "minutes": args.minutes, "workers": args.workers}
    figures = settings | {"requests": sum(findings.requests.values())}
    return report(args.json, figures, findings, samples, manifest)


if __name__ == "__main__":
    run(main)
