"""AsyncEngine: order, cancellation, back-pressure, refusals, closing, and no thread left behind."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from gates import PATIENCE, GatedRuns, in_loop, wait_until
from small import known, raising
from toy_engine import engine_of, random_prompt

from spec_runtime import AsyncEngine, Chunk, GenerationResult, QueueFull
from spec_runtime.batch.batch import Batch
from spec_runtime.loop.call import Call
from spec_runtime.queue.admission import Admission
from spec_runtime.queue.async_engine import MAX_UNREAD
from spec_runtime.queue.engine_queue import MAX_COMPILING, EngineQueue, Job

PROMPTS = [random_prompt(seed) for seed in range(8)]


def answer_alone(prompt: list[int], **options: Any) -> GenerationResult:
    return engine_of().generate(prompt, **options)


@asynccontextmanager
async def gated(max_waiting: int = 64) -> AsyncIterator[tuple[AsyncEngine, GatedRuns]]:
    engine = engine_of()
    runs = GatedRuns(engine)
    async with AsyncEngine(engine, max_waiting) as shared:
        yield shared, runs


def ask(
    engine: AsyncEngine, number: int, max_new_tokens: int = 1
) -> asyncio.Task[GenerationResult]:
    """Asks in a task of its own."""
    return asyncio.create_task(engine.generate(PROMPTS[number], max_new_tokens=max_new_tokens))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    ours = {t for t in set(threading.enumerate()) - before if t.name.startswith("spec_runtime")}
    assert not ours


async def wait_for_run(runs: GatedRuns) -> None:
    """Waits for a run that waits, while the event loop goes on."""
    await asyncio.to_thread(runs.wait_for_run)


@in_loop
async def test_answers_are_those_of_the_engine() -> None:
    async with AsyncEngine(engine_of()) as engine:
        tasks = [engine.generate(prompt, max_new_tokens=20) for prompt in PROMPTS]
        results = await asyncio.gather(*tasks)
        chunks = [chunk async for chunk in engine.stream(PROMPTS[0], max_new_tokens=20)]
    alone = [answer_alone(prompt, max_new_tokens=20) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == [one.token_ids for one in alone]
    assert "".join(chunk.text for chunk in chunks) == alone[0].text
    assert [chunk.result is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert known(chunks[-1].result).token_ids == alone[0].token_ids


@in_loop
async def test_calls_are_answered_in_the_order_asked() -> None:
    done: list[int] = []
    async with gated() as (engine, runs):

        async def ask(number: int) -> None:
            if number % 2:
                await engine.generate(PROMPTS[number], max_new_tokens=3)
            else:
                async for _ in engine.stream(PROMPTS[number], max_new_tokens=3):
                    pass
            done.append(number)

        tasks = [asyncio.create_task(ask(number)) for number in range(6)]
        await wait_for_run(runs)
        assert engine.num_waiting == 5
        runs.let_through()
        await asyncio.gather(*tasks)
        assert engine.num_waiting == 0
    assert done == [0, 1, 2, 3, 4, 5]


@in_loop
async def test_the_calls_of_a_request_are_answered_before_the_next_request() -> None:
    engine = engine_of()
    queue = EngineQueue(Batch(engine), Admission(max_waiting=1))
    ended: list[int] = []  # the lengths of the answers

    def note(number: int, chunk: Chunk) -> None:
        if chunk.result is not None:
            ended.append(len(chunk.result.token_ids))

    def ask_twice(length: int) -> Job:
        def prepare() -> list[Call]:
            lengths = (length, length + 1)
            return [engine.prepare(PROMPTS[0], max_new_tokens=each) for each in lengths]

        return queue.ask(prepare, on_chunk=note)

    jobs = [ask_twice(3), ask_twice(7)]
    for job in jobs:
        assert {number async for number, _ in job} == {0, 1}
        job.leave()
    assert ended == [3, 4, 7, 8]
    assert queue.admission.num_requests == 0
    await queue.close()


@pytest.mark.parametrize("is_stream", [False, True])
@in_loop
async def test_a_cancelled_task_ends_its_call_at_the_next_step(is_stream: bool) -> None:
    async with gated() as (engine, runs):

        async def read() -> None:
            if is_stream:
                async for _ in engine.stream(PROMPTS[0], max_new_tokens=100):
                    pass
            else:
                await engine.generate(PROMPTS[0], max_new_tokens=100)

        task = asyncio.create_task(read())
        await wait_for_run(runs)
        runs.let_through(1)
        await wait_for_run(runs)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        runs.let_through()
        result = await engine.generate(PROMPTS[1], max_new_tokens=1)
        assert result.finish_reason == "length"
    # two runs of the first call, and the prompt of the second
    assert runs.num_runs == 3


@in_loop
async def test_a_reader_that_goes_away_ends_its_call() -> None:
    async with AsyncEngine(engine_of()) as engine:
        async with aclosing(engine.stream(PROMPTS[0], max_new_tokens=150)) as stream:
            async for _ in stream:
                break
        result = await engine.generate(PROMPTS[1], max_new_tokens=5)
        assert result.token_ids == answer_alone(PROMPTS[1], max_new_tokens=5).token_ids
        async for _ in engine.stream(PROMPTS[0], max_new_tokens=150):
            break  # the event loop closes it
        result = await engine.generate(PROMPTS[1], max_new_tokens=5)
        assert result.finish_reason == "length"


@in_loop
async def test_a_call_cancelled_while_it_waits_never_runs() -> None:
    async with gated() as (engine, runs):
        first = ask(engine, 0)
        await wait_for_run(runs)
        second = ask(engine, 1, 50)
        third = ask(engine, 2)
        while engine.num_waiting < 2:
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        runs.let_through()
        assert [(await task).finish_reason for task in (first, third)] == ["length", "length"]
    assert runs.num_runs == 2


@in_loop
async def test_a_slow_reader_holds_the_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sync_engine = engine_of()
    backend: Any = sync_engine.target.lend()[0]
    num_steps, run, held_back = 0, backend.run, threading.Event()

    def counted(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == MAX_UNREAD + 1:  # the reader has one, and leaves the others
            held_back.set()
        return run(*arguments)

    monkeypatch.setattr(backend, "run", counted)
    async with AsyncEngine(sync_engine) as engine:
        async with aclosing(engine.stream(PROMPTS[0], max_new_tokens=100)) as stream:
            chunks = [await anext(stream)]
            assert await asyncio.to_thread(held_back.wait, PATIENCE)
            # nothing more comes however long it is not read: another call does not get through
            waiting = ask(engine, 1)
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert (len(done), num_steps) == (0, MAX_UNREAD + 1)
            chunks += [chunk async for chunk in stream]
        assert (await waiting).finish_reason == "length"
        result = known(chunks[-1].result)
        assert len(result.token_ids) == 100
        assert "".join(chunk.text for chunk in chunks) == result.text


@in_loop
async def test_a_timeout_ends_the_call_of_a_reader_that_is_too_slow() -> None:
    async with AsyncEngine(engine_of()) as engine:
        slow = engine.stream(PROMPTS[0], max_new_tokens=150, timeout=0.5)
        await anext(slow)
        result = await engine.generate(PROMPTS[1], max_new_tokens=5)  # waits for that one
        assert result.finish_reason == "length"
        rest = [chunk async for chunk in slow]
        assert len(rest) <= MAX_UNREAD + 1
        assert known(rest[-1].result).finish_reason == "timeout"


@in_loop
async def test_too_many_calls_are_refused() -> None:
    async with gated(max_waiting=2) as (engine, runs):
        tasks = [ask(engine, number) for number in range(3)]
        await wait_for_run(runs)
        with pytest.raises(QueueFull, match="2 requests are waiting, the most"):
            await engine.generate(PROMPTS[3])
        with pytest.raises(QueueFull):
            await anext(engine.stream(PROMPTS[3]))
        runs.let_through()
        assert len(await asyncio.gather(*tasks)) == 3
        assert (await engine.generate(PROMPTS[3], max_new_tokens=1)).token_ids


@in_loop
async def test_errors_reach_the_caller_whose_they_are() -> None:
    async with gated() as (engine, runs):
        first = ask(engine, 0)
        await wait_for_run(runs)
        # arguments are refused before the call's turn comes
        with pytest.raises(ValueError, match="got token ids from 999 to 999"):
            await engine.generate([999])
        with pytest.raises(TypeError, match="temprature"):
            await engine.generate([1], temprature=1)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="got timeout -1"):
            await anext(engine.stream([1], timeout=-1))
        runs.let_through()
        assert (await first).token_ids

        backend: Any = engine.engine.target.lend()[0]
        whole = backend.run

        backend.run = raising(FloatingPointError("broken"))
        for call in (engine.generate(PROMPTS[0]), anext(engine.stream(PROMPTS[0]))):
            with pytest.raises(FloatingPointError, match="broken"):
                await call
        backend.run = whole
        result = await engine.generate(PROMPTS[0], max_new_tokens=9)
        assert result.token_ids == answer_alone(PROMPTS[0], max_new_tokens=9).token_ids


@in_loop
async def test_closing_ends_what_runs_and_refuses_what_waits() -> None:
    sync_engine = engine_of()
    runs = GatedRuns(sync_engine)
    engine = AsyncEngine(sync_engine)
    chunks: list[Chunk] = []

    async def read() -> None:
        chunks.extend([chunk async for chunk in engine.stream(PROMPTS[0], max_new_tokens=99)])

    running = asyncio.create_task(read())
    await wait_for_run(runs)
    waiting = [asyncio.create_task(engine.generate(prompt)) for prompt in PROMPTS[1:4]]
    while engine.num_waiting < 3:
        await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    for task in waiting:
        with pytest.raises(RuntimeError, match="was closed before the call's turn came"):
            await task
    runs.let_through()
    await closing
    await running
    assert known(chunks[-1].result).finish_reason == "cancelled"
    assert runs.num_runs == 1
    await engine.close()  # again
    with pytest.raises(RuntimeError, match="this engine is closed"):
        await engine.generate(PROMPTS[0])
    with pytest.raises(RuntimeError, match="this engine is closed"):
        sync_engine.generate(PROMPTS[0])


@in_loop
async def test_closing_ends_a_call_that_is_being_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    sync_engine = engine_of()
    make_call = sync_engine.make_call
    has_begun, may_end = threading.Event(), threading.Event()

    def prepare_later(*arguments: Any, **options: Any) -> Call:
        has_begun.set()
        assert may_end.wait(PATIENCE)
        return make_call(*arguments, **options)

    monkeypatch.setattr(sync_engine, "make_call", prepare_later)
    engine = AsyncEngine(sync_engine)
    task = ask(engine, 0, 50)
    await asyncio.to_thread(has_begun.wait, PATIENCE)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(RuntimeError, match="was closed before the call's turn came"):
        await task
    await closing


@in_loop
async def test_an_event_of_the_caller_ends_the_call() -> None:
    event = threading.Event()
    async with AsyncEngine(engine_of()) as engine:
        stream = engine.stream(PROMPTS[0], max_new_tokens=150, cancel=event)
        await anext(stream)
        event.set()
        rest = [chunk async for chunk in stream]
        assert known(rest[-1].result).finish_reason == "cancelled"
        # a reader that goes away leaves the caller's event alone
        other = threading.Event()
        stream = engine.stream(PROMPTS[0], max_new_tokens=150, cancel=other)
        await anext(stream)
        await stream.aclose()
        assert not other.is_set()


def test_event_loops_share_an_engine() -> None:
    """The second call waits, in its own loop and thread, for the first loop's."""
    sync_engine = engine_of()
    runs = GatedRuns(sync_engine)
    engine = AsyncEngine(sync_engine)
    found: dict[int, list[int]] = {}

    @in_loop
    async def work(number: int) -> None:
        found[number] = (await engine.generate(PROMPTS[number], max_new_tokens=9)).token_ids

    threads = [threading.Thread(target=work, args=[number]) for number in range(2)]
    threads[0].start()
    runs.wait_for_run()
    threads[1].start()
    runs.let_through()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {n: answer_alone(PROMPTS[n], max_new_tokens=9).token_ids for n in range(2)}
    asyncio.run(engine.close())


