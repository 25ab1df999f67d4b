"""Threads that share a target: one generation at a time, in order, and none left waiting."""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest
from gates import PATIENCE, wait_until
from mixed_calls import problems
from toy_engine import DRAFTERS, engine_of, make_proposer, random_prompt

from spec_runtime import Engine, GenerationResult
from spec_runtime.load import load
from spec_runtime.trees.budget import Budget

if TYPE_CHECKING:
    from workshop import FluentWorkshop

PROMPTS = [[1, 2, 3, 4, 5, *random_prompt(seed)] for seed in range(4)]


def answer_alone(seed: int, max_new_tokens: int) -> GenerationResult:
    """Answers with an engine of its own."""
    return engine_of().generate(random_prompt(seed), max_new_tokens=max_new_tokens)


def mixture(drafter: str, num_calls: int = 10) -> list[str]:
    """Returns what is wrong with a mixture of calls, on an engine and others of its target."""
    engine = engine_of(drafter)
    plain = make_proposer("none", cast(Any, engine.target.lend()[0]))
    engines = [engine, engine.with_budget(Budget(3)), engine.observed(lambda _: plain, Budget(1))]
    options = {"max_new_tokens": 24, "temperature": 0.7, "seed": 3}

    def answer(prompt: list[int], options: dict[str, Any]) -> list[int]:
        return engine_of(drafter).generate(prompt, **options).token_ids

    return problems(engines, answer, PROMPTS, options, num_calls)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_mixture_of_calls_answers_as_each_call_alone(drafter: str) -> None:
    assert mixture(drafter) == []


def test_the_mixture_needs_no_assertions() -> None:
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), *sys.path])
    code = "from test_fair_lock import mixture; print(mixture('parallelspec'), __debug__)"
    found = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert found.stdout.strip() == "[] False", found.stderr


def test_a_mixture_of_calls_on_a_bundle(fluent: "FluentWorkshop") -> None:
    bundle = fluent.bundle("parallelspec")
    engine = load(bundle, threads=1, profile=False)
    engines = [engine, engine.with_drafter("none"), engine.with_drafter("parallelspec", False)]
    prompts = [engine.encode(f"say {word}") for word in ("abc, 3", "abc, 4", "xyz", "more")]
    options = {"max_new_tokens": 24, "ignore_eos": True}
    plain = load(bundle, "none", threads=1)

    def answer(prompt: list[int], options: dict[str, Any]) -> list[int]:
        return plain.generate(prompt, reuse=False, **options).token_ids

    assert problems(engines, answer, prompts, options, num_calls=5) == []


class Call:
    """Generates in a thread of its own, which is waiting, running or done after this."""

    def __init__(self, engine: Engine, seed: int = 9, done: list[int] | None = None) -> None:
        self.result: GenerationResult | None = None
        self._seed = seed
        before = len(engine.target.lock._queue)

        def work() -> None:
            self.result = engine.generate(random_prompt(seed), max_new_tokens=12)
            if done is not None:
                done.append(seed)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        # where nobody is before it, it may be over before this thread looks
        wait_until(lambda: len(engine.target.lock._queue) > before or not self._thread.is_alive())

    @property
    def is_waiting(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def answers_rightly(self) -> bool:
        self._thread.join(PATIENCE)
        assert self.result is not None, "still waiting"
        return self.result.token_ids == answer_alone(self._seed, 12).token_ids


def open_stream(engine: Engine) -> Any:
    stream = engine.stream(random_prompt(1), max_new_tokens=40)
    next(stream)
    return stream


def test_calls_are_answered_in_the_order_in_which_they_came() -> None:
    engine, done = engine_of(), list[int]()
    stream = open_stream(engine)
    calls = [Call(engine, seed, done) for seed in range(5)]
    assert all(call.is_waiting for call in calls)
    stream.close()
    assert all(call.answers_rightly() for call in calls)
    wait_until(lambda: len(done) == 5)
    assert done == [0, 1, 2, 3, 4]


def test_a_stream_keeps_its_target_until_it_is_exhausted() -> None:
    engine = engine_of()
    stream = open_stream(engine)
    call = Call(engine)
    assert call.is_waiting
    assert answer_alone(1, 40).text.endswith("".join(stream))
    assert call.answers_rightly()


def test_a_dropped_stream_gives_its_target_back() -> None:
    engine = engine_of()
    held = [open_stream(engine)]
    held.append(held)  # only the garbage collector finds it
    call = Call(engine)
    assert call.is_waiting
    del held
    gc.collect()
    assert call.answers_rightly()


def test_a_stream_may_be_read_on_in_another_thread() -> None:
    engine = engine_of()
    stream = open_stream(engine)
    thread = threading.Thread(target=next, args=[stream])
    thread.start()
    thread.join()
    begun = threading.Event()

    def close() -> None:
        begun.set()
        stream.close()

    threading.Timer(0.1, close).start()
    engine.generate([1, 2, 3], max_new_tokens=3)  # waits, since another thread reads the stream
    assert begun.is_set()


def test_a_thread_does_not_wait_for_its_own_stream() -> None:
    engine = engine_of()
    stream = open_stream(engine)
    for call in (
        lambda: engine.generate([1, 2, 3]),
        lambda: next(engine.with_budget(Budget(2)).stream([1, 2, 3])),
        engine.target.forget,
    ):
        with pytest.raises(RuntimeError, match="this thread has an open stream"):
            call()
    rest = "".join(stream)
    assert rest
    assert answer_alone(1, 40).text.endswith(rest)
    expected = answer_alone(2, 20).token_ids
    for _ in range(2):
        assert engine.generate(random_prompt(2), max_new_tokens=20).token_ids == expected


def test_an_interrupted_thread_leaves_the_queue() -> None:
    """Ctrl-C while the main thread waits for a stream that another thread reads."""
    engine = engine_of()
    streams: list[Any] = []
    thread = threading.Thread(target=lambda: streams.append(open_stream(engine)))
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([1, 2, 3])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    call = Call(engine)
    assert call.is_waiting
    streams[0].close()
    assert call.answers_rightly()
    assert len(engine.target.lock._queue) == 0


def test_an_interruption_between_two_steps_gives_the_target_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exception keeps the call's frame, and so its generator, alive."""
    engine = engine_of()
    with monkeypatch.context() as patched:
        spy = Mock(side_effect=[None, None, KeyboardInterrupt])
        patched.setattr("spec_runtime.loop.fair_lock.Holder.resume", spy)
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.generate(random_prompt(2))
    assert caught.value.__traceback__ is not None
    assert Call(engine).answers_rightly()


def test_each_call_has_a_result_of_its_own() -> None:
    """Whatever other threads leave in `last_result` between its end and its return."""
    engine = engine_of()
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(20):
            result = engine.generate(random_prompt(number), max_new_tokens=1 + number)
            if len(result.token_ids) != 1 + number:
                wrong.append(f"{len(result.token_ids)} tokens of {1 + number}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=[i]) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert wrong == []
