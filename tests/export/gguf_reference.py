"""Encodes texts by a GGUF file's metadata in plain Python, as llama.cpp does.

It is slow. It shares with the product the file's tokens, merges and scores and the table of
pre-tokenizers, but nothing of the library `tokenizers`.
"""

import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import regex

from spec_export.imports.gguf.vocabulary import NORMAL, SPACE, GGUFVocabulary


def byte_alphabet() -> list[str]:
    """Returns the character that stands for each byte in byte-level tokens: "!" for 33, "\u0120"
    for a space."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class ReferenceEncoder:
    """Encodes texts by a file's metadata, as llama.cpp does."""

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
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
