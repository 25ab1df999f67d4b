"""Lanes without graphs: who gets one, what they share, and what ends only its own call."""

import asyncio
import inspect
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from gates import PATIENCE, GatedRuns, in_loop, wait_until
from small import ToyOpener, known, raising, toy_engine
from small_trees import budget_of
from toy_engine import DRAFTERS, keeping, make_engine, random_prompt

from spec_runtime import AsyncEngine, Engine, Session, UserError
from spec_runtime.backends import GraphRun, run_each
from spec_runtime.batch.batch import MIN_CHUNK, MIN_SHARED, Batch, Pass, _shares
from spec_runtime.interruption import Interrupted
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.loop.target import PREFILL_ROWS, Asked, Wants, verify_together
from spec_runtime.pace.pacer import FIRST_PAUSE, LONGEST_PAUSE, MOST_CREDIT, WEIGHT, Pacer, Pause
from spec_runtime.pace.shared import EXPLORING, LEARNT_PASSES, SHARED_ROWS, TRIAL, Line, SharedPace
from spec_runtime.queue.async_engine import MAX_UNREAD
from spec_runtime.queue.engine_queue import Job
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree

PROMPTS = [f"{'ab' * n} say" for n in range(1, 9)]


def results_of(batch: Batch, calls: Sequence[Any]) -> list[GenerationResult]:
    results = {n: chunk.result for n, chunk in batch.answer(calls) if chunk.result is not None}
    return [results[n] for n in range(len(calls))]


def begin(batch: Batch, calls: Sequence[Any]) -> Batch:
    """Begins each call on a lane of its own."""
    for number, call in enumerate(calls):
        batch.begin(known(batch.lane_for(call)), number, call)
    return batch


# ----------------------------------------------------------------------------- what is answered


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}])
def test_lanes_answer_as_one_engine_does(drafter: str, options: dict[str, Any]) -> None:
    alone = toy_engine(drafter)
    expected = [alone.generate(each, max_new_tokens=30, **options).token_ids for each in PROMPTS]
    for parallel in (1, 2, 3, 16):
        engine = toy_engine(drafter)
        many = engine.generate_many(PROMPTS, parallel, max_new_tokens=30, **options)
        assert [each.token_ids for each in many] == expected
        assert engine.num_lanes == min(parallel, len(PROMPTS)) - 1


def test_engines_without_a_bundle_have_one_lane() -> None:
    engine = make_engine("prompt_lookup")
    assert results_of(Batch(engine), [engine.prepare("abc", max_new_tokens=4)])
    with pytest.raises(UserError, match="one lane only"):
        Batch(engine, 2)
    for parallel in (0, -1):
        with pytest.raises(UserError, match=f"got parallel {parallel}, expected 1 or more"):
            Batch(toy_engine(), parallel)


def test_rules_that_accept_by_the_tree_have_whole_trees() -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": 1}
    for acceptance in ("rejection", "typical"):
        options["acceptance"] = acceptance
        engine = toy_engine("prompt_lookup")
        expected = [toy_engine("prompt_lookup").generate(p, **options).token_ids for p in PROMPTS]
        many = engine.generate_many(PROMPTS, 8, **options)
        assert [each.token_ids for each in many] == expected


@pytest.mark.parametrize(
    ("is_exact", "options", "are_cut"),
    [
        (True, {}, True),
        (True, {"temperature": 0.8, "seed": 1}, True),
        (False, {"temperature": 0.8}, True),
        (False, {"temperature": 0.8, "seed": 1}, False),
        (True, {"temperature": 0.8, "acceptance": "rejection"}, False),
        (True, {"temperature": 0.8, "acceptance": "typical"}, False),
        (True, {"acceptance": "typical"}, True),  # which is greedy
    ],
)
def test_trees_and_chunks_stay_whole_where_tokens_may_depend_on_their_size(
    is_exact: bool, options: dict[str, Any], are_cut: bool
) -> None:
    engine = toy_engine("prompt_lookup")
    engine.target.has_exact_rows = is_exact
    batch, pause = Batch(engine, 2), Pause()
    batch._pace.first_pause = lambda num_requests: pause  # type: ignore[method-assign]
    batch.begin(batch._lanes[0], None, engine.prepare(PROMPTS[0], **options))
    batch.turn()
    lane = batch._lanes[0]
    assert lane.cuts_trees == are_cut
    assert lane.pacer.begins_with is (pause if are_cut else None)
    lane.limit(4, 1, is_shared=True)
    most = lane.decoding.max_rows, lane.decoding.chunk_rows
    assert most == ((4, 1) if are_cut else (PREFILL_ROWS, PREFILL_ROWS))
    batch.close()


