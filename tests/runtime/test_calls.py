"""Calls that end early, chunks, closing, and the memory that then goes back."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fake_clock import FakeClock
from gates import PATIENCE, GatedRuns, wait_until
from small import known
from toy_engine import DRAFTERS, engine_of, make_engine, random_prompt

from spec_runtime import Engine, GenerationResult, Piece, SamplingParams, interruption
from spec_runtime.loop.reading import read_steps
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.trees.budget import Budget

PROMPT = random_prompt(1)


def started(engine: Engine, prompt: list[int], **options: Any) -> Future[GenerationResult]:
    """Answers in a thread of its own."""
    return ThreadPoolExecutor(1).submit(engine.generate, prompt, **options)


# ---- cancelled ----


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("way", ["event", "cancel"])
def test_another_thread_ends_a_generation_at_the_next_step(drafter: str, way: str) -> None:
    engine = engine_of(drafter)
    runs, event = GatedRuns(engine), threading.Event()
    answer = started(engine, PROMPT, max_new_tokens=100, cancel=event)
    for _ in range(3):
        runs.wait_for_run()
        runs.let_through(1)
    runs.wait_for_run()
    event.set() if way == "event" else engine.cancel()
    runs.let_through()
    result = answer.result(PATIENCE)
    assert result.finish_reason == "cancelled"
    assert runs.num_runs == 4  # that which ran when it was cancelled is the last
    assert result.stop is None
    whole = engine_of(drafter).generate(PROMPT, max_new_tokens=100)
    assert 0 < len(result.token_ids) < 100
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    # what it computed is there for the next call
    again = engine.generate(PROMPT, max_new_tokens=100)
    assert again.token_ids == whole.token_ids
    assert again.stats.reused_tokens == len(PROMPT) - 1


def test_cancel_ends_neither_calls_that_wait_nor_later_ones() -> None:
    engine = engine_of()
    stream = engine.stream(PROMPT, max_new_tokens=100)
    next(stream)
    waiting = started(engine, [1, 2, 3], max_new_tokens=5)
    engine.cancel()
    assert not list(stream)
    assert engine.generate([1, 2, 3], max_new_tokens=5).finish_reason == "length"
    assert waiting.result(PATIENCE).finish_reason == "length"
    engine.cancel()  # nothing runs
    assert engine.generate([1, 2, 3], max_new_tokens=5).finish_reason == "length"


def test_cancel_ends_no_call_of_another_engine_on_the_target() -> None:
    engine = engine_of()
    other = engine.with_budget(Budget(3))
    stream = other.stream(PROMPT, max_new_tokens=30)
    text = next(stream)
    engine.cancel()
    text += "".join(stream)
    assert text == engine_of().generate(PROMPT, max_new_tokens=30).text


def test_a_call_that_waits_is_cancelled() -> None:
    engine, event = engine_of(), threading.Event()
    stream = engine.stream(PROMPT, max_new_tokens=30)
    next(stream)
    waiting = started(engine, [1, 2, 3], cancel=event, logprobs=1)
    event.set()
    result = waiting.result(PATIENCE)
    assert (result.finish_reason, result.token_ids, result.text) == ("cancelled", [], "")
    assert (result.usage.prompt_tokens, result.logprobs) == (3, [])
    assert list(stream)  # goes on


def test_an_event_that_is_set_already_ends_the_call_before_it_runs() -> None:
    engine, event = engine_of(), threading.Event()
    event.set()
    assert engine.generate(PROMPT, cancel=event).finish_reason == "cancelled"
    assert engine.target._backend.num_runs == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_long_prompt_is_left_between_two_chunks(drafter: str) -> None:
    engine = engine_of(drafter, max_length=3 * PREFILL_ROWS + 100)
    runs, event = GatedRuns(engine), threading.Event()
    prompt = random_prompt(3, length=3 * PREFILL_ROWS)
    answer = started(engine, prompt, max_new_tokens=20, cancel=event)
    runs.wait_for_run()
    event.set()
    runs.let_through()
    result = answer.result(PATIENCE)
    assert runs.num_runs == 1
    assert (result.finish_reason, result.token_ids) == ("cancelled", [])
    again = engine.generate(prompt, max_new_tokens=20)
    assert runs.num_runs >= 1 + 3
    plain = engine_of("none", max_length=3 * PREFILL_ROWS + 100)
    assert again.token_ids == plain.generate(prompt, max_new_tokens=20).token_ids


# ---- out of time ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(interruption, "time", SimpleNamespace(monotonic=fake.read))
    return fake


def test_a_generation_ends_when_its_time_is_over(clock: FakeClock) -> None:
    engine = engine_of()
    stream = engine.stream(PROMPT, max_new_tokens=100, timeout=5)
    clock.now += 3  # the time runs from the call on, not from the first piece on
    text = next(stream)
    clock.now += 1.9
    text += next(stream)
    clock.now += 0.1
    assert not list(stream)
    result = known(engine.last_result)
    assert (result.finish_reason, result.text) == ("timeout", text)


def test_a_generation_that_ends_by_itself_ran_into_no_timeout(clock: FakeClock) -> None:
    engine = engine_of()
    steps = engine.steps(PROMPT, max_new_tokens=1, timeout=1)
    next(steps)
    clock.now += 2
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value.finish_reason == "length"


def test_waiting_counts() -> None:
    engine = engine_of()
    stream = engine.stream(PROMPT, max_new_tokens=30)
    next(stream)
    waiting = started(engine, [1, 2, 3], timeout=0.001)
    assert waiting.result(PATIENCE).finish_reason == "timeout"
    assert "".join(stream)
    assert engine.generate([1, 2, 3], max_new_tokens=3, timeout=PATIENCE).token_ids


@pytest.mark.parametrize("way", ["whole", "closed", "interrupted while it waits", "failed"])
def test_an_engine_forgets_calls_that_are_over(way: str) -> None:
    engine, event = engine_of(), threading.Event()
    call = engine.prepare(PROMPT, max_new_tokens=9, cancel=event)
    steps, forgotten = read_steps(engine.answering(call)), weakref.ref(call)
    del call
    if way == "whole":
        assert list(steps)
    elif way == "closed":
        next(steps)
        steps.close()
    elif way == "failed":
        engine.target._backend.run = None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            next(steps)
    else:
        held = open_in_thread(engine)
        event.set()
        assert not list(steps)
        held.close()
    del steps
    gc.collect()
    assert forgotten() is None


def open_in_thread(engine: Engine) -> Any:
    """Returns a stream that another thread has begun to read."""

    def begin() -> Any:
        stream = engine.stream(PROMPT, max_new_tokens=30)
        next(stream)
        return stream

    return ThreadPoolExecutor(1).submit(begin).result(PATIENCE)


# ---- closed ----


def test_closing_ends_what_runs_and_refuses_what_waits() -> None:
    engine = engine_of()
    runs = GatedRuns(engine)
    running = started(engine, PROMPT, max_new_tokens=100)
    runs.wait_for_run()
    lock = engine.target.lock
    waiting = [started(engine, [1, 2, 3]) for _ in range(2)]
    wait_until(lambda: len(lock._queue) == 3)
    closing = threading.Thread(target=engine.close)
    closing.start()
    for answer in waiting:
        with pytest.raises(RuntimeError, match="this engine is closed"):
            answer.result(PATIENCE)
    runs.let_through()
    result = running.result(PATIENCE)
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert (result.finish_reason, len(result.token_ids)) == ("cancelled", 1)
    assert runs.num_runs == 1
    assert len(lock._queue) == 0


def test_a_closed_engine_says_so_in_one_line() -> None:
    with engine_of() as engine:
        result = engine.generate(PROMPT, max_new_tokens=3)
        begun = engine.stream(PROMPT)
        later = engine.stream(PROMPT)
        next(begun)
    engine.close()  # again
    assert not list(begun)
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate("x"),
        lambda: engine.chunks("x"),
        lambda: next(later),
        lambda: engine.encode("x"),
        lambda: engine.with_budget(Budget(2)),
        lambda: engine.drafter,
        lambda: engine.target,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this engine is closed"):
            call()
    engine.cancel()
    assert result.finish_reason == "length"


def test_closing_inside_a_step_waits_for_nobody() -> None:
    engine = engine_of()
    backend: Any = engine.target.lend()[0]
    run = backend.run

    def close_and_run(*arguments: Any) -> Any:
        engine.close()
        return run(*arguments)

    backend.run = close_and_run
    result = engine.generate(PROMPT, max_new_tokens=50)
    assert (result.finish_reason, len(result.token_ids)) == ("cancelled", 1)


def test_an_engine_on_the_same_target_goes_on() -> None:
    engine = engine_of()
    other = engine.with_budget(Budget(3))
    expected = engine.generate(PROMPT, max_new_tokens=9).token_ids
    engine.close()
    assert other.generate(PROMPT, max_new_tokens=9).token_ids == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_closed_engine_holds_neither_target_nor_drafter(drafter: str) -> None:
    engine = engine_of(drafter)
    gc.disable()
    try:
        engine.generate(PROMPT, max_new_tokens=9)
        held: list[weakref.ref[Any]] = [weakref.ref(engine.target), weakref.ref(engine.proposer)]
        engine.close()
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


FREED = """
import ctypes
from spec_runtime.files.machine import give_back_memory
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = resident()
blocks = [ctypes.create_string_buffer(4000) for _ in range(10_000)]
last = ctypes.create_string_buffer(4000)
full = resident()
del blocks
kept = resident()
give_back_memory()
print(full - before, kept - before, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps freed pages")
def test_freed_memory_goes_back_to_the_system() -> None:
    """The last block keeps the heap from shrinking by itself."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    full, kept, rest = map(int, done.stdout.split())
    assert full > 30e6
    if kept < 20e6:
        pytest.skip("this C library gives memory back by itself")
    assert rest < 10e6


# A thread frees a block after a larger one was freed, which glibc then keeps the room of.
THREADS = """
import ctypes, sys, threading
from spec_runtime.files.machine import return_big_blocks
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def use(num_bytes):
    block = libc.malloc(num_bytes)
    ctypes.memset(block, 1, num_bytes)
    libc.free(block)
if sys.argv[1] == "bounded":
    return_big_blocks()
use(30_000_000)
before = resident()
thread = threading.Thread(target=use, args=[20_000_000])
thread.start()
thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps freed blocks")
def test_what_ended_threads_have_freed_goes_back_to_the_system() -> None:
    kept = {}
    for name in ("as it is", "bounded"):
        command = [sys.executable, "-c", THREADS, name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        kept[name] = int(done.stdout)
    if kept["as it is"] < 10e6:
        pytest.skip("this C library gives blocks back by itself")
    assert kept["bounded"] < 5e6


# ---- what comes back ----


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chunks_are_the_steps(drafter: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "logprobs": 2}
    steps = list(engine_of(drafter).steps(PROMPT, **options))
    *chunks, last = engine_of(drafter).chunks(PROMPT, **options)
    assert [list(chunk.token_ids) for chunk in chunks] == [step.tokens for step in steps]
    assert [list(chunk.logprobs or ()) for chunk in chunks] == [step.logprobs for step in steps]
    for chunk, step in zip(chunks, steps, strict=True):
        accepted = range(1, step.num_accepted + 1)
        assert chunk.depths == (*accepted, *[0] * (len(step.tokens) - len(accepted)))
        assert chunk.result is None
    result = known(last.result)
    assert (last.token_ids, last.depths, last.logprobs) == ((), (), ())
    assert sum(chunk.num_drafted for chunk in chunks) == result.stats.drafted_tokens
    assert "".join(chunk.text for chunk in (*chunks, last)) == result.text
    for chunk in (*chunks, last):
        assert "".join(piece.text for piece in chunk.pieces) == chunk.text
    if drafter == "parallelspec":
        assert max(depth for chunk in chunks for depth in chunk.depths) > 1


def test_each_character_has_the_depth_of_the_token_that_completed_it() -> None:
    """A target that can only write "é€" over and over: two and three tokens a character."""
    engine = make_engine("parallelspec", peak=50.0)
    loop = "é€".encode()
    table = engine.target.lend()[0].table_VV  # type: ignore[attr-defined]
    for i in range(len(loop)):
        table[loop[i - 2], loop[i - 1]] = loop[i]
    chunks = list(engine.chunks([*loop], max_new_tokens=12))
    # five bytes a round; the first token is the prompt's step, then four a step
    assert [chunk.depths for chunk in chunks] == [(0,), (1, 2, 3, 0), (1, 2, 3, 0), (1, 2, 0), ()]
    assert [chunk.pieces for chunk in chunks] == [
        (),
        (Piece("é", 1), Piece("€", 0)),
        (Piece("é", 2),),
        (Piece("€", 1), Piece("é", 0)),
        (),
    ]


def test_what_may_begin_a_stop_string_comes_with_the_last_chunk() -> None:
    free = engine_of().generate(PROMPT, max_new_tokens=20).text
    *_, last = engine_of().chunks(PROMPT, max_new_tokens=20, stop=free[-3:] + "\U0001f600")
    assert last.text == free[-3:]
    assert last.token_ids == ()
    assert known(last.result).text == free


def test_a_cancelled_answer_has_a_last_chunk_too() -> None:
    engine = engine_of()
    chunks = engine.chunks(PROMPT, max_new_tokens=40)
    first = next(chunks)
    engine.cancel()
    (last,) = chunks
    assert known(last.result).finish_reason == "cancelled"
    assert tuple(known(last.result).token_ids) == first.token_ids


def test_the_result_says_what_stopped_it_and_what_was_used() -> None:
    engine = engine_of()
    free = engine.generate(PROMPT, max_new_tokens=40)
    assert (free.finish_reason, free.stop) == ("length", None)
    text = free.text[9:12]
    for stops in (["never", text], [free.text[10:13], text]):  # the first to come is named
        result = engine.generate(PROMPT, max_new_tokens=40, stop=stops)
        assert (result.finish_reason, result.stop) == ("stop", text)
    token = free.token_ids[5]
    result = engine.generate(PROMPT, max_new_tokens=40, stop_token_ids=[token])
    assert (result.finish_reason, result.stop) == ("stop", token)
    usage = result.usage
    assert (usage.prompt_tokens, usage.reused_tokens) == (len(PROMPT), len(PROMPT) - 1)
    assert usage.completion_tokens == len(result.token_ids)
    assert usage.drafted_tokens == result.stats.drafted_tokens > 0


# ---- options ----


def test_params_are_taken_as_they_are() -> None:
    params = SamplingParams(max_new_tokens=7, temperature=0.9, seed=4)
    single = engine_of().generate(PROMPT, max_new_tokens=7, temperature=0.9, seed=4)
    engine = engine_of()
    assert engine.generate(PROMPT, params=params).token_ids == single.token_ids
    assert "".join(engine.stream(PROMPT, params=params, reuse=False)) == single.text
    assert engine.generate(PROMPT, params=None, max_new_tokens=2).finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"params": SamplingParams(), "seed": 1}, ValueError, "got params and seed, expected"),
        ({"params": {"seed": 1}}, ValueError, "expected SamplingParams"),
        ({"params": SamplingParams(), "sead": 1}, TypeError, "sead"),
        ({"timeout": 0}, ValueError, "got timeout 0, expected more than 0 or None"),
        ({"timeout": float("nan")}, ValueError, "got timeout nan"),
        ({"timeout": "1"}, ValueError, "got timeout '1'"),
        ({"timeout": True}, ValueError, "got timeout True"),
        ({"cancel": True}, ValueError, "got cancel True, expected an instance of Event or None"),
        ({"raw": "yes"}, ValueError, "got raw 'yes', expected"),
        ({"raw": None}, ValueError, "got raw None, expected"),
        ({"reuse": 0}, ValueError, "got reuse 0, expected"),
        ({"system": 3}, ValueError, "got system 3, expected"),
        ({"system": ["be brief"]}, ValueError, "got system .*, expected"),
        ({"logit_bias": {258: 1.0}}, ValueError, "got logit_bias for token 258, expected 0 to 257"),
        ({"temprature": 1.0}, TypeError, "got unknown option 'temprature', expected temperature"),
        ({"max_tokens": 4}, TypeError, "got unknown option 'max_tokens', expected max_new_tokens"),
        ({"system_prompt": "x"}, TypeError, "'system_prompt', expected system"),
        ({"colour": 1}, TypeError, "'colour', expected one of max_new_tokens, temperature"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    options: dict[str, Any], error: type[Exception], why: str
) -> None:
    engine = engine_of()
    for call in (engine.generate, engine.stream, engine.steps, engine.chunks):
        with pytest.raises(error, match=why) as caught:
            call([1, 2], **options)  # type: ignore[operator]
        assert getattr(caught.value, "param", None) in (None, *options)
    assert engine.target._backend.num_runs == 0  # type: ignore[attr-defined]
