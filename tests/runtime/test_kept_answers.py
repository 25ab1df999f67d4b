"""Answers' own token ids in later prompts of their conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from gates import in_loop
from keeping_engine import keeping
from toy_backend import CHATML, ByteTokenizer

from spec_runtime import AsyncEngine, AsyncSession, Engine, Session
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.text.kept_answers import KeptAnswers

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
REST = "</>\n<user>And now?</>\n<assistant>"


class TwoSpellings(ByteTokenizer):
    """Has two tokens for each letter: models write those below 128, `encode` gives the others."""

    def encode(self, text: str, special_tokens: bool, is_marked: bool = False) -> list[int]:
        return [byte + 128 for byte in text.encode("ascii")]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i % 128 for i in ids if i < 256).decode()


CODEC = TwoSpellings(ChatTemplate(CHATML, name="the toy template"))


def engine_of(drafter: str = "parallelspec") -> Engine:
    engine = keeping(drafter, template=CODEC.template)
    engine.tokenizer = CODEC
    return engine


def encoded(text: str) -> list[int]:
    return CODEC.encode(text, special_tokens=False)


def test_a_session_asks_with_the_ids_that_the_model_wrote() -> None:
    session = Session(engine_of())
    first = session.generate("Name a fruit.", **OPTIONS)
    ids = encoded("<user>Name a fruit.</>\n<assistant>") + first.token_ids
    for way in ("generate", "chunks", None):
        if way == "generate":
            result = session.generate("And now?", **OPTIONS)
        elif way == "chunks":
            *_, last = session.chunks("And now?", **OPTIONS)
            assert last.result is not None
            result = last.result
        else:
            result = session.generate(**OPTIONS)  # goes on with the answer
        begun = len(ids)
        ids += encoded(REST) if way else []
        assert result.usage.reused_tokens >= begun - 2, "the answer was not read again"
        assert result.token_ids == engine_of("none").generate(ids, **OPTIONS).token_ids
        ids += result.token_ids


def test_a_changed_conversation_is_encoded_as_ever() -> None:
    session = Session(engine_of())
    session.generate("Name a fruit.", **OPTIONS)
    session.messages[1] = {"role": "assistant", "content": "A fig."}
    result = session.generate("And now?", **OPTIONS)
    ids = encoded(f"<user>Name a fruit.</>\n<assistant>A fig.{REST}")
    assert result.token_ids == engine_of("none").generate(ids, **OPTIONS).token_ids


@in_loop
async def test_a_session_of_asyncio_keeps_ids_too() -> None:
    async with AsyncEngine(engine_of()) as engine:
        session = AsyncSession(engine)
        num_read = 0
        for way in ("generate", "stream", "generate"):
            if way == "generate":
                result = await session.generate("And now?", **OPTIONS)
            else:
                chunks = [chunk async for chunk in session.stream("And now?", **OPTIONS)]
                assert chunks[-1].result is not None
                result = chunks[-1].result
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