def test_a_loop_that_is_gone_ends_its_calls() -> None:
    """A loop that was closed without its streams: the calls of others go on."""
    engine = AsyncEngine(engine_of())
    loop = asyncio.new_event_loop()
    stream: AsyncGenerator[Chunk, None] = engine.stream(PROMPTS[0], max_new_tokens=150)
    loop.run_until_complete(anext(stream))
    loop.close()

    @in_loop
    async def ask_again() -> None:
        async with engine:
            result = await engine.generate(PROMPTS[1], max_new_tokens=5)
            assert result.finish_reason == "length"

    ask_again()


def test_a_bound_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="got max_waiting -1, expected 0 or more"):
        AsyncEngine(engine_of(), max_waiting=-1)


@in_loop
async def test_no_event_loop_waits_for_a_lane_to_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further request is taken at once, and counts as unanswered until the lane is there."""
    begun, may_end = threading.Event(), threading.Event()
    batch_begin = Batch.begin

    def begin_late(batch: Batch, *arguments: Any) -> None:
        begun.set()
        assert may_end.wait(PATIENCE)
        batch_begin(batch, *arguments)

    monkeypatch.setattr(Batch, "begin", begin_late)
    async with AsyncEngine(engine_of()) as engine:
        assert engine._queue.seconds_unanswered == 0
        first = ask(engine, 0)
        await asyncio.to_thread(begun.wait, PATIENCE)
        second = ask(engine, 1)
        await asyncio.sleep(0)  # the second task puts its request in
        assert engine.num_waiting == 1
        before = engine._queue.seconds_unanswered
        await asyncio.sleep(0.01)
        assert engine._queue.seconds_unanswered > before > 0
        may_end.set()
        assert (await first).token_ids == answer_alone(PROMPTS[0], max_new_tokens=1).token_ids
        assert (await second).token_ids == answer_alone(PROMPTS[1], max_new_tokens=1).token_ids
        assert engine._queue.seconds_unanswered == 0


@in_loop
async def test_grammars_of_requests_that_are_gone_take_few_threads() -> None:
    """Those that compile end by themselves, and the others never begin."""
    num_compiled, may_end = Counter[int](), threading.Event()
    engine = engine_of()
    async with AsyncEngine(engine, max_waiting=64) as shared:

        def prepare(number: int) -> list[Call]:
            call = engine.make_call(PROMPTS[0], max_new_tokens=1)

            def compile_late(interruption: Any) -> Any:
                num_compiled[number] += 1
                assert may_end.wait(PATIENCE)

            call._compile_grammar = compile_late
            return [call]

        jobs = [shared._queue.ask(partial(prepare, number)) for number in range(3 * MAX_COMPILING)]
        await asyncio.to_thread(wait_until, lambda: len(num_compiled) == MAX_COMPILING)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("spec_runtime.compile") for name in names) == MAX_COMPILING
        for job in jobs:
            job.leave()
        assert shared.num_waiting == 0
        alone = answer_alone(PROMPTS[1], max_new_tokens=1)
        assert (await shared.generate(PROMPTS[1], max_new_tokens=1)).token_ids == alone.token_ids
        may_end.set()
    assert sorted(num_compiled) == list(range(MAX_COMPILING))
