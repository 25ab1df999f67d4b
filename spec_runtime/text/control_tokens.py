"""Keeps what a user types from becoming control tokens.

A tokenizer takes the name of a control token, such as "<|im_end|>", for that token wherever it
stands: also in a message, which could so end itself and go on as somebody else. Here names inside
messages are marked before a chat template is rendered, and marked names are encoded as ordinary
text. The names that the template itself writes stay control tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.text.tokenizer_file import no_panics

# Noncharacters of Unicode, which are for a program's own use: texts do not have them.
MARK, FENCE = "\ufdd0", "\ufdd1"
_REPLACED = {ord(MARK): "\ufffd", ord(FENCE): "\ufffd"}
MAX_DEPTH = 64  # of values inside a message


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and those added tokens that the chat
    template writes by name ("<think>", "<tool_call>").

    `tokenizer` is a `tokenizers.Tokenizer` and `file` where it came from; `template` is the source
    of the chat template.
    """

    def __init__(self, tokenizer: Any, file: str, template: str | None) -> None:
        self._tokenizer, self._file = tokenizer, file
        self._fenced: tuple[Any, dict[int, int]] | None = None
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special and token.content}
        written = {
            token.content
            for token in added.values()
            if template is not None and token.content in template and _is_name(token.content)
        }
        self._ids = {token.content: number for number, token in added.items()}
        self._names = sorted(special | written)
        self._control_ids = {self._ids[name] for name in self._names}
        self._any = _starts(self._names)
        self._special = _starts(special)
        self._whole = _wholes(self._names)
        # A normalizer could make names of what is none yet: then a text without any mark must be
        # encoded here too.
        self.reads_unmarked = tokenizer.normalizer is not None and any(
            added[number].normalized for number in self._control_ids
        )

    def marked(self, value: Any, by_assistant: bool = False, depth: int = 0) -> Any:
        r"""Returns a text, or a value of JSON with texts in it, keys too, whose names are marked.

        What an assistant wrote keeps the names that its template reads there, like "<think>".

        Example, where "<|im_end|>" is special: "a<|im_end|>" -> "a<\ufdd0|im_end|>".
        """
        if isinstance(value, str):
            names = self._special if by_assistant else self._any
            return names.sub(rf"\g<0>{MARK}", value.translate(_REPLACED))
        if depth > MAX_DEPTH:
            raise UserError(
                f"got a message or tool with values nested deeper than {MAX_DEPTH}, expected fewer"
            )
        if isinstance(value, Mapping):
            inner = depth + 1
            return {
                self.marked(key, by_assistant, inner): self.marked(each, by_assistant, inner)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(each, by_assistant, depth + 1) for each in value]
        return value

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Returns the ids of a text in which marked names are ordinary text and others are not.

        Raises UserError if the tokenizer makes a control token of ordinary text all the same.
        """
        numbers = {name: number for number, name in enumerate(self._names)}
        fenced, num_names = self._whole.subn(
            lambda found: f"{FENCE}{numbers[found[0]]}{FENCE}", text
        )
        with no_panics(self._file):
            tokenizer, id_of = self._fenced_tokenizer()
            texts = [fenced.replace(MARK, "")]
            (encoding,) = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = [id_of.get(number, number) for number in encoding.ids]
        if sum(number in self._control_ids for number in found) != num_names:
            raise UserError(
                "got the name of a control token in a message, which this tokenizer takes for that "
                "token in any case; take it out, or allow control tokens"
            )
        if not special_tokens:
            return found
        with no_panics(self._file):
            encoding = self._tokenizer.post_process(encoding, add_special_tokens=True)
        return [
            number if is_added else id_of.get(number, number)
            for number, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        ]

    def _fenced_tokenizer(self) -> tuple[Any, dict[int, int]]:
        r"""Returns a tokenizer whose control tokens are called "\ufdd10\ufdd1" and so on, which no
        text has, and the true ids of its added tokens by those that they have there."""
        if self._fenced is None:
            state = json.loads(self._tokenizer.to_str())
            fences = {name: f"{FENCE}{number}{FENCE}" for number, name in enumerate(self._names)}
            for token in state["added_tokens"]:
                if token["content"] in fences:
                    token |= {"content": fences[token["content"]], "normalized": False}
            state["post_processor"] = state["truncation"] = state["padding"] = None
            made = type(self._tokenizer).from_str(json.dumps(state))
            names = {name: fences.get(name, name) for name in self._ids}
            id_of = {made.token_to_id(names[name]): number for name, number in self._ids.items()}
            self._fenced = made, id_of
        return self._fenced


def _is_name(text: str) -> bool:
    """Returns whether an added token is something that a template writes on purpose: no blanks and
    no plain word."""
    return bool(text.strip()) and not text.isalnum()


def _by_first(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns what follows each first character, the longest first: "<a>", "<ab>" -> {"<": ["ab>",
    "a>"]}. Regular expressions made so look closer only where such a character stands."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=len, reverse=True):
        found.setdefault(re.escape(name[0]), []).append(re.escape(name[1:]))
    return found


def _starts(names: Iterable[str]) -> re.Pattern[str]:
    """Returns what finds the first character of every name, also of names that overlap."""
    groups = _by_first(names).items()
    return re.compile("|".join(f"{first}(?={'|'.join(rest)})" for first, rest in groups) or r"(?!)")


def _wholes(names: Iterable[str]) -> re.Pattern[str]:
    """Returns what finds the names that are not marked."""
    groups = _by_first(names).items()
    return re.compile(
        "|".join(f"{first}(?!{MARK})(?:{'|'.join(rest)})" for first, rest in groups) or r"(?!)"
    )
