"""Sessions: messages that grow by what is said, and rows that go on."""

import asyncio
import json
import threading
from collections.abc import Sequence
from contextlib import aclosing, closing
from typing import Any

import pytest
from gates import in_loop
from small import known
from toy_backend import CHATML, ByteTokenizer
from toy_engine import keeping

from spec_runtime import AsyncEngine, AsyncSession, Engine, Session
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.text.kept_answers import KeptAnswers

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


# ---- answers' own token ids in later prompts of their conversation ----


REST = "</>\n<user>And now?</>\n<assistant>"


class TwoSpellings(ByteTokenizer):
    """Has two tokens for each letter: models write those below 128, `encode` gives the others."""

    def encode(self, text: str, special_tokens: bool, is_marked: bool = False) -> list[int]:
        return [byte + 128 for byte in text.encode("ascii")]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i % 128 for i in ids if i < 256).decode()


CODEC = TwoSpellings(ChatTemplate(CHATML, name="the toy template"))


def twice_spelled(drafter: str = "parallelspec") -> Engine:
    engine = keeping(drafter, template=CODEC.template)
    engine.tokenizer = CODEC
    return engine


def encoded(text: str) -> list[int]:
    return CODEC.encode(text, special_tokens=False)


def test_a_session_asks_with_the_ids_that_the_model_wrote() -> None:
    session = Session(twice_spelled())
    first = session.generate("Name a fruit.", **OPTIONS)
    ids = encoded("<user>Name a fruit.</>\n<assistant>") + first.token_ids
    for way in ("generate", "chunks", None):
        if way == "generate":
            result = session.generate("And now?", **OPTIONS)
        elif way == "chunks":
            *_, last = session.chunks("And now?", **OPTIONS)
            result = known(last.result)
        else:
            result = session.generate(**OPTIONS)  # goes on with the answer
        begun = len(ids)
        ids += encoded(REST) if way else []
        assert result.usage.reused_tokens >= begun - 2, "the answer was not read again"
        assert result.token_ids == twice_spelled("none").generate(ids, **OPTIONS).token_ids
        ids += result.token_ids


def test_a_changed_conversation_is_encoded_as_ever() -> None:
    session = Session(twice_spelled())
    session.generate("Name a fruit.", **OPTIONS)
    session.messages[1] = {"role": "assistant", "content": "A fig."}
    result = session.generate("And now?", **OPTIONS)
    ids = encoded(f"<user>Name a fruit.</>\n<assistant>A fig.{REST}")
    assert result.token_ids == twice_spelled("none").generate(ids, **OPTIONS).token_ids


@in_loop
async def test_a_session_of_asyncio_keeps_ids_too() -> None:
    async with AsyncEngine(twice_spelled()) as engine:
        session = AsyncSession(engine)
        num_read = 0
        for way in ("generate", "stream", "generate"):
            if way == "generate":
                result = await session.generate("And now?", **OPTIONS)
            else:
                chunks = [chunk async for chunk in session.stream("And now?", **OPTIONS)]
                result = known(chunks[-1].result)
            assert result.usage.reused_tokens >= num_read - 2
            num_read = result.usage.prompt_tokens + len(result.token_ids)


@pytest.mark.parametrize(
    ("text", "ids", "stop", "kept"),
    [
        ("yes", [*b"yes"], None, [*b"yes"]),
        ("yes", [*b"yes", 257], 257, [*b"yes"]),  # the template writes its end
        ("yes", [*b"yes."], ".", None),  # a stop string may end inside a token
        ("yes", [*b"ye", 256, *b"s"], None, None),  # a control token that the text does not show
        ("yes", [*b"no!"], None, None),  # ids that read otherwise
    ],
)
def test_which_answers_are_kept(
    text: str, ids: list[int], stop: str | int | None, kept: list[int] | None
) -> None:
    answers = KeptAnswers()
    answers.keep(text, ids, stop)  # to no prompt
    assert answers.encode(CODEC, "say", is_marked=False) == encoded("say")
    answers.keep(text, ids, stop)
    found = answers.encode(CODEC, f"say{text} more", is_marked=False)
    assert found == [*encoded("say"), *(kept or encoded(text)), *encoded(" more")]
    assert answers.encode(CODEC, "so", is_marked=False) == encoded("so")
