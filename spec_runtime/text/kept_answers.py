"""Encodes a conversation with the answers' own token ids in place of their text's encoding."""

from collections.abc import Sequence

from spec_runtime.dialogue.messages import Message
from spec_runtime.text.tokenizer import Codec

MAX_KEPT = 16  # prompts with their answers; a long conversation needs only its latest


class KeptAnswers:
    """Remembers what one conversation's prompts and answers read as, and their token ids.

    A model may write a text with other tokens than its tokenizer encodes it with, and rows are
    reused only for equal tokens. A prompt that begins with an earlier prompt and its answer, as
    text, therefore begins with their ids; only the rest is encoded. Where the ids would not read
    as the text does, and where a message was changed or a template writes an answer in another way,
    the text is encoded as ever.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, list[int]]] = []
        self._asked: tuple[Codec, str, list[int], bool] | None = None

    def encode(self, codec: Codec, text: str, is_marked: bool) -> list[int]:
        """Returns the ids of a rendered prompt, and notes them for `keep`. Raises what
        Codec.encode raises."""
        ids = codec.encode(text, special_tokens=False, is_marked=is_marked)
        fitting = [entry for entry in self._kept if text.startswith(entry[0])]
        if fitting:
            begin, known = max(fitting, key=lambda entry: len(entry[0]))
            rest = codec.encode(text[len(begin) :], special_tokens=False, is_marked=is_marked)
            if codec.decode([*known, *rest]) == codec.decode(ids):
                ids = [*known, *rest]
        self._asked = (codec, text, ids, is_marked)
        return ids

    def keep(self, text: str, token_ids: Sequence[int], stop: str | int | None) -> None:
        """Remembers the answer to the prompt encoded last. `stop` is what ended it, see
        GenerationResult: a token that did is left to the template, and an answer cut by a stop
        string, which may end inside a token, is not kept. Nor is one with control tokens, which
        its text does not show."""
        if self._asked is None or isinstance(stop, str):
            return
        codec, prompt, ids, is_marked = self._asked
        answer = list(token_ids if stop is None else token_ids[:-1])
        # twice, since a space on its own may be dropped at a text's beginning
        if not all(codec.decode([token] * 2) for token in set(answer)):
            return
        shown = codec.marked(text, by_assistant=True) if is_marked else text
        self._kept = [*self._kept[1 - MAX_KEPT :], (prompt + shown, ids + answer)]


class Dialogue(list[Message]):
    """Holds the messages of a prompt whose answers' ids are kept in `answers`."""

    def __init__(self, messages: Sequence[Message], answers: KeptAnswers) -> None:
        super().__init__(messages)
        self.answers = answers
