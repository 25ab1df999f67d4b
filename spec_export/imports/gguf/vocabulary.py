"""Reads what a GGUF file says of its tokenizer, and encodes texts by it in plain Python.

The encoder is slow. It is the reference that `gguf_tokenizer` and `spec-export check` compare with:
it shares with them the file's tokens, merges and scores and the table of pre-tokenizers, but
nothing of the library `tokenizers`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from spec_export.imports.gguf import header as gguf_header
from spec_export.imports.gguf import pretokenizers
from spec_export.model import named_templates
from spec_runtime.errors import UserError

# Kinds of tokens, as GGUF counts them. Those that are not listed are bytes and unused tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"  # how SentencePiece writes a space
# Tokens that end a turn wherever a vocabulary has them. A file often names only EOS, as Phi-3's,
# which ends a text, while turns end in <|end|>.
TURN_ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
}
UNSTRIPPED = {
    "<unk>",
    "<s>",
    "<|endoftext|>",
}  # control tokens of Phi-3 that keep blanks after them


def byte_alphabet() -> list[str]:
    """Returns the character that stands for each byte in byte-level tokens: "!" for 33, "\u0120"
    for a space."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@dataclass(frozen=True)
class GGUFVocabulary:
    """Holds what a GGUF file says of its tokenizer.

    tokens, kinds: the text and the kind of each id. pre: how a text is cut before bytes are merged,
    None for SentencePiece, which does not cut. merges: pairs of a byte-level tokenizer, the first
    to be merged first. scores: one for each id of a SentencePiece tokenizer. unk, bos, pad: ids,
    None where there are none. ends: the ids that end an answer, EOS first. add_bos, add_eos: what a
    text gets that is no chat. add_space_prefix: each text between control tokens begins with a
    space. strips: control tokens swallow the blanks after them. template: the chat template.
    """

    tokens: list[str]
    kinds: list[int]
    pre: pretokenizers.PreTokenizer | None
    merges: list[tuple[str, str]]
    scores: list[float]
    unk: int | None
    bos: int | None
    pad: int | None
    ends: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strips: bool
    template: str | None

    @cached_property
    def added(self) -> dict[str, int]:
        """The tokens that are found in a text before it is cut, with their ids."""
        kinds = (UNKNOWN, CONTROL, USER_DEFINED)
        return {self.tokens[i]: i for i, kind in enumerate(self.kinds) if kind in kinds}

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens."""
        return {token: i for i, token in enumerate(self.tokens)}

    def is_control(self, token: int) -> bool:
        """Returns whether an added token is no part of a text."""
        return self.kinds[token] != USER_DEFINED or token in self.ends

    def is_stripping(self, token: str) -> bool:
        """Returns whether an added token swallows the blanks after it."""
        return self.strips and token not in UNSTRIPPED


def read(path: Path) -> GGUFVocabulary:
    """Returns what a file says of its tokenizer.

    Raises UserError if it says too little or contradicts itself, and for kinds of tokenizers and
    pre-tokenizers that are not supported.
    """
    header = gguf_header.read(path)
    try:
        return _read(header.architecture, _Values(header.values))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read(architecture: str, values: _Values) -> GGUFVocabulary:
    model = values.one("ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise UserError(
            f"got a tokenizer of kind {model!r:.40} (tokenizer.ggml.model), expected gpt2 or llama:"
            " it is not supported; use the model's Hugging Face folder"
        )
    is_spm = model == "llama"
    tokens = values.texts("ggml.tokens")
    if len(set(tokens)) < len(tokens):
        raise UserError("got a token twice in tokenizer.ggml.tokens, expected each once")
    kinds = values.numbers("ggml.token_type", len(tokens))
    pre = None if is_spm else pretokenizers.find(values.one("ggml.pre", str, ""))

    def token(name: str, default: int | None = None) -> int | None:
        return values.token(f"ggml.{name}_token_id", len(tokens), default)

    ends = [token("eos", 2 if is_spm else None), token("eot"), token("eom")]
    ends += [i for i in map(tokens.index, TURN_ENDS & set(tokens)) if kinds[i] != NORMAL]
    bos, pad = token("bos", 1 if is_spm else None), token("padding")
    found = GGUFVocabulary(
        tokens=tokens,
        kinds=kinds,
        pre=pre,
        merges=[] if is_spm else [_pair(merge) for merge in values.texts("ggml.merges")],
        scores=values.numbers("ggml.scores", len(tokens)) if is_spm else [],
        unk=token("unknown", 0 if is_spm else None),
        # Some converters write the id of an ordinary word, as a comma's, where a model has none.
        bos=None if bos is None or kinds[bos] == NORMAL else bos,
        pad=None if pad is None or kinds[pad] == NORMAL else pad,
        ends=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=values.one("ggml.add_bos_token", bool, pre is None or pre.add_bos),
        add_eos=values.one("ggml.add_eos_token", bool, False),
        add_space_prefix=values.one("ggml.add_space_prefix", bool, is_spm),
        strips=is_spm and architecture == "phi3",
        template=named_templates.joined(
            {
                "default": values.one("chat_template", str, "") or None,
                "tool_use": values.one("chat_template.tool_use", str, "") or None,
            }
        ),
    )
    if not found.ends:
        raise UserError("got no tokenizer.ggml.eos_token_id, expected one: no answer would end")
    if found.add_bos and found.bos is None:
        raise UserError("got no control token as tokenizer.ggml.bos_token_id, expected one")
    if found.add_space_prefix and not is_spm:
        raise UserError(
            "got tokenizer.ggml.add_space_prefix of a byte-level tokenizer, expected false"
        )
    return found


def _pair(merge: str) -> tuple[str, str]:
    """Returns both parts of a merge, between which the file has a space."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise UserError(f"got {merge!r:.80} in tokenizer.ggml.merges, expected two tokens")
    return merge[:cut], merge[cut + 1 :]


