"""Sends mixed requests to one engine that answers several at a time, and compares every answer.

    python -m tools.ci.soak_batch --parallel 8 --minutes 10 [--bundle DIR | --toy] --json OUT
    python -m tools.ci.soak_batch --parallel 8 --answers 2000 --bundle DIR --json OUT

More clients than are answered at a time ask for what soak.py asks for, for prompts of several
hundred tokens and, where the extra `grammar` is installed and reads the bundle's tokenizer, for
answers within grammars; all of it by AsyncEngine in this process. Some read their answers whole,
some as streams; others close their streams early, cancel their calls or give them too little time,
and most pause between two requests, so that calls join and leave the passes of others all the time.
A few requests are hostile, as soak.py's.

Before, the same bundle's engine has answered each request alone. A whole answer must be that one,
token for token, or a near tie must lie where they part, which is listed; a part of one must be its
beginning. --answers ends the run after so many whole answers, and not by the clock.

Memory, threads and open files are judged as in soak.py. The longest stall is the longest gap
between two parts of one stream. Exit code 1 as soak.py's.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.loop.result import GenerationResult
from spec_runtime.measure.audit import first_difference
from spec_runtime.queue.async_engine import AsyncEngine
from tools.ci.soak import (
    TEXTS,
    Findings,
    Reference,
    Request,
    Sample,
    chosen_bundle,
    hostile,
    options,
    pool,
    report,
    sample,
)
from tools.figures import command_line, manifest_of, run
from tools.measure.rivals.report import gap_figures

REQUESTS = 120  # different ones, each answered once alone
SHARES = {"long": 0.1, "grammar": 0.1}
LONG_TOKENS = 600  # of a long prompt at most, and half of the context
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"type": "regex", "regex": "[a-z]{1,8}( [a-z]{1,8}){0,5}"},
    {"type": "regex", "regex": "(yes|no), [0-9]{1,4}"},
    {"type": "json_object"},
)
MOST_PAUSE = 0.2  # seconds between two requests of a client


def requests(rng: random.Random, engine: Engine, count: int) -> list[Request]:
    """Returns the requests of a run: soak.py's, long prompts and grammars."""
    longest = min(LONG_TOKENS, engine.target.max_length // 2)
    found: list[Request] = []
    while len(found) < count:
        found += pool(rng, engine.encode)
    for at in range(count):
        drawn = rng.random()
        if drawn < SHARES["long"]:
            texts = rng.choices(TEXTS, k=longest)
            ids = [token for text in texts for token in engine.encode(text)]
            found[at] = Request(ids[: rng.randint(longest // 4, longest)], options(rng))
        elif drawn < SHARES["long"] + SHARES["grammar"]:
            asked = {"max_new_tokens": rng.randint(4, 40), "response_format": rng.choice(GRAMMARS)}
            if rng.random() < 0.5:
                asked |= {"temperature": 0.8, "seed": rng.randrange(1000)}
            found[at] = Request(rng.choice(TEXTS), asked)
    return found[:count]


@dataclass
class Soak:
    """Holds what the clients of one run share.

    `gaps` are seconds between the parts of streams. `parted` has the requests whose answers were
    others, with the first position where they are.
    """

    engine: AsyncEngine
    requests: list[Request]
    reference: Reference
    most_answers: int | None
    deadline: float
    findings: Findings = field(default_factory=Findings)
    num_answers: int = 0
    gaps: list[float] = field(default_factory=list)
    parted: list[tuple[str, Request, int, list[int]]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        if self.most_answers is not None:
            return self.num_answers >= self.most_answers
        return time.monotonic() >= self.deadline

    async def client(self, rng: random.Random) -> None:
        """Asks until the run is over."""
        kinds: list[tuple[int, Callable[[random.Random, Request], Awaitable[None]]]] = [
            (5, self.whole),
            (5, self.stream),
            (2, self.leave),
            (2, self.cancel),
            (1, self.hurry),
            (1, self.hostile),
        ]
        while not self.is_over:
            ask = rng.choices([each for _, each in kinds], [weight for weight, _ in kinds])[0]
            request = rng.choice(self.requests)
            try:
                await ask(rng, request)
            except Exception:
                last = traceback.format_exc().strip().splitlines()[-1]
                self.findings.fail(f"{ask.__name__}: {request.key[:200]}: {last}")
            if rng.random() < 0.7:
                await asyncio.sleep(rng.uniform(0, MOST_PAUSE))

    async def whole(self, rng: random.Random, request: Request) -> None:
        result = await self.engine.generate(request.prompt, **request.options)
        self._judge_whole("whole", request, result)

    async def stream(self, rng: random.Random, request: Request) -> None:
        tokens: list[int] = []
        text = ""
        before: float | None = None
        result = None
        async for chunk in self.engine.stream(request.prompt, **request.options):
            now = time.perf_counter()
            if before is not None:
                self.gaps.append(now - before)
            before = now
            tokens += chunk.token_ids
            text += chunk.text
            result = chunk.result
        assert result is not None, "the last chunk has the result"
        if (tokens, text) != (result.token_ids, result.text):
            self.findings.fail(f"stream: {request.key[:200]}: its parts are not its result")
        self._judge_whole("stream", request, result)

    async def leave(self, rng: random.Random, request: Request) -> None:
        """Closes a stream after some parts."""
        pieces = self.engine.stream(request.prompt, **request.options)
        tokens: list[int] = []
        for _ in range(rng.randint(1, 4)):
            chunk = await anext(pieces, None)
            if chunk is None:
                break
            tokens += chunk.token_ids
        await pieces.aclose()
        self._judge_part("closed early", request, tokens)

    async def cancel(self, rng: random.Random, request: Request) -> None:
        """Cancels a task while it waits, its prompt is read or its answer is decoded."""
        task = asyncio.create_task(self.engine.generate(request.prompt, **request.options))
        done, _ = await asyncio.wait({task}, timeout=rng.uniform(0, 1.0))
        if done:
            self._judge_whole("not cancelled", request, task.result())
            return
        task.cancel()
        await asyncio.wait({task})
        self.findings.add("cancelled", "not compared")

    async def hurry(self, rng: random.Random, request: Request) -> None:
        """Gives a call little time."""
        asked = {**request.options, "timeout": rng.uniform(0.01, 0.5)}
        result = await self.engine.generate(request.prompt, **asked)
        if result.finish_reason == "timeout":
            self._judge_part("timeout", request, result.token_ids)
        else:
            self._judge_whole("in time", request, result)

    async def hostile(self, rng: random.Random, request: Request) -> None:
        asked, begun = hostile(rng), time.monotonic()
        found: GenerationResult | UserError
        try:
            found = await self.engine.generate(asked.prompt, **asked.options)
        except UserError as error:
            found = error
        self.findings.judge_hostile(asked, time.monotonic() - begun, found)

    def _judge_whole(self, kind: str, request: Request, got: GenerationResult) -> None:
        expected = self.reference.answer(request)
        self.num_answers += 1
        position = first_difference(expected.token_ids, got.token_ids)
        if position is not None:
            self.parted.append((kind, request, position, got.token_ids))
        elif (got.text, got.finish_reason) != (expected.text, expected.finish_reason):
            self.findings.fail(f"{kind}: {request.key[:200]}: same tokens, other text or reason")
        else:
            self.findings.add(kind, "equal", len(got.token_ids))

    def _judge_part(self, kind: str, request: Request, got: list[int]) -> None:
        expected = self.reference.answer(request).token_ids[: len(got)]
        position = first_difference(expected, got)
        if position is None:
            self.findings.add(kind, "begins as it should", len(got))
        else:
            self.parted.append((kind, request, position, got))

    def judge_parted(self) -> list[dict[str, Any]]:
        """Returns the near ties, where the other answers part; all else is a failure.

        This takes passes of the target, which nobody waits for any more.
        """
        ties = []
        for kind, request, position, got in self.parted:
            pair = (got, self.reference.answer(request).token_ids)
            if self.findings.judge(kind, self.reference, request, position, pair):
                ties.append({"request": request.key, "position": position})
        return ties


async def _soak(soak: Soak, seed: int, clients: int, parallel: int) -> list[Sample]:
    """Lets clients ask until the run is over; returns samples of this process meanwhile.

    Before, each lane has answered the longest prompt there is: the pages of a cache become this
    process's own when they are first written.
    """
    prompts = [each.prompt for each in soak.requests if isinstance(each.prompt, list)]
    longest = max(prompts, key=len)
    turned = [longest[k:] + longest[:k] for k in range(parallel)]
    rngs = [random.Random(f"{seed} client {number}") for number in range(clients)]
    started = time.monotonic()
    samples = [sample(started)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            samples.append(sample(started))

    async with soak.engine:
        await asyncio.gather(*(soak.engine.generate(ids, max_new_tokens=64) for ids in turned))
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(soak.client(rng) for rng in rngs))
        watching.cancel()
    return samples


def soak(
    folder: Path,
    parallel: int,
    seconds: float,
    answers: int | None = None,
    seed: int = 0,
    clients: int | None = None,
) -> tuple[Soak, list[Sample], list[dict[str, Any]]]:
    """Answers every request alone, then soaks; returns the run, its samples and its near ties."""
    reference = Reference(spec_runtime.load(folder, profile=False))
    engine = spec_runtime.load(folder, profile=False)
    asked = []
    for each in requests(random.Random(seed), engine, REQUESTS):
        try:
            reference.answer(each)
        except UserError:  # the library for grammars is not there or cannot read the tokenizer
            if "response_format" not in each.options:
                raise
        else:
            asked.append(each)
    print(f"{len(asked)} requests answered alone", file=sys.stderr, flush=True)
    deadline = time.monotonic() + seconds
    run_of = Soak(AsyncEngine(engine, parallel=parallel), asked, reference, answers, deadline)
    samples = asyncio.run(_soak(run_of, seed, clients or parallel + parallel // 2 + 1, parallel))
    return run_of, samples, run_of.judge_parted()


def main(words: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--bundle", "--json")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--clients", type=int, help="default: half as many again as --parallel")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--answers", type=int, help="whole answers to compare, however long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="a tiny bundle made for this run")
    args = parser.parse_args(words)
    with chosen_bundle(args.bundle, args.toy) as folder:
        manifest = manifest_of(folder)
        seconds = 60 * args.minutes
        found, samples, ties = soak(
            folder, args.parallel, seconds, args.answers, args.seed, args.clients
        )
    figures = {
        "seed": args.seed,
        "parallel": args.parallel,
        "seconds": round(samples[-1].seconds, 1),
        "requests": len(found.requests),
        "grammars": sum("response_format" in each.options for each in found.requests),
        "answers": found.num_answers,
        "differ": len(found.parted) - len(ties),
        "near_ties": ties,
        "gap_ms": gap_figures(found.gaps),
    }
    return report(args.json, figures, found.findings, samples, manifest)


if __name__ == "__main__":
    run(main)
