"""Turns token ids into text as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Makes text of tokens as they come: whole characters only, and never a part of a stop string.

    Text is released as soon as no later token can change it. Example, stop "END": pushing "a",
    "E", "N", "x" releases "a", "", "", "ENx"; pushing "a", "E", "ND" releases "a" and stops.
    `stop` is then the stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.text = ""  # all that is released
        self.stop: str | None = None  # the stop string that ended the text
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []  # a window: `_read` ids whose text is out, then new ones
        self._read = 0
        self._held = ""  # may be the beginning of a stop string
        self._taken = 0
        self._ends: list[int] = []  # of each token: where its text ends, held text included
        self._first = 0  # of the tokens whose text has not all been taken

    @property
    def stopped(self) -> bool:
        """Says whether a stop string is complete."""
        return self.stop is not None

    def push(self, token: int) -> bool:
        """Adds a token; returns True once a stop string is complete, before which the text ends."""
        self._ids.append(token)
        piece = self._new_text()
        # U+FFFD at the end: perhaps a character whose other bytes are in the next token
        if piece and not piece.endswith("\ufffd"):
            # keep the last tokens: some decoders treat the first id of a list differently
            del self._ids[: self._read]
            self._read = len(self._ids)
            self._release(piece)
        self._ends.append(len(self.text) + len(self._held))
        return self.stopped

    def finish(self) -> None:
        """Releases the text held back, as no more tokens come."""
        piece = self._new_text()
        self._read = len(self._ids)
        self._release(piece)
        self.text += self._held
        self._held = ""
        if self._ends:
            self._ends[-1] = len(self.text)

    def take(self) -> str:
        """Returns the text released since the last call."""
        piece = self.text[self._taken :]
        self._taken = len(self.text)
        return piece

    def take_pieces(self) -> list[tuple[int, str]]:
        """Returns the text released since the last call in pieces: the number of a token, from 0
        on, and the text that it completed.

        Example, stop "END": after "a", "E", "N" this returns [(0, "a")], and after another "x"
        [(1, "E"), (2, "N"), (3, "x")].
        """
        pieces = []
        while self._taken < len(self.text):
            end = min(self._ends[self._first], len(self.text))
            if end > self._taken:
                pieces.append((self._first, self.text[self._taken : end]))
                self._taken = end
            if end == self._ends[self._first]:
                self._first += 1
        return pieces

    def _new_text(self) -> str:
        if self._read == len(self._ids):
            return ""
        known = self._decode(self._ids[: self._read]) if self._read else ""
        return self._decode(self._ids)[len(known) :]

    def _release(self, piece: str) -> None:
        if self.stopped:
            return
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop = min(found, key=lambda place: place[0])
            self.text += text[:at]
            self._held = ""
            return
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self.text += text[: len(text) - num_held]
        self._held = text[len(text) - num_held :]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins: ("abEN", "END") ->
    2."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
