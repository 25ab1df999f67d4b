"""Conversations beside each other: rows that are kept, brought back, shared, and let go."""

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
from gates import GatedRuns
from toy_engine import DRAFTERS, MAX_LENGTH, MODEL, keeping, make_engine, random_prompt

from spec_runtime import Engine
from spec_runtime.errors import UserError
from spec_runtime.loop.conversations import MIN_ROWS
from spec_runtime.loop.proposer import OpenedDrafter
from spec_runtime.loop.reading import read_chunks
from spec_runtime.loop.row_store import ConversationRows, RowStore
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.trees.budget import Budget


def answer_alone(drafter: str, prompt: list[int], num_tokens: int) -> list[int]:
    engine = make_engine(drafter, max_length=MAX_LENGTH, **MODEL)
    return engine.generate(prompt, max_new_tokens=num_tokens).token_ids


def after_two(drafter: str) -> tuple[Engine, list[int]]:
    """Returns an engine that has answered two conversations, and the prompt of the first."""
    engine = keeping(drafter)
    talks = [random_prompt(seed, length=60) for seed in (1, 2)]
    for talk in talks:
        engine.generate(talk, max_new_tokens=5)
    return engine, talks[0]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_conversations_in_turn_are_not_read_again(drafter: str) -> None:
    engine = keeping(drafter)
    system = random_prompt(0, length=40)
    talks = [[*system, *random_prompt(seed, length=60)] for seed in (1, 2, 3)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            result = engine.generate(talk, max_new_tokens=20)
            assert result.token_ids == answer_alone(drafter, talk, 20), (turn, number)
            known = len(talk) - (0 if turn == 0 else 5)
            if turn:  # all but what came since: the last answer's last token, and what was asked
                assert result.usage.reused_tokens >= known - 2, (turn, number)
            elif number:
                assert result.usage.reused_tokens == len(system) - 1  # shared
            talk += [*result.token_ids, *random_prompt(turn + 9, length=4)]


@pytest.mark.parametrize(("length", "kept_bytes"), [(60, 0), (MIN_ROWS - 8, 1 << 20)])
def test_without_a_store_or_many_rows_only_the_last_is_known(length: int, kept_bytes: int) -> None:
    engine = keeping("parallelspec", kept_bytes=kept_bytes)
    talks = [random_prompt(seed, length=length) for seed in (1, 2)]
    for talk in talks:
        engine.generate(talk, max_new_tokens=2)
    assert engine.generate(talks[0], max_new_tokens=2).usage.reused_tokens == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_left_in_the_middle_after_rows_came_back(drafter: str) -> None:
    engine, first = after_two(drafter)
    runs = GatedRuns(engine)
    longer = [*first, *random_prompt(3, length=PREFILL_ROWS + 30)]
    runs.let_through()
    interruption = engine.prepare(longer, max_new_tokens=5)
    backend: Any = engine.target.lend()[0]
    run = backend.run

    def cancel_and_run(*arguments: Any) -> Any:
        interruption.end()
        return run(*arguments)

    backend.run = cancel_and_run
    (last,) = read_chunks(engine.answering(interruption))
    backend.run = run
    assert last.result is not None
    assert last.result.finish_reason == "cancelled"
    assert last.result.usage.reused_tokens == len(first) - 1
    result = engine.generate(longer, max_new_tokens=9)
    assert result.token_ids == answer_alone(drafter, longer, 9)
    assert result.usage.reused_tokens == len(first) - 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_that_fills_the_context_after_rows_came_back(drafter: str) -> None:
    engine, first = after_two(drafter)
    full = [*first, *random_prompt(3, length=MAX_LENGTH - 60)]
    assert engine.generate(full).finish_reason == "length"
    assert engine.generate(first, max_new_tokens=9).token_ids == answer_alone(drafter, first, 9)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "stage", ["write_rows", "read_rows", "run", "start", "drafting", "commit", "truncate", "decode"]
)
def test_an_error_at_any_stage_loses_no_answer(
    drafter: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of a call's uses of a stage it is: the next call gives the right answer."""
    for use in range(1, 4):
        engine, first = after_two(drafter)
        parts: list[Any] = [engine.target.lend()[0], engine.proposer, engine.tokenizer]
        owner = next(part for part in parts if hasattr(part, stage))
        inner, uses = getattr(owner, stage), itertools.count(1)

        def broken(*given: Any, inner: Any = inner, uses: Any = uses, use: int = use) -> Any:
            if next(uses) == use:
                raise MemoryError
            return inner(*given)

        with monkeypatch.context() as patch, contextlib.suppress(MemoryError):
            patch.setattr(owner, stage, broken)
            engine.generate(first, max_new_tokens=9)
        assert use > 1 or next(uses) > 1, "this stage is not used"
        assert engine.generate(first, max_new_tokens=9).token_ids == answer_alone(drafter, first, 9)


def test_rows_of_a_call_that_failed_are_not_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may be no numbers, which a pass with them tells."""
    engine, talk = after_two("parallelspec")
    backend: Any = engine.target.lend()[0]
    write_rows, passes = backend.write_rows, [backend.run]

    def fail(*given: Any) -> Any:
        passes.pop()
        raise FloatingPointError

    def write(*given: Any) -> None:
        write_rows(*given)
        passes.append(fail)

    monkeypatch.setattr(backend, "write_rows", write)
    monkeypatch.setattr(backend, "run", lambda *given: passes[-1](*given))
    with pytest.raises(FloatingPointError):
        engine.generate(talk, max_new_tokens=9)
    wanted = answer_alone("parallelspec", talk, 9)
    assert engine.generate(talk, max_new_tokens=9).token_ids == wanted


def test_rows_that_a_device_keeps_to_itself_are_refused() -> None:
    engine = make_engine("none")
    opened = OpenedDrafter("none", engine.proposer, Budget(1))
    with pytest.raises(UserError, match="got kept_mb with"):
        Engine(engine.target, engine.tokenizer, opened, kept_bytes=1)


# ---- the store ----


def rows_of(*tokens: int, num_bytes: int = 10) -> ConversationRows:
    return ConversationRows(list(tokens), {"kv": np.zeros(num_bytes, np.uint8)})


def tokens_of(store: RowStore, *prompt: int) -> list[int] | None:
    kept, _ = store.find(prompt)
    return None if kept is None else kept.tokens


def test_the_rows_with_the_longest_common_beginning_are_found() -> None:
    store = RowStore(100)
    for rows in (rows_of(1, 2, 3), rows_of(1, 2, 4, 5), rows_of(7)):
        store.add(rows)
    assert tokens_of(store, 1, 2, 4, 6) == [1, 2, 4, 5]
    assert store.find([1, 2, 4, 6])[1] == 3
    assert tokens_of(store, 1, 2, 3, 4, 5) == [1, 2, 3]
    assert tokens_of(store, 9) is None


def test_a_longer_conversation_takes_the_place_of_its_beginning() -> None:
    store = RowStore(100)
    store.add(rows_of(1, 2))
    store.add(rows_of(1, 2, 3))
    assert len(store) == 1
    store.add(rows_of(1, 2))  # nothing new
    assert len(store) == 1
    assert tokens_of(store, 1, 2) == [1, 2, 3]


def test_the_rows_least_recently_used_go_first() -> None:
    store = RowStore(30)
    for token in (1, 2, 3):
        store.add(rows_of(token))
    assert tokens_of(store, 1) == [1]  # used
    store.add(rows_of(4))
    assert [tokens_of(store, token) for token in (1, 2, 3, 4)] == [[1], None, [3], [4]]
    assert store.num_bytes == 30
    store.add(rows_of(5, num_bytes=31))  # has no room at all
    assert len(store) == 3
