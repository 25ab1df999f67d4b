"""Declares what the runtime needs of a library that reads grammars."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """Reads a text token by token and knows which tokens its grammar allows next.

    A matcher begins before the first token of the answer. What it says depends only on the tokens
    read, and not on how it came there. The end of the answer is an EOS token, which is allowed
    where the grammar is complete. All methods raise UserError if the grammar turns out to be too
    complex to be followed.
    """

    def advance(self, token: int) -> bool:
        """Reads a token. Returns False, and reads nothing, if the grammar does not allow it."""

    def retreat(self, num_tokens: int) -> None:
        """Takes back the tokens read last."""

    def allowed(self) -> np.ndarray:
        """Returns which tokens may come next, bool[V]; at least one may."""

    def forced(self, most: int) -> list[int]:
        """Returns at most `most` tokens that continue the text as far as the grammar determines
        its characters.

        They are a good guess and no more: a draft of them is verified like any other. EOS is the
        last one where nothing but the end may follow.
        """


def read(matcher: Matcher, tokens: Sequence[int]) -> int:
    """Reads tokens up to the first that is not allowed; returns how many were read."""
    for num_read, token in enumerate(tokens):
        if not matcher.advance(token):
            return num_read
    return len(tokens)
