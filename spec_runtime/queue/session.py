"""Keeps conversations: their messages, while engines keep the rows computed of them."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

from spec_runtime.dialogue.messages import Message
from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.loop.options import CallOptions
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.text.kept_answers import Dialogue, KeptAnswers

OWN = ("system", "raw", "continue_final")  # options that a session sets itself


@dataclass
class Exchange:
    """A call of a session: its messages, its options, and what has come of the answer."""

    messages: list[Message]
    options: CallOptions
    answer: str = ""
    result: GenerationResult | None = None  # once the answer has ended by itself


class Transcript:
    """Holds the messages of one conversation, `system` apart, and adds answers to them."""

    def __init__(self, system: str | None, messages: Sequence[Message]) -> None:
        self.system = system
        self.messages: list[Message] = list(messages)
        if system is None and _has_text(self.messages[:1], "system"):
            self.system = self.messages.pop(0)["content"]
        self._is_answering = False
        self._answers = KeptAnswers()

    @property
    def all_messages(self) -> list[Message]:
        """Returns all messages, the system prompt's first, if there is one."""
        system = self.system
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return [*opening, *self.messages]

    @contextmanager
    def exchange(self, text: str | None, options: CallOptions) -> Iterator[Exchange]:
        """Gives what to call the engine with, and adds the answer when the block ends."""
        if found := [name for name in OWN if name in options]:
            raise UserError(f"got {found[0]}, expected none in a call of a session, which sets it")
        if text is None and not _has_text(self.messages[-1:], "assistant"):
            raise UserError("got no text, expected one where there is no answer to go on with")
        if self._is_answering:
            raise RuntimeError("this session is being answered; wait for the end, or close it")
        self._is_answering = True
        asked = self.messages if text is None else [*self.messages, _message("user", text)]
        own: CallOptions = {"system": self.system, "continue_final": text is None}
        exchange = Exchange(Dialogue(asked, self._answers), {**options, **own})
        try:
            yield exchange
        finally:
            self._is_answering = False
            if result := exchange.result:
                self._answers.keep(result.text, result.token_ids, result.stop)
            if exchange.answer and text is None:
                *before, begun = self.messages
                self.messages = [*before, {**begun, "content": begun["content"] + exchange.answer}]
            elif exchange.answer:
                self.messages = [*asked, _message("assistant", exchange.answer)]


class Session(Transcript):
    """One of the conversations with an engine, which any number of sessions share.

    An answer goes on from the rows that were computed for earlier ones. An engine keeps the rows of
    the conversation that it answered last, and of others as many as `kept_mb` of
    `spec_runtime.load` allows, of which the least recently used go first. A beginning that several
    conversations share is computed once. An answer goes into later prompts with the ids that the
    model wrote, which need not be those that its text is encoded with, as long as nothing before it
    is changed; outputs are those of plain decoding of these ids.

    `messages` hold the conversation, without the `system` prompt, and may be changed between calls.
    A system prompt with which given messages begin becomes `system`. What has come of an answer
    that ends early is kept; if it has no text, neither it nor its question is kept. A session
    answers one call at a time, and raises RuntimeError for another in the meantime.
    """

    def __init__(
        self, engine: Engine, system: str | None = None, messages: Sequence[Message] = ()
    ) -> None:
        super().__init__(system, messages)
        self.engine = engine

    def generate(self, text: str | None = None, **options: Unpack[CallOptions]) -> GenerationResult:
        """Returns the answer to what the user says; None goes on with the last answer.

        See Engine.generate for options and errors. Raises UserError, too, for options that
        the session sets, and for None where there is no answer.
        """
        with self.exchange(text, options) as exchange:
            result = self.engine.generate(exchange.messages, **exchange.options)
            exchange.answer, exchange.result = result.text, result
        return result

    def chunks(
        self, text: str | None = None, **options: Unpack[CallOptions]
    ) -> Generator[Chunk, None, GenerationResult]:
        """Yields the answer's chunks, see Engine.chunks and `generate`. The call begins when the
        first one is asked for."""
        result: GenerationResult | None = None
        with (
            self.exchange(text, options) as exchange,
            closing(self.engine.chunks(exchange.messages, **exchange.options)) as chunks,
        ):
            for chunk in chunks:
                exchange.answer += chunk.text
                result = exchange.result = chunk.result
                yield chunk
        assert result is not None, "the last chunk has the result"
        return result

    def stream(
        self, text: str | None = None, **options: Unpack[CallOptions]
    ) -> Generator[str, None, GenerationResult]:
        """Yields pieces of the answer's text and returns the result, see `chunks`."""
        result: GenerationResult | None = None
        with closing(self.chunks(text, **options)) as chunks:
            for chunk in chunks:
                result = chunk.result
                if chunk.text:
                    yield chunk.text
        assert result is not None, "the last chunk has the result"
        return result


def _has_text(messages: Sequence[Message], role: str) -> bool:
    """Says whether there is a message, of this role, and a text."""
    return any(
        each.get("role") == role and isinstance(each.get("content"), str) for each in messages
    )


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
