"""Turns token ids into text as they come, up to a stop string."""

from collections.abc import Callable, Sequence

from spec_runtime.dialogue.reader import ResponseReader, overlap

REPLACEMENT = "\ufffd"  # what bytes are decoded as that are no character, or not yet
MAX_CHARACTER_BYTES = 4  # of UTF-8
MAX_WINDOW = 64  # tokens decoded at a time
MAX_KNOWN = 8  # of them, those whose text is out already
MAX_WORD_TOKENS = 8  # of a prompt, looked at for its last text


class TextStream:
    """Makes text of tokens as they come: whole characters only, and never a part of a stop string.

    Text is released as soon as no later token can change it. Example, stop "END": pushing "a",
    "E", "N", "x" releases "a", "", "", "ENx"; pushing "a", "E", "ND" releases "a" and stops.
    `stop` is then the stop string. Without stop strings tokens are decoded when their text is
    taken, or by `settle`, as while a device runs. `ends` says of each token decoded where its text
    ends in `text`, in characters, held text included. `prompt` are the ids before the answer: a
    SentencePiece word has a space before it unless it is the first one. `reader` is asked where the
    answer's text is: a stop string within thinking ends nothing.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        reader: ResponseReader | None = None,
    ) -> None:
        self._reader = reader if stops else None
        self.text = ""  # all that is released
        self.stop: str | None = None  # the stop string that ended the text
        self.ends: list[int] = []
        self._decode = decode
        self._stops = stops
        self._pushed: list[int] = []  # and not decoded
        self._ids = _last_word(decode, prompt)  # a window: `_read` ids that are out, then new ones
        self._read = len(self._ids)
        self._shown = len(decode(self._ids)) if self._ids else 0  # characters of it that are out
        self._held = ""  # may be the beginning of a stop string
        self._taken = 0
        self._first = 0  # of the tokens whose text has not all been taken

    @property
    def stopped(self) -> bool:
        """Says whether a stop string is complete."""
        return self.stop is not None

    def push(self, token: int) -> bool:
        """Adds a token; returns True once a stop string is complete, before which the text ends."""
        self._pushed.append(token)
        if self._stops:
            self.settle()
        return self.stopped

    def settle(self) -> None:
        """Decodes all tokens that were pushed."""
        for token in self._pushed:
            self._release(self._piece(token), token)
            self.ends.append(len(self.text) + len(self._held))
        self._pushed.clear()

    def _piece(self, token: int) -> str:
        """Returns the text that this token completes; decodes once, for most tokens."""
        self._ids.append(token)
        text = self._decode(self._ids)
        piece = text[self._shown : self._settled(text)]
        self._shown += len(piece)
        if piece and not text.endswith(REPLACEMENT):
            last, self._read = self._read, len(self._ids)
            if self._read > MAX_KNOWN:
                # keep the last tokens: some decoders treat the first id of a list differently
                del self._ids[:last]
                self._read = len(self._ids)
                self._shown = len(self._decode(self._ids))
        elif len(self._ids) > MAX_WINDOW:  # of bytes that become no character
            num_waiting = len(text) - self._shown
            del self._ids[:-MAX_CHARACTER_BYTES]
            self._read = 0
            self._shown = max(0, len(self._decode(self._ids)) - num_waiting)
        return piece

    def finish(self) -> None:
        """Releases the text held back, as no more tokens come."""
        self.settle()
        text = self._decode(self._ids) if self._ids else ""
        self._release(text[self._shown :])
        self._shown = max(self._shown, len(text))
        self.text += self._held
        self._held = ""
        if self.ends:
            self.ends[-1] = len(self.text)

    def take(self) -> str:
        """Returns the text released since the last call."""
        self.settle()
        piece = self.text[self._taken :]
        self._taken = len(self.text)
        return piece

    def take_pieces(self) -> list[tuple[int, str]]:
        """Returns the text released since the last call in pieces: the number of a token, from 0
        on, and the text that it completed.

        Example, stop "END": after "a", "E", "N" this returns [(0, "a")], and after another "x"
        [(1, "E"), (2, "N"), (3, "x")].
        """
        self.settle()
        pieces = []
        while self._taken < len(self.text):
            end = min(self.ends[self._first], len(self.text))
            if end > self._taken:
                pieces.append((self._first, self.text[self._taken : end]))
                self._taken = end
            if end == self.ends[self._first] and self._first + 1 < len(self.ends):
                self._first += 1  # but for the last one, to which `finish` may add
        return pieces

    def _settled(self, text: str) -> int:
        """Returns how many characters of the window's text no later token can change.

        Bytes that are no character yet become U+FFFD. They may be the beginning of one as long as
        three of them, and so at most the last three tokens that have any, wait for its end.
        """
        if not text.endswith(REPLACEMENT):
            return len(text)
        new = [at for at in range(self._read, len(self._ids)) if self._decode([self._ids[at]])]
        if len(new) < MAX_CHARACTER_BYTES:
            return self._shown
        settled = self._decode(self._ids[: new[1 - MAX_CHARACTER_BYTES]])
        return len(settled) if text.startswith(settled) else self._shown

    def _release(self, piece: str, token: int | None = None) -> None:
        if self.stopped:
            return
        text, begin = self._held + piece, 0
        if self._reader is not None:
            ids = [] if token is None else [token]
            self._reader.push(piece, token is None, ids, [len(self.text) + len(text)])
            place = self._reader.begin_of_text
            if place is None and not self._reader.is_thinking:  # it may become either
                self._held = text
                return
            begin = len(text) if place is None else max(0, place - len(self.text))
        found = [(at, stop) for stop in self._stops if (at := text.find(stop, begin)) >= 0]
        if found:
            at, self.stop = min(found, key=lambda place: place[0])
        else:
            at = len(text) - overlap(text[begin:], *self._stops)
        released, self.text = self.text, ""
        released += text[:at]  # in place, which Python does for a local name alone
        self.text = released
        self._held = "" if found else text[at:]


def _last_word(decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> list[int]:
    """Returns the last few ids of a prompt that have text, none if a control token or half a
    character is its end: a text begins there."""
    last = list(prompt[-MAX_WORD_TOKENS:])
    for at in reversed(range(len(last))):
        if not decode([last[at]] * 2):  # a control token; a space on its own may be dropped
            del last[: at + 1]
            break
    return [] if decode(last).endswith(REPLACEMENT) else last
