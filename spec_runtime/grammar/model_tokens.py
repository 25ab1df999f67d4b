"""Tells llguidance which bytes each of a model's tokens stands for, and how text is tokenized."""

import json
import re
from collections.abc import Sequence
from typing import Any

_HIDDEN = b"\xff"  # begins the bytes of a token that llguidance is to find in no text
# Strings, comments and regular expressions of Lark's notation, and the names of tokens.
_NUMBERS = re.compile(r"<\[(\d[\d,\s-]*)\]>")  # such as <[7]> and <[7,20-30]>
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\n]*>')


class ModelTokens:
    """A tokenizer as `llguidance.LLTokenizer` takes one.

    Special tokens, which an answer's text does not show, and EOS stand for no text: the name of one
    in a text is written letter by letter. Other added tokens, such as Qwen's "<tool_call>", are
    part of the text, although llguidance's own reader takes all of the form "<…>" for special.

    `definition` is a tokenizer.json as text; raises whatever llguidance does for one that it cannot
    read. `special` holds the ids of the special tokens by their names, EOS excepted.
    """

    is_tokenizer_wrapper = True  # this, and the next two names, are llguidance's
    bos_token_id: int | None = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, library: Any, definition: str, eos: Sequence[int], vocab_size: int) -> None:
        self._reader = library.LLTokenizer(
            definition, n_vocab=vocab_size, eos_token=list(eos), slices=[]
        )
        self.eos_token_id = eos[0]
        added = {token["id"]: token for token in json.loads(definition)["added_tokens"]}
        self.special = {
            token["content"]: number
            for number, token in added.items()
            if token["special"] and number not in eos
        }
        self._visible = {
            token["content"]: number
            for number, token in added.items()
            if not token["special"] and number not in eos
        }
        self.tokens = [self._reader.decode_bytes([number]) for number in range(vocab_size)]
        for number, name in enumerate(self.tokens):
            if name == f"<[{number}]>".encode():  # what the reader calls a number without a token
                self.tokens[number] = b""
        for name, number in self._visible.items():
            self.tokens[number] = name.encode()
        for number in (*self.special.values(), *eos):
            self.tokens[number] = _HIDDEN + self.tokens[number]

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text as the tokenizer itself would write it; where these do not
        spell it, as after a normalizer or with the name of a special token, others that do."""
        ids: list[int] = self._reader.tokenize_str(text)
        if b"".join(self.tokens[number] for number in ids) == text.encode():
            return ids
        spelled: list[int] = self._reader.greedy_tokenize(text)
        return spelled

    def quoted(self, text: str) -> str:
        """Returns a fixed text in Lark's notation, in which the names of special tokens stand for
        these tokens.

        Example, where "<|tool|>" is special token 7: '<|tool|>{' gives '<[7]> "{"'.
        """
        names = sorted(self.special, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names)) or '(?!)'})", text)
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part)
            for part in parts
        )

    def numbered(self, lark: str) -> str:
        """Returns a grammar in Lark's notation whose references by name to added tokens that are
        not special, as `<tool_call>`, are references by number, as `<[7]>`.

        Where a token of the text can be meant by its number, EOS may stand, too: llguidance's
        rollback miscounts the bytes of such a token if it is the only one that may. Its caller
        does not let EOS pass there.
        """

        def with_eos(found: re.Match[str]) -> str:
            name = f"<[{self._visible[found[0]]}]>" if found[0] in self._visible else found[0]
            ids = _NUMBERS.fullmatch(name)
            if ids is None or (ids[1].isdecimal() and self._is_hidden(int(ids[1]))):
                return name
            return f"<[{ids[1]},{self.eos_token_id}]>"

        return _LARK_PARTS.sub(with_eos, lark)

    def _is_hidden(self, number: int) -> bool:
        return number < len(self.tokens) and self.tokens[number].startswith(_HIDDEN)
