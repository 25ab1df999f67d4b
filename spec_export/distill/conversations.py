"""Lets the target hold conversations: user messages given or sampled, answers its own.

A conversation begins with one user message. While turns are left, the target answers it, and the
next user message is the given one or is sampled by the target itself after the conversation so
far and the chat template's user prefix ("Magpie", arXiv:2406.08464). A batch's conversations are
answered together, turn by turn. Everything of a batch depends only on its number and the seed.
"""

import hashlib
import random
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from spec_export.distill.config import DistillConfig
from spec_export.distill.engines import AnswerEngine, GenerationParams, OnTokens, unheard
from spec_export.model import target
from spec_export.training import data
from spec_runtime.errors import UserError

# Prompts are sampled from the target's own distribution, without its improbable tail.
PROMPT_TEMPERATURE = 1.0
PROMPT_TOP_K = 100


@dataclass(frozen=True)
class PromptIds:
    """User messages as token ids, without the chat template's, and the source their row named.

    `more` are the messages of the later turns; `where` is the row's file and line; `system` is the
    system message before them, None for the template's own.
    """

    ids: list[int]
    source: str | None = None
    where: str = ""
    more: tuple[list[int], ...] = ()
    system: str | None = None


@dataclass
class Conversation:
    """A conversation that grows turn by turn.

    Attributes:
        given: the user messages that are not asked yet.
        temperature: the sampling temperature of its answers.
        system: its system message, None for the chat template's own.
        turns: (user message, answer) of each turn so far.
        ids: all token ids so far, as the chat template writes them.
    """

    given: list[list[int]]
    source: str | None
    temperature: float
    system: str | None = None
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def row(self, with_temperature: bool) -> dict[str, Any]:
        """Returns the row as `data.read` takes it; one turn is written as ever."""
        pairs = [{"prompt": prompt, "response": answer} for prompt, answer in self.turns]
        row: dict[str, Any] = pairs[0] if len(pairs) == 1 else {"turns": pairs}
        if self.system is not None:
            row["system"] = self.system
        if self.source is not None:
            row["source"] = self.source
        if with_temperature:
            row["temperature"] = self.temperature
        return row


def num_answer_tokens(row: dict[str, Any]) -> int:
    """Returns the answers' tokens in a row that `Conversation.row` made."""
    return sum(len(turn["response"]) for turn in row.get("turns", [row]))


