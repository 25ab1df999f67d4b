"""Sessions: messages that grow by what is said, and rows that go on."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import aclosing, closing
from typing import Any

import pytest
from gates import in_loop
from keeping_engine import keeping
from toy_backend import CHATML

from spec_runtime import AsyncEngine, AsyncSession, Engine, Session
from spec_runtime.dialogue.chat_template import ChatTemplate

SYSTEM = "Answer in one short sentence of plain words, and in French."
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


def engine_of(drafter: str = "parallelspec", **more: Any) -> Engine:
    return keeping(drafter, template=ChatTemplate(CHATML, name="the toy template"), **more)


def answer_alone(messages: list[Any], **options: Any) -> str:
    return engine_of("none").generate(messages, **{**OPTIONS, **options}).text


@pytest.mark.parametrize("way", ["generate", "chunks", "stream"])
def test_a_session_asks_with_all_that_was_said(way: str) -> None:
    session = Session(engine_of(), SYSTEM)
    expected: list[dict[str, str]] = []
    for text in ("Name a fruit.", "Name another one."):
        expected.append({"role": "user", "content": text})
        answer = answer_alone(expected, system=SYSTEM)
        expected.append({"role": "assistant", "content": answer})
        if way == "generate":
            said = session.generate(text, **OPTIONS).text
        elif way == "chunks":
            said = "".join(chunk.text for chunk in session.chunks(text, **OPTIONS))
        else:
            said = "".join(session.stream(text, **OPTIONS))
        assert said == answer
        assert session.messages == expected
    assert session.all_messages == [{"role": "system", "content": SYSTEM}, *expected]


def test_sessions_beside_each_other_go_on_from_their_rows() -> None:
    engine = engine_of()
    ann, bob = (Session(engine, SYSTEM) for _ in range(2))
    first = ann.generate("Name a fruit of the tropics, and say where it grows.", **OPTIONS)
    shared = bob.generate("Which river is the longest of Europe, and how long is it?", **OPTIONS)
    again = ann.generate("And another one?", **OPTIONS)
    assert shared.usage.reused_tokens > len(SYSTEM), "the system prompt was read once"
    assert again.usage.reused_tokens > first.usage.prompt_tokens - 2, "what ann said was kept"


def test_none_goes_on_with_the_answer() -> None:
    session = Session(engine_of("none"))
    begin = session.generate("Name a fruit.", max_new_tokens=4, ignore_eos=True)
    more = session.generate(**OPTIONS)
    assert session.messages[1:] == [{"role": "assistant", "content": begin.text + more.text}]
    with pytest.raises(ValueError, match="got no text, expected one where there is no answer"):
        Session(engine_of()).generate()


def test_an_answer_that_ends_early_is_kept_as_far_as_it_came() -> None:
    session = Session(engine_of())
    with closing(session.stream("Name a fruit.", **OPTIONS)) as pieces:
        begin = next(pieces)
        assert not session.messages, "not before it ends"
        with pytest.raises(RuntimeError, match="this session is being answered"):
            session.generate("Name another one.")
    assert session.messages[1:] == [{"role": "assistant", "content": begin}]

    before, stopped = session.messages, threading.Event()
    stopped.set()
    assert session.generate("And now?", cancel=stopped).finish_reason == "cancelled"
    with pytest.raises(ValueError, match="max_new_tokens"):
        session.generate("And now?", max_new_tokens=-1)
    assert session.messages == before, "without any text, the question is not kept"


@pytest.mark.parametrize("name", ["system", "raw", "continue_final"])
def test_options_that_the_session_sets_are_refused(name: str) -> None:
    options: Any = {name: None}
    with pytest.raises(ValueError, match=f"got {name}, expected none in a call"):
        Session(engine_of()).generate("Name a fruit.", **options)


def test_a_session_of_given_messages_goes_on_from_the_rows_kept_of_them() -> None:
    engine = engine_of()
    ann, bob = (Session(engine, SYSTEM) for _ in range(2))
    first = ann.generate("Name a fruit of the tropics, and say where it grows.", **OPTIONS)
    bob.generate("Which river is the longest of Europe, and how long is it?", **OPTIONS)
    other = Session(engine, messages=json.loads(json.dumps(ann.all_messages)))
    assert (other.system, other.messages) == (SYSTEM, ann.messages)
    result = other.generate("And another one?", **OPTIONS)
    assert result.usage.reused_tokens > first.usage.prompt_tokens - 2
    assert result.text == ann.generate("And another one?", **OPTIONS).text


@in_loop
async def test_a_session_of_asyncio() -> None:
    async with AsyncEngine(engine_of()) as engine:
        session = AsyncSession(engine, SYSTEM)
        first = await session.generate("Name a fruit.", **OPTIONS)
        async with aclosing(session.stream("Name another one.", **OPTIONS)) as chunks:
            texts = [chunk.text async for chunk in chunks]
        expected = [
            {"role": "user", "content": "Name a fruit."},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Name another one."},
        ]
        answer = answer_alone(expected, system=SYSTEM)
        assert "".join(texts) == answer
        assert session.messages == [*expected, {"role": "assistant", "content": answer}]

        before = session.messages
        task = asyncio.create_task(session.generate("And now?", **OPTIONS))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert session.messages == before