@pytest.mark.parametrize("failing", ["propose", "pass", "read"])
def test_an_error_ends_its_own_call_only(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine("prompt_lookup")
    batch = Batch(engine, 3)
    expected = [engine.generate(prompt, max_new_tokens=20).token_ids for prompt in PROMPTS[:3]]
    calls = [engine.prepare(prompt, max_new_tokens=20) for prompt in PROMPTS[:3]]
    begin(batch, calls)

    fail = raising(ValueError("it broke"))
    victim: Any = engine.lane(1)
    if failing == "propose":
        monkeypatch.setattr(victim.proposer, "drafting", fail)
    elif failing == "read":
        monkeypatch.setattr(batch._lanes[1], "read", fail)
    else:
        monkeypatch.setattr(victim.target.lend()[0], "run", fail)
    found: dict[int, Any] = {}
    for _ in range(30):
        turned: list[Any] = []
        batch.turn(turned.append)
        for number, each in turned:
            if isinstance(each, Exception):
                found[number] = str(each)
            elif each.result is not None:
                found[number] = each.result.token_ids
    assert found == {0: expected[0], 1: "it broke", 2: expected[2]}
    assert batch.num_active == 0
    monkeypatch.undo()
    many = engine.generate_many(PROMPTS[:3], 3, max_new_tokens=20)
    assert [each.token_ids for each in many] == expected


def test_closing_and_cancelling_an_engine_reach_its_lanes() -> None:
    engine = toy_engine()
    lanes = [engine.lane(number) for number in range(3)]
    answers = Batch(engine, 3).answer([engine.prepare(p, max_new_tokens=200) for p in PROMPTS[:3]])
    begun = {next(answers)[0] for _ in range(9)}
    assert begun == {0, 1, 2}
    engine.cancel()
    reasons = {n: each.result.finish_reason for n, each in answers if each.result is not None}
    assert reasons == dict.fromkeys(range(3), "cancelled")
    engine.close()
    for lane in lanes:
        with pytest.raises(RuntimeError, match="this engine is closed"):
            lane.generate("abc")


@pytest.mark.parametrize("way", ["generate", "stream", "chunks", "session", "batch"])
def test_a_pass_is_run_below_few_generators(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that waits for a pass is handed on by two others at most."""
    engine = toy_engine("prompt_lookup")
    backend: Any = engine.target.lend()[0]
    run, numbers = backend.run, set[int]()

    def count_generators(*arguments: Any) -> Any:
        frame, number = sys._getframe(), 0
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            is_ours = "spec_runtime" in frame.f_code.co_filename
            number += is_ours and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        numbers.add(number)
        return run(*arguments)

    monkeypatch.setattr(backend, "run", count_generators)
    ways: dict[str, Callable[[], Any]] = {
        "generate": lambda: engine.generate(PROMPTS[0], max_new_tokens=9),
        "stream": lambda: list(engine.stream(PROMPTS[0], max_new_tokens=9)),
        "chunks": lambda: list(engine.chunks(PROMPTS[0], max_new_tokens=9)),
        "session": lambda: list(Session(engine).stream(PROMPTS[0], max_new_tokens=9)),
        "batch": lambda: engine.generate_many(PROMPTS, 2, max_new_tokens=9),
    }
    ways[way]()
    assert numbers == {{"generate": 0, "session": 3}.get(way, 1)}


def test_closing_an_engine_waits_for_no_batch_between_two_turns() -> None:
    engine = toy_engine()
    batch = begin(Batch(engine, 2), [engine.prepare(p, max_new_tokens=30) for p in PROMPTS[:2]])
    found: list[Any] = []
    batch.turn(found.append)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    batch.turn(found.append)
    reasons = [chunk.result.finish_reason for _, chunk in found if chunk.result]
    assert (reasons, batch.num_active) == (["cancelled"] * 2, 0)


# ------------------------------------------------------------------------------ who gets a lane


def test_a_conversation_goes_on_where_its_rows_are() -> None:
    engine = keeping("parallelspec", kept_bytes=0)
    batch = Batch(engine, 2)
    talks = [random_prompt(seed, length=60) for seed in (1, 2)]
    for turn in range(3):
        order = [0, 1] if turn % 2 else [1, 0]
        calls = [engine.prepare(talks[k], max_new_tokens=8) for k in order]
        for k, result in zip(order, results_of(batch, calls), strict=True):
            alone = keeping("parallelspec", kept_bytes=0).generate(talks[k], max_new_tokens=8)
            assert result.token_ids == alone.token_ids
            assert (result.usage.reused_tokens > 50) == (turn > 0)
            talks[k] = [*talks[k], *result.token_ids, *random_prompt(turn, length=4)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}])
def test_a_prompt_that_another_lane_reads_is_copied(drafter: str, options: dict[str, Any]) -> None:
    """Only the first of these reads the prompt; the others copy its rows while it goes on."""
    engine = keeping(drafter, kept_bytes=0)
    prompt = random_prompt(3, length=90)
    lengths = (30, 20, 25)
    calls = [engine.prepare(prompt, max_new_tokens=each, **options) for each in lengths]
    results = results_of(Batch(engine, 3), calls)
    reused = [result.usage.reused_tokens for result in results]
    assert reused == [0, len(prompt) - 1, len(prompt) - 1]
    for length, result in zip(lengths, results, strict=True):
        alone = keeping(drafter, kept_bytes=0).generate(prompt, max_new_tokens=length, **options)
        assert result.token_ids == alone.token_ids


@pytest.mark.parametrize(("num_lanes", "kept_bytes"), [(3, 0), (1, 1 << 20)])
def test_a_conversation_outlives_others_that_begin_alike(num_lanes: int, kept_bytes: int) -> None:
    """Other requests with the same system prompt go to idle lanes, and when there is none those
    that are short and old give way first."""
    engine = keeping("parallelspec", kept_bytes=kept_bytes)
    batch = Batch(engine, num_lanes)
    system = random_prompt(0, length=60)
    talk = [*system, *random_prompt(1, length=300)]
    calls = [engine.prepare(each, max_new_tokens=5) for each in (talk, *"ab"[: num_lanes - 1])]
    talk += results_of(batch, calls)[0].token_ids
    for seed in range(6):
        other = engine.prepare([*system, *random_prompt(9 + seed, length=60)], max_new_tokens=5)
        (result,) = results_of(batch, [other])
        assert result.usage.reused_tokens == len(system) - 1
    again = engine.prepare([*talk, *random_prompt(2, length=9)], max_new_tokens=5)
    (result,) = results_of(batch, [again])
    assert result.usage.reused_tokens >= len(talk) - 2


def test_conversations_that_nobody_goes_on_with_give_way() -> None:
    engine = keeping("parallelspec", kept_bytes=0)
    batch = Batch(engine, 2)
    long = [random_prompt(seed, length=300) for seed in (1, 2)]
    results_of(batch, [engine.prepare(each, max_new_tokens=5) for each in long])
    for turn in range(12):
        talk = random_prompt(3 + turn, length=60)
        results_of(batch, [engine.prepare(talk, max_new_tokens=5)])
    held = sorted(len(lane.engine.conversations._held) for lane in batch._lanes)
    assert held[-1] < 300, "sooner or later both are older than they are long"


def test_rows_are_not_copied_where_a_call_forbids_it() -> None:
    engine = keeping("none", kept_bytes=0)
    prompt = random_prompt(3, length=90)
    calls = [engine.prepare(prompt, max_new_tokens=9, reuse=False) for _ in range(3)]
    results = results_of(Batch(engine, 3), calls)
    assert [result.usage.reused_tokens for result in results] == [0, 0, 0]


def test_lanes_share_what_is_kept_of_conversations() -> None:
    """What one lane answered can be saved, and go on in another lane."""
    engine = keeping("parallelspec", kept_bytes=1 << 20)
    batch = Batch(engine, 2)
    talks = [random_prompt(seed, length=60) for seed in range(4)]
    calls = [engine.prepare(talk, max_new_tokens=5) for talk in talks]
    results_of(batch, calls)
    again = [engine.prepare(talk, max_new_tokens=5) for talk in talks]
    assert [each.usage.reused_tokens for each in results_of(batch, again)] == [59] * 4


def test_a_lane_whose_target_others_use_is_left_to_them() -> None:
    engine = toy_engine()
    expected = [engine.generate(prompt, max_new_tokens=5).token_ids for prompt in PROMPTS]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.target.lock.hold():
            held.set()
            assert done.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    batch = Batch(engine, 3)
    assert batch.lane_for(engine.prepare(PROMPTS[0])) is batch._lanes[1]
    assert Batch(engine).lane_for(engine.prepare(PROMPTS[0])) is not None  # which will wait
    done.set()
    thread.join()
    calls = [engine.prepare(prompt, max_new_tokens=5) for prompt in PROMPTS]
    batch.begin(batch._lanes[1], 0, calls[0])
    with engine.target.lock.hold():  # by this thread: lane 0 counts as free
        assert batch.lane_for(calls[1]) is batch._lanes[0]
    batch.close()
    assert [each.token_ids for each in results_of(batch, calls)] == expected


@in_loop
async def test_a_slow_reader_holds_its_own_lane_only() -> None:
    async with AsyncEngine(toy_engine(), parallel=2) as engine:
        slow = engine.stream(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
        chunks = [await anext(slow)]
        for prompt in PROMPTS[1:5]:  # one after the other on the lane that is left
            result = await engine.generate(prompt, max_new_tokens=20)
            assert result.token_ids == toy_engine().generate(prompt, max_new_tokens=20).token_ids
        chunks += [chunk async for chunk in slow]
    alone = toy_engine().generate(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    assert known(chunks[-1].result).token_ids == alone.token_ids
    assert len(chunks) > MAX_UNREAD + 2


@in_loop
async def test_a_request_of_many_calls_leaves_lanes_to_others() -> None:
    """Of two lanes, the second request gets the first that is free, though four calls of the first
    request came before."""
    engine = toy_engine()
    async with AsyncEngine(engine, parallel=2) as shared:
        queue, ended = shared._queue, list[str]()
        runs = GatedRuns(engine)

        def ask(name: str, prompts: list[str]) -> Job:
            def note(number: int, chunk: Chunk) -> None:
                if chunk.result is not None:
                    ended.append(name)

            calls = [engine.prepare(prompt, max_new_tokens=6) for prompt in prompts]
            return queue.ask(lambda: calls, on_chunk=note)

        many = ask("many", PROMPTS[:6])
        await asyncio.to_thread(runs.wait_for_run)
        single = ask("single", PROMPTS[7:])
        await asyncio.to_thread(wait_until, lambda: len(queue._prepared) == 2)
        runs.let_through()
        for job, numbers in ((many, range(6)), (single, range(1))):
            assert {number async for number, _ in job} == set(numbers)
            job.leave()
    assert ended.index("single") <= 3


@in_loop
async def test_random_joins_and_leaves_change_no_answer() -> None:
    engine = toy_engine("prompt_lookup")
    rng = random.Random(1)
    alone = toy_engine("prompt_lookup")

    async def ask(number: int) -> None:
        prompt, length = rng.choice(PROMPTS), rng.choice([1, 4, 30, 60])
        options: dict[str, Any] = {"max_new_tokens": length}
        if number % 3 == 0:
            options |= {"temperature": 0.8, "seed": number}
        expected = alone.generate(prompt, **options)
        await asyncio.sleep(rng.random() * 0.05)
        stream = shared.stream(prompt, **options)
        tokens: list[int] = []
        async for chunk in stream:
            tokens += chunk.token_ids
            if number % 5 == 1 and len(tokens) > 3:
                await stream.aclose()
                return
            if number % 7 == 2:
                await asyncio.sleep(0.002)
        assert tokens == expected.token_ids, number

    async with AsyncEngine(engine, parallel=3) as shared:
        await asyncio.gather(*(ask(number) for number in range(60)))
        assert shared.num_waiting == 0


# ------------------------------------------------------------------------- what a pass carries


def test_the_first_prompt_gets_half_of_a_chunk() -> None:
    assert _shares(64, [100, 100, 100]) == [32, 16, 16]
    assert _shares(64, [10, 100]) == [10, 54]
    assert _shares(64, [100]) == [64]
    assert _shares(2, [9, 9, 9]) == [3, 3, 3]  # each goes on


def test_prompts_with_passes_of_their_own_are_read_one_after_another() -> None:
    """A pass costs hardly less for a part of a short prompt than for the whole."""
    assert _shares(64, [100, 27, 30, 5], is_shared=False) == [32, 27, 0, 5]
    assert _shares(64, [20, 20, 20, 20], is_shared=False) == [20, 20, 20, 0]
    assert _shares(2, [9, 9], is_shared=False) == [3, 0]  # one goes on


def test_a_line_is_fitted_to_the_passes_seen() -> None:
    line = Line()
    for rows in (4, 8, 16) * 60:
        line.add(rows, 0.01 + 0.002 * rows)
    assert line.seconds(np.array([0, 10])) == pytest.approx([0.01, 0.03], rel=0.02)
    for _ in range(300):  # no rows but these: the slope stays, and the level follows
        line.add(8, 0.05)
    low, high = line.seconds(np.array([8, 18]))
    assert low == pytest.approx(0.05, rel=0.02)
    assert 0.015 < high - low < 0.035
    line.add(8, 99.0)
    assert line.seconds(8) < 0.06


def learnt(base: float, slope: float, num_requests: int) -> SharedPace:
    """Returns a pace that knows these costs."""
    pace = SharedPace()
    for i in range(LEARNT_PASSES + EXPLORING + 1):
        rows = num_requests * (1 + i % 3)
        pace.add(num_requests, rows, base + slope * rows)
    return pace


WORTHS = [np.array(each) for each in ((0.9, 0.6, 0.05), (0.3, 0.1), ())]
HOST = 0.001  # seconds of a step that drafts, at first


@pytest.mark.parametrize(
    ("base", "slope", "rows", "seconds"),
    [
        (0.1, 0.02, 0, 0.0),
        (0.1, 0.02, 0, 0.05),  # a prompt's rows make each committed token dearer, and nodes cheaper
        (0.1, 0.02, 4, 0.0),  # rows of trees that are not cut do so too
        (0.002, 0.0012, 0, 0.0),  # where the host's seconds decide
        (0.1, 0.0, 0, 0.0),
        (0.0, 0.1, 0, 0.0),
    ],
)
def test_nodes_go_where_they_are_likeliest_to_be_accepted(
    base: float, slope: float, rows: int, seconds: float
) -> None:
    falling = [0.9, 0.6, 0.3, 0.1, 0.05]

    def rate(k: int) -> float:
        pass_seconds = base + slope * (rows + 3 + k)
        return (3 + sum(falling[:k])) / (pass_seconds + seconds + 3 * HOST)

    best = max(range(6), key=rate)
    kept = falling[:best]
    expected = [1 + sum(p in kept for p in each) for each in WORTHS]
    assert learnt(base, slope, 3).sizes(WORTHS, 3, rows, seconds) == expected


def test_the_seconds_of_the_host_count() -> None:
    """By the passes alone no node pays; what the host takes besides makes a token dearer."""
    worths = [np.array([0.6])] * 2
    assert learnt(0.0, 0.001, 2).sizes(worths, 2, 0, 0.0) == [2, 2]
    pace = learnt(0.0, 0.001, 2)
    pace._host_seconds[True] = 0.0
    assert pace.sizes(worths, 2, 0, 0.0) == [1, 1]


def test_costs_are_learnt_from_trees_of_several_sizes() -> None:
    pace, seen = SharedPace(), set()
    for _ in range(LEARNT_PASSES):
        sizes = pace.sizes([np.array([0.5, 0.4, 0.3])] * 2, 2, 0, 0.0)
        seen.add(tuple(sizes))
        pace.add(2, sum(sizes), 0.01)
    assert seen == {(4, 4), (2, 2), (1, 1)}


def test_other_numbers_of_lanes_begin_with_what_rows_cost() -> None:
    pace = SharedPace()
    for n in range(4 * LEARNT_PASSES):
        rows = 2 + n % 5
        pace.add(2, rows, 0.01 + 0.001 * rows)
    pace.add(3, 3, 5.0)  # which opens the graph
    line = pace.line(3)
    assert line.num_seen >= LEARNT_PASSES
    assert line.seconds(9) - line.seconds(3) == pytest.approx(0.006, rel=0.1)
    pace.add(3, 3, 0.03)
    assert pace.line(2).seconds(3) == pytest.approx(0.013, rel=0.1), "it is a copy"


class Drafted(Pacer):
    """A pacer whose drafter ran in the last step."""

    has_drafted = True

    def __init__(self) -> None:
        super().__init__(PlainProposer())
        self.pause = Pause(MOST_CREDIT)


def test_a_draft_costs_what_all_would_have_committed_in_its_time() -> None:
    """Two requests, whose passes take 10 ms and 5 ms a row: in the seconds of three nodes, and
    those that the host takes for the draft, two tokens come a plain pass."""
    pace, pacer = learnt(0.01, 0.005, 2), Drafted()
    pace.judge(pacer, 2, 3, 1, HOST)
    plain = 2 / (0.01 + 2 * 0.005 + 2 * 0.0003)
    won = 1 - plain * (HOST - 0.0003 + 3 * 0.005)
    assert pacer.pause.credit == pytest.approx(MOST_CREDIT + won, rel=0.01)
    faster = Drafted()
    pace.add_cycle(160, 0.1)  # a sixteenth of which counts
    pace.judge(faster, 2, 3, 1, HOST)
    assert faster.pause.credit == pytest.approx(pacer.pause.credit, rel=0.01)
    for _ in range(99):
        pace.add_cycle(160, 0.1)  # drafts make them faster than plain decoding
    pace.judge(faster, 2, 3, 1, HOST)
    assert faster.pause.credit < 2 * pacer.pause.credit - MOST_CREDIT - 1


def test_a_lane_pauses_while_its_drafts_do_not_pay() -> None:
    pace, pacer = learnt(0.01, 0.005, 2), Drafted()
    steps = 0
    while not pacer.is_paused:
        pace.judge(pacer, 2, 3, 0, HOST)
        steps += 1
    assert steps == 4, "1.5 tokens a step, and 6 may be lost"
    assert pacer.pause.left >= FIRST_PAUSE


def test_a_call_begins_with_what_other_lanes_drafts_have_won() -> None:
    pace = learnt(0.01, 0.005, 2)
    assert pace.first_pause(2) is None  # nothing is known
    for accepted, left in ((0, LONGEST_PAUSE), (9, 0)):
        for _ in range(200):
            pace.judge(Drafted(), 2, 3, accepted, HOST)
        pauses = [pace.first_pause(2) for _ in range(TRIAL)]
        assert pauses.count(None) == 1, "one tries, whatever became of the others"
        assert {each.left for each in pauses if each is not None} == {left}
    before = pace._won[2]
    pace.judge(Drafted(), 2, 3, 0, HOST)  # half a pass of theirs, and 9 tokens less
    assert pace._won[2] - before == pytest.approx(-9 * WEIGHT / 2, rel=0.05)


def test_a_request_whose_tokens_depend_on_its_trees_is_paced_by_itself() -> None:
    """Where rows are not exact, a seed promises the same tokens by the same trees."""
    engine = toy_engine("prompt_lookup")
    batch = Batch(engine, 2)
    options: Any = ({"temperature": 0.8, "seed": 1}, {})
    for lane in batch._lanes:
        lane.engine.target.has_exact_rows = False
    judged: list[bool] = []
    batch._pace.judge = lambda pacer, *step: judged.append(pacer.is_shared)  # type: ignore[method-assign]
    calls = [engine.prepare(PROMPTS[n], max_new_tokens=40, **options[n]) for n in (0, 1)]
    begin(batch, calls)
    for _ in range(4):
        batch.turn()
    assert [lane.pacer.is_shared for lane in batch._order] == [False, True]
    assert set(judged) == {True}
    batch.close()


def test_a_call_that_is_alone_is_paced_by_itself_after_its_first_pause() -> None:
    batch, pause = Batch(toy_engine("prompt_lookup"), 2), Pause()
    batch._pace.first_pause = lambda num_requests: pause  # type: ignore[method-assign]
    cycles: list[int] = []
    batch._pace.add_cycle = lambda num_tokens, seconds: cycles.append(num_tokens)  # type: ignore[method-assign]
    lane = batch._lanes[0]
    batch.begin(lane, None, lane.engine.prepare(PROMPTS[0]))
    for _ in range(3):
        batch.turn()
    assert not cycles, "what it commits is no rate of requests that share passes"
    assert lane.pacer.begins_with is pause
    assert not lane.pacer.is_shared
    batch.close()


def test_passes_are_reported() -> None:
    engine = toy_engine("prompt_lookup")
    batch, passes = Batch(engine, 3), list[Pass]()
    batch.on_pass = passes.append
    calls = [engine.prepare(prompt, max_new_tokens=40) for prompt in PROMPTS[:3]]
    results = results_of(batch, calls)
    assert sum(each.prompt_rows for each in passes) == sum(len(call.prompt) for call in calls)
    assert sum(each.granted for each in passes) == sum(r.stats.drafted_tokens for r in results)
    assert all(each.granted <= each.drafted and each.rows >= each.lanes for each in passes)


def test_lanes_draft_few_nodes_where_there_are_many_lanes() -> None:
    engine = toy_engine("prompt_lookup")
    alone = [step.num_drafted for step in engine.steps(PROMPTS[7], max_new_tokens=40)]
    calls = [engine.prepare(prompt, max_new_tokens=40) for prompt in PROMPTS]
    batch = begin(Batch(engine, len(PROMPTS)), calls)
    most = 0
    while batch.num_active == len(PROMPTS):
        found: list[Any] = []
        batch.turn(found.append)
        for _, chunk in found:
            assert isinstance(chunk, Chunk)
            most = max(most, chunk.num_drafted)
    batch.close()
    assert 0 < most <= SHARED_ROWS // len(PROMPTS) - 1 < max(alone)


def test_static_trees_are_cut_to_their_first_paths() -> None:
    budget = budget_of([(0,), (0, 0), (0, 0, 0), (1,)])
    assert budget.at_most(9) is budget
    cut = budget.at_most(3)
    assert (cut.max_nodes, cut.growth) == (3, budget_of([(0,), (1,)]).growth)
    assert budget.at_most(1).is_root_only
    assert Budget(12, growth=Grown(0.1)).at_most(5) == Budget(5, growth=Grown(0.1))


def test_prompts_are_shared_from_a_least_length_on() -> None:
    """Shorter beginnings are read by each lane for itself, at once."""
    engine = keeping("none", kept_bytes=0)
    head = random_prompt(1, length=MIN_SHARED - 2)
    calls = [engine.prepare([*head, k], max_new_tokens=4) for k in (3, 4)]
    assert [r.usage.reused_tokens for r in results_of(Batch(engine, 2), calls)] == [0, 0]


def test_a_short_prompt_does_not_wait_for_a_long_one_that_begins_alike() -> None:
    engine = keeping("none", kept_bytes=0)
    batch = Batch(engine, 3)
    head = random_prompt(1, length=2 * MIN_SHARED)
    short = engine.prepare(head, max_new_tokens=4)
    long = engine.prepare([*head, *random_prompt(2, length=500)], max_new_tokens=4)
    batch.begin(batch._lanes[0], "long", long)
    assert batch.lane_for(short) is not None
    batch.close()


@pytest.mark.parametrize(("num_alike", "waits"), [(40, False), (70, True)])
def test_a_prompt_waits_for_another_that_begins_as_half_of_it_does(
    num_alike: int, waits: bool
) -> None:
    """Rows of less than half of it are not worth the wait."""
    engine = keeping("none", kept_bytes=0)
    batch, prompt = Batch(engine, 3), random_prompt(1, length=128)
    other = [*prompt[:num_alike], *random_prompt(2, length=60)]
    batch.begin(batch._lanes[0], "other", engine.prepare(other, max_new_tokens=4))
    assert (batch.lane_for(engine.prepare(prompt, max_new_tokens=4)) is None) == waits
    batch.close()


def test_a_prompt_waits_for_one_other_however_many_begin_alike() -> None:
    engine = keeping("none", kept_bytes=0)
    batch = Batch(engine, 3)
    head = random_prompt(1, length=2 * MIN_SHARED)
    first, waiting, later = (engine.prepare([*head, k], max_new_tokens=9) for k in (3, 4, 5))
    batch.begin(batch._lanes[0], "first", first)
    assert batch.lane_for(waiting) is None
    while batch._lanes[0].num_unread:
        batch.turn()
        assert batch.has_gone_on
    batch.begin(batch._lanes[1], "later", later)
    assert batch.lane_for(waiting) is batch._lanes[2]
    batch.close()


def test_each_call_that_waits_has_a_lane_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these are opened before any of them is looked for again, and no further ones."""
    engine = keeping("none", kept_bytes=0)
    source, may_open = engine.lanes.source, threading.Event()
    open_lane = source.open_lane

    def open_late(primary: Engine) -> Engine:
        assert may_open.wait(PATIENCE)
        return open_lane(primary)

    monkeypatch.setattr(source, "open_lane", open_late)
    batch = Batch(engine, 6)
    calls = [engine.prepare([5, 6, k], max_new_tokens=9) for k in range(4)]
    batch.open_beside(lambda: None)
    batch.begin(batch._lanes[0], "first", calls[0])
    for _ in range(2):
        assert [batch.lane_for(call) for call in calls[1:]] == [None, None, None]
    may_open.set()
    wait_until(lambda: engine.num_lanes == 3)
    begin(batch, calls[1:])
    batch.end_opening()
    assert engine.num_lanes == 3
    batch.close()


@pytest.mark.parametrize(("max_gap", "is_short"), [(1e-9, True), (9.0, False)])
def test_prompts_beside_others_fill_up_what_a_pass_may_take(max_gap: float, is_short: bool) -> None:
    engine = keeping("none", kept_bytes=0)
    batch, passes = Batch(engine, 2, max_gap), list[Pass]()
    batch.on_pass = passes.append
    calls = [
        engine.prepare([5, 6, 7], max_new_tokens=60, ignore_eos=True),
        engine.prepare(random_prompt(1, length=400), max_new_tokens=2),
    ]
    results_of(batch, calls)
    chunks = [each.prompt_rows for each in passes if each.prompt_rows]
    assert chunks[:2] == [3, PREFILL_ROWS - 3]  # nobody decodes yet
    left = 400 - chunks[1]
    assert chunks[2:] == (
        [MIN_CHUNK] * (left // MIN_CHUNK) + [left % MIN_CHUNK] if is_short else [left]
    )


class TimedPasses:
    """Runs passes of several toy lanes, each of which takes 40 ms and 1 ms for each row."""

    max_lanes = most_open = 4
    is_warm = True

    def __init__(self, clock: FakeClock) -> None:
        self.run_drafts: Callable[[Sequence[GraphRun]], None] = run_each
        self.closing = threading.Event()
        self._clock = clock

    def open(self, lane: Any, most: int) -> None:
        """Has nothing to open."""

    def run(
        self, lanes: Sequence[Any], feeds: Sequence[Any], outputs: Sequence[str], meanwhile: Any
    ) -> list[Any]:
        meanwhile()
        self._clock.now += 0.040 + 0.001 * sum(each["input_ids"].size for each in feeds)
        return [lane.run(each, outputs) for lane, each in zip(lanes, feeds, strict=True)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets toy lanes share passes, and nothing else take any time."""
    clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", clock.read)
    monkeypatch.setattr(ToyOpener, "open_passes", lambda self: TimedPasses(clock))


@pytest.mark.usefixtures("timed")
def test_a_chunk_beside_others_ends_with_the_gap_that_they_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they decode in the same pass is a part of it; of what trees are cut by, the chunk's
    rows are told."""
    engine = keeping("none", kept_bytes=0)
    batch, passes = Batch(engine, 3, max_gap=0.1), list[Pass]()
    pace: Any = batch._pace
    sizes, told = pace.sizes, list[float]()

    def note(trees: Any, num_lanes: int, num_others: int, read: float) -> Any:
        told.append(read)
        return sizes(trees, num_lanes, num_others, read)

    monkeypatch.setattr(pace, "sizes", note)
    for number, length in enumerate((99, 99, 40)):
        call = engine.prepare([5, 6, number], max_new_tokens=length, ignore_eos=True)
        batch.begin(batch._lanes[number], number, call)
    while batch.num_active == 3:  # what passes of three take is learnt
        batch.turn()
    batch._row_seconds = 0.001
    call = engine.prepare(random_prompt(1, length=400), max_new_tokens=9, ignore_eos=True)
    batch.begin(batch._lanes[2], 2, call)
    batch.on_pass = passes.append
    told.clear()
    while batch._lanes[2].num_unread or not passes:
        batch.turn()
    batch.close()
    assert len(passes) > 5
    assert [each.seconds for each in passes[:-1]] == pytest.approx(
        [0.1] * (len(passes) - 1), rel=0.05
    )
    assert told == pytest.approx([0.001 * each.prompt_rows for each in passes], rel=0.05)


def test_a_shared_pass_gives_features_to_the_lane_that_wants_them() -> None:
    targets = [make_engine().target for _ in range(2)]
    asked = [Asked(TokenTree.root(5)), Asked(TokenTree.root(6), Wants(("features",)))]
    _, found = verify_together(TimedPasses(FakeClock()), targets, asked)
    assert found.features([0])[0, :2].tolist() == [6, 0]  # its token and position


@pytest.mark.usefixtures("timed")
def test_a_pass_cuts_no_tree_that_tokens_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedPace, "sizes", lambda self, worths, *others: [1] * len(worths))
    batch = Batch(keeping("parallelspec", kept_bytes=0), 2)
    for lane, acceptance in zip(batch._lanes, ("typical", "target_sampling"), strict=True):
        sampled: dict[str, Any] = {"temperature": 0.8, "acceptance": acceptance}
        call = lane.engine.prepare([5, 6, 7] * 8, max_new_tokens=99, ignore_eos=True, **sampled)
        batch.begin(lane, None, call)
    for _ in range(9):
        batch.turn()
    drafted = [lane.decoding.stats.drafted_tokens > 0 for lane in batch._order]
    assert drafted == [True, False]
    batch.close()


@pytest.mark.usefixtures("timed")
def test_each_call_waits_for_the_whole_of_a_pass_that_it_shares() -> None:
    engine = keeping("none", kept_bytes=0)
    batch, passes = Batch(engine, 2), list[Pass]()
    batch.on_pass = passes.append
    asked: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    results_of(batch, [engine.prepare([5, 6, last], **asked) for last in (7, 8)])
    seconds = sum(each.seconds for each in passes if each.lanes == 2)
    assert seconds > 8 * 0.04
    taken = [engine.lane(number).target.run_seconds for number in range(2)]
    assert taken == pytest.approx([seconds] * 2)


@in_loop
async def test_a_call_that_gets_no_lane_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for another lane to read the same prompt."""
    async with AsyncEngine(toy_engine(), parallel=2) as engine:
        batch = engine._queue._batch
        lane_for, waiting, may_begin = (
            batch.lane_for,
            batch._engine.encode(PROMPTS[0]),
            list[bool](),
        )
        monkeypatch.setattr(
            batch,
            "lane_for",
            lambda call: None if call.prompt == waiting and not may_begin else lane_for(call),
        )
        first = asyncio.create_task(engine.generate(PROMPTS[0], max_new_tokens=4))
        await asyncio.sleep(0)
        try:
            other = engine.generate(PROMPTS[1], max_new_tokens=4)
            assert (await asyncio.wait_for(other, PATIENCE / 4)).token_ids
            assert not first.done()
        finally:
            may_begin.append(True)
            engine._queue.wake()
        assert (await first).token_ids


@pytest.mark.parametrize(
    ("reason", "is_ended"), [("timeout", False), ("cancelled", True), ("cancelled", False)]
)
def test_a_call_that_ends_within_a_step_says_why(
    reason: str, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a grammar's mask takes too long; the answer so far is kept."""
    engine = toy_engine("prompt_lookup")
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    expected = engine.generate(PROMPTS[0], **options)
    call = engine.prepare(PROMPTS[0], timeout=0.2 if reason == "timeout" else None, **options)
    drafting = engine.proposer.drafting
    drafts: list[int] = []

    def interrupted(token: int, budget: Budget) -> Any:
        drafts.append(token)
        if len(drafts) == 3:
            if is_ended:
                call.end()
            wait_until(lambda: call.interruption.reason is not None or reason == "cancelled")
            raise Interrupted
        return drafting(token, budget)

    monkeypatch.setattr(engine.proposer, "drafting", interrupted)
    [result] = results_of(Batch(engine, 2), [call])
    assert result.finish_reason == reason
    assert 0 < len(result.token_ids) < 30
    assert result.token_ids == expected.token_ids[: len(result.token_ids)]