class _Values:
    """Lends the metadata by what follows "tokenizer." in their keys; raises UserError for a value
    that is of another kind than was asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def one(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(f"tokenizer.{key}", default)
        if type(value) is not kind:
            raise _refusal(key, value, kind.__name__)
        return value

    def texts(self, key: str) -> list[str]:
        values: list[str] = self.one(key, list)
        if not values or not all(type(value) is str for value in values):
            raise _refusal(key, values, "strings")
        return values

    def numbers(self, key: str, count: int) -> list[Any]:
        values: list[Any] = self.one(key, list)
        if len(values) != count or not all(type(value) in (int, float) for value in values):
            raise _refusal(key, values, f"{count} numbers, one for each token")
        return values

    def token(self, key: str, count: int, default: int | None) -> int | None:
        value: int | None = self._values.get(f"tokenizer.{key}", default)
        if value is not None and not (type(value) is int and 0 <= value < count):
            raise _refusal(key, value, f"an id below {count}")
        return value


def _refusal(key: str, value: Any, expected: str) -> UserError:
    got = f"{len(value)} values" if isinstance(value, list) else f"{value!r:.80}"
    return UserError(f"got {got} for tokenizer.{key}, expected {expected}; convert the model again")


# ---- the reference ----


class ReferenceEncoder:
    """Encodes texts by a file's metadata, as llama.cpp does."""

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        import regex

        self._vocabulary = vocabulary
        self._ranks = {pair: rank for rank, pair in enumerate(vocabulary.merges)}
        self._patterns = [regex.compile(each) for each in getattr(vocabulary.pre, "patterns", ())]
        names = sorted(vocabulary.added, key=len, reverse=True)
        self._added = regex.compile("|".join(map(regex.escape, names)) or r"(?!)")
        self._bytes = byte_alphabet()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text, with BOS and EOS where the file asks for them, if wanted."""
        vocabulary, ids, start = self._vocabulary, list[int](), 0
        if add_special_tokens and vocabulary.add_bos and vocabulary.bos is not None:
            ids.append(vocabulary.bos)
        for found in [*self._added.finditer(text), None]:
            piece = text[start : found.start() if found else len(text)]
            if piece:
                ids += self._by_scores(piece) if vocabulary.pre is None else self._by_merges(piece)
            if found:
                ids.append(vocabulary.added[found[0]])
                start = found.end()
                while vocabulary.is_stripping(found[0]) and text[start : start + 1].isspace():
                    start += 1
        return ids + [vocabulary.ends[0]] * (add_special_tokens and vocabulary.add_eos)

    def _by_merges(self, text: str) -> Iterator[int]:
        pre, ids = self._vocabulary.pre, self._vocabulary.ids
        assert pre is not None
        pieces = [unicodedata.normalize("NFC", text) if pre.nfc else text]
        for pattern in self._patterns:
            pieces = [part for piece in pieces for part in _cut(pattern, piece)]
        for piece in pieces:
            symbols = [self._bytes[byte] for byte in piece.encode()]
            if pre.ignore_merges and "".join(symbols) in ids:
                symbols = ["".join(symbols)]
            merged = _merge(symbols, lambda left, right: self._ranks.get((left, right)))
            yield from (ids[symbol] for symbol in merged if symbol in ids)

    def _by_scores(self, text: str) -> Iterator[int]:
        vocabulary = self._vocabulary
        prefix = SPACE if vocabulary.add_space_prefix else ""

        def rank(left: str, right: str) -> float | None:
            token = vocabulary.ids.get(left + right)
            if token is None or vocabulary.kinds[token] != NORMAL:
                return None
            return -vocabulary.scores[token]

        for symbol in _merge(list(prefix + text.replace(" ", SPACE)), rank):
            token = vocabulary.ids.get(symbol)
            if token is not None:
                yield token
                continue
            for byte in symbol.encode():
                token = vocabulary.ids.get(f"<0x{byte:02X}>", vocabulary.unk)
                if token is not None:
                    yield token


def _cut(pattern: Any, piece: str) -> Iterator[str]:
    """Yields what a pattern matches in a piece, and what is left between."""
    start = 0
    for found in pattern.finditer(piece):
        yield from (piece[start : found.start()], found[0])
        start = found.end()
    yield piece[start:]


def _merge(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Merges the pair of the lowest rank, the first of several, until none has any.

    Example, with ranks "ab" 1 and "bc" 0: a, b, c -> a, bc.
    """
    while True:
        ranks = [rank(left, right) for left, right in pairwise(symbols)]
        known = [each for each in ranks if each is not None]
        if not known:
            return symbols
        at = ranks.index(min(known))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