class Distiller:
    """Makes the rows of a batch; a batch depends only on its number."""

    def __init__(
        self,
        config: DistillConfig,
        engine: AnswerEngine,
        tokenizer: Any,
        source: target.Source,
        room: int,
        given: list[PromptIds] | None,
    ) -> None:
        """`room` is the number of tokens that the context has before the text that leads up to an
        answer."""
        self.config = config
        self.engine = engine
        self.room = room
        self.given = given
        self.affixes = cache(partial(data.chat_affixes, tokenizer))
        self.prefix, self.suffix = self.affixes(None)
        self.joint = data.chat_joint(tokenizer) if config.turns > 1 else []
        self.end_ids = end_ids(source, tokenizer)
        self.special_ids = set(tokenizer.all_special_ids) | set(self.end_ids)
        if given is None and not self.prefix:
            raise UserError(
                f"{source.name} has no chat template to sample prompts after, give a prompts file"
            )

    def batch(
        self, number: int, limit: int, on_tokens: OnTokens = unheard
    ) -> tuple[list[dict[str, Any]], bool]:
        """Returns the first `limit` rows of batch `number`, and whether these are all its rows.

        A last batch that the file does not fill is never whole: the file may grow. `on_tokens`
        hears of the answers of the batch.
        """
        if self.given is None:
            prompts = self._first_messages(number)
            whole = len(prompts) <= limit
        else:
            size = self.config.batch_size
            prompts = self.given[number * size : (number + 1) * size]
            whole = size == len(prompts) <= limit
        conversations = [
            Conversation(
                [each.ids, *each.more], each.source, self._temperature(number, row), each.system
            )
            for row, each in enumerate(prompts[:limit])
        ]
        self._converse(conversations, number, on_tokens)
        several = self.config.temperatures != (0.0,)
        return [conversation.row(several) for conversation in conversations], whole

    def _converse(
        self, conversations: list[Conversation], number: int, on_tokens: OnTokens
    ) -> None:
        """Holds the conversations of a batch; some end earlier than others."""
        asking = [(c, c.given.pop(0)) for c in conversations]
        num_before = 0  # tokens of the turns before

        def on_turn(num_ended: int, num_tokens: int) -> None:
            is_last = turn + 1 == self.config.turns
            num_over = len(conversations) - len(asking)
            on_tokens(num_over + (num_ended if is_last else 0), num_before + num_tokens)

        for turn in range(self.config.turns):
            if turn:
                asking = self._next_messages([c for c, _ in asking], number, turn)
            if not asking:
                return
            for conversation, message in asking:
                before = self.joint if turn else self.affixes(conversation.system)[0]
                conversation.ids += before + message + self.suffix
            params = GenerationParams(
                max_new_tokens=self.config.max_new_tokens,
                temperature=tuple(c.temperature for c, _ in asking),
                top_k=0,
                seed=self._seed(number, _purpose("answers", turn)),
                end_ids=self.end_ids,
            )
            answers = self.engine.generate([c.ids for c, _ in asking], params, on_turn)
            num_before += sum(map(len, answers))
            for (conversation, message), answer in zip(asking, answers, strict=True):
                conversation.turns.append((message, answer))
                conversation.ids += answer

    def _first_messages(self, number: int) -> list[PromptIds]:
        """Returns user messages that the target makes up."""
        size = self.config.batch_size
        room = self.room - len(self.prefix)
        drawn = self._sampled([self.prefix] * size, room, number, 0)
        return [PromptIds(ids) for ids in drawn if ids]

    def _next_messages(
        self, conversations: list[Conversation], number: int, turn: int
    ) -> list[tuple[Conversation, list[int]]]:
        """Returns the conversations that go on, each with its next user message.

        A conversation ends where its last answer was cut off, where the context has no room for
        another turn, and where the target makes up no usable message.
        """
        going = []
        for conversation in conversations:
            room = self._room_after(conversation)
            wanted = len(conversation.given[0]) if conversation.given else 0
            fits = room >= (wanted or self.config.max_prompt_tokens)
            if conversation.ids[-1] == self.joint[0] and fits:
                # The template's end token, which the answer has, comes once.
                del conversation.ids[-1]
                going.append(conversation)
        open_ended = [c for c in going if not c.given]
        inputs = [c.ids + self.joint for c in open_ended]
        made = self._sampled(inputs, self.config.max_prompt_tokens, number, turn)
        messages = dict(zip(map(id, open_ended), made, strict=True))
        asking = []
        for conversation in going:
            given = conversation.given
            message = given.pop(0) if given else messages[id(conversation)]
            if message:
                asking.append((conversation, message))
        return asking

    def _room_after(self, conversation: Conversation) -> int:
        """Returns the tokens that the next user message may have."""
        return self.room - len(conversation.ids) - len(self.joint)

    def _sampled(
        self, inputs: list[list[int]], room: int, number: int, turn: int
    ) -> list[list[int]]:
        """Returns a user message after each input, without its end token.

        It is empty where the target does not end it, puts special tokens inside or leaves no room
        for an answer.
        """
        if not inputs:
            return []
        params = GenerationParams(
            max_new_tokens=min(self.config.max_prompt_tokens, room + 1),
            temperature=PROMPT_TEMPERATURE,
            top_k=PROMPT_TOP_K,
            seed=self._seed(number, _purpose("prompts", turn)),
            end_ids=self.end_ids,
        )
        return [
            ids[:-1]
            if ids
            and len(ids) <= room + 1  # with the end token
            and ids[-1] in self.end_ids
            and not self.special_ids & set(ids[:-1])
            else []
            for ids in self.engine.generate(inputs, params)
        ]

    def _seed(self, number: int, purpose: str) -> int:
        """Returns a seed of 31 bits for one batch; shards share no batch's."""
        index, count = self.config.part
        key = f"{self.config.seed} {number * count + index} {purpose}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 1

    def _temperature(self, number: int, row: int) -> float:
        """Returns the temperature of a row, drawn by the seed."""
        known = self.config.temperatures
        seed = self._seed(number, f"temperature {row}")
        return known[0] if len(known) == 1 else random.Random(seed).choice(known)


def end_ids(source: target.Source, tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that end an answer: the tokenizer's, then the generation config's."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    config = target.load_generation_config(source)
    more = None if config is None else config.eos_token_id
    ids += more if isinstance(more, list) else [] if more is None else [more]
    if not ids:
        raise UserError(f"{source.name} has no end-of-text token, expected one")
    return tuple(dict.fromkeys(ids))


def _purpose(purpose: str, turn: int) -> str:
    """Returns the seed's purpose; that of the first turn is as it was before there were more."""
    return f"{purpose} {turn}" if turn else purpose
