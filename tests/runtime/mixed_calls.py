"""Calls engines of one target from many threads in all ways at once, and tells what went wrong."""

import random
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from spec_runtime import Engine, GenerationResult

NUM_THREADS = 6


class Interruption(BaseException):
    """Stands for the KeyboardInterrupt that ends a thread's call anywhere."""


def generated(engine: Engine, prompt: list[int], options: dict[str, Any]) -> list[int]:
    return engine.generate(prompt, **options).token_ids


def streamed(engine: Engine, prompt: list[int], options: dict[str, Any]) -> list[int]:
    """Reads a whole stream, whose pieces have to be its own result's text."""
    pieces: list[str] = []

    def read() -> Generator[str, None, GenerationResult]:
        return (yield from engine.stream(prompt, **options))

    reading = read()
    while True:
        try:
            pieces.append(next(reading))
        except StopIteration as end:
            result: GenerationResult = end.value
            break
    if "".join(pieces) != result.text:
        raise ValueError(f"got pieces {pieces}, expected {result.text!r}")
    return result.token_ids


def closed_early(engine: Engine, prompt: list[int], options: dict[str, Any]) -> list[int]:
    steps = engine.steps(prompt, **options)
    tokens = [token for _ in range(3) for token in next(steps).tokens]
    steps.close()
    return tokens


def dropped(engine: Engine, prompt: list[int], options: dict[str, Any]) -> list[int]:
    steps = engine.steps(prompt, **options)
    return [token for _ in range(2) for token in next(steps).tokens]


def interrupted(engine: Engine, prompt: list[int], options: dict[str, Any]) -> list[int]:
    steps = engine.steps(prompt, **options)
    tokens = [token for _ in range(4) for token in next(steps).tokens]
    try:
        steps.throw(Interruption())
    except Interruption:
        return tokens
    raise ValueError("the interruption was lost")


def interrupted_inside(engine: Engine, prompt: list[int], options: dict[str, Any]) -> list[int]:
    """Has the decoding of a token interrupt the step that it belongs to."""
    tokens: list[int] = []
    thread, decode = threading.current_thread(), engine.tokenizer.decode

    def failing(ids: Sequence[int]) -> str:
        if threading.current_thread() is thread and len(tokens) > 4:
            raise Interruption
        return decode(ids)

    mine = engine.with_budget(engine.budget)
    mine.tokenizer = _Decoding(engine.tokenizer, failing)  # type: ignore[assignment]
    try:
        for step in mine.steps(prompt, **options):
            tokens += step.tokens
    except Interruption:
        return tokens
    raise ValueError("the interruption was lost")


class _Decoding:
    """A tokenizer with another `decode`."""

    def __init__(self, tokenizer: Any, decode: Callable[[Sequence[int]], str]) -> None:
        self._tokenizer, self.decode = tokenizer, decode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


WHOLE = (generated, streamed)
CALLS = (*WHOLE, closed_early, dropped, interrupted, interrupted_inside)


def problems(
    engines: list[Engine],
    alone: Callable[[list[int], dict[str, Any]], list[int]],
    prompts: list[list[int]],
    options: dict[str, Any],
    num_calls: int,
) -> list[str]:
    """Returns errors and tokens unlike those of an undisturbed run, of `num_calls` calls a thread.

    `alone` returns the tokens of one prompt by an engine that nobody shares. A call that stops
    early has to have the first of them.
    """
    expected = [alone(prompt, options) for prompt in prompts]
    found: list[str] = []
    ready = threading.Barrier(NUM_THREADS)

    def work(number: int) -> None:
        rng = random.Random(number)
        ready.wait()
        for _ in range(num_calls):
            engine, call, at = rng.choice(engines), rng.choice(CALLS), rng.randrange(len(prompts))
            try:
                tokens = call(engine, prompts[at], options)
            except BaseException as error:
                found.append(f"{call.__name__}: {error!r}")
                continue
            wanted = expected[at] if call in WHOLE else expected[at][: len(tokens)]
            if tokens != wanted or not tokens:
                found.append(f"{call.__name__}: got {tokens}, expected {wanted}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=[i], daemon=True) for i in range(NUM_THREADS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        sys.setswitchinterval(interval)
    return found + [f"{thread.name} still waits" for thread in threads if thread.is_alive()]
