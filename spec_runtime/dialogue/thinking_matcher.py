"""Lets a model think before it writes a text of a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spec_runtime.grammar.base import Matcher


class ThinkingTokens(NamedTuple):
    """The tokens between which a model thinks; `opening` is None where the prompt ends inside of
    its thinking. One of `blanks` may follow the closing ones."""

    opening: int | None
    closing: list[int]
    blanks: Sequence[int]


class ThinkingMatcher:
    """Implements grammar.base.Matcher: the grammar of another matcher begins after the
    thinking, or at once if the first token does not open any. EOS does not end the thinking.

    Example, of the grammar "yes": "<think>", "a", "</think>", "\\n", "yes".
    """

    def __init__(
        self, matcher: Matcher, tokens: ThinkingTokens, eos: Sequence[int], num_logits: int
    ) -> None:
        self._matcher, self._tokens = matcher, tokens
        self._eos, self._num_logits = frozenset(eos), num_logits
        self._before: list[int] = []  # tokens read before the grammar's
        self._num_inside = 0  # tokens that the other matcher has read

    def advance(self, token: int) -> bool:
        """See Matcher.advance."""
        if self._is_thinking:
            is_read = token not in self._eos
        elif not self._before and token == self._tokens.opening:
            is_read = True
        elif self._matcher.advance(token):
            self._num_inside += 1
            return True
        else:
            is_read = token in self._extra
        if is_read:
            self._before.append(token)
        return is_read

    def retreat(self, num_tokens: int) -> None:
        """See Matcher.retreat."""
        num_inside = min(num_tokens, self._num_inside)
        if num_inside:
            self._matcher.retreat(num_inside)
            self._num_inside -= num_inside
        del self._before[len(self._before) - (num_tokens - num_inside) :]

    def allowed(self) -> np.ndarray:
        """See Matcher.allowed."""
        if self._is_thinking:
            allowed_V = np.ones(self._num_logits, np.bool_)
            allowed_V[[token for token in self._eos if token < self._num_logits]] = False
            return allowed_V
        allowed_V = self._matcher.allowed()
        if extra := self._extra:
            allowed_V = allowed_V.copy()
            allowed_V[[*extra]] = True
        return allowed_V

    def forced(self, most: int) -> list[int]:
        """See Matcher.forced."""
        is_certain = not self._is_thinking and not self._extra
        return self._matcher.forced(most) if is_certain else []

    @property
    def _is_thinking(self) -> bool:
        """Says whether the closing token has still to come."""
        if self._num_inside or self._is_closed(0) or self._is_closed(1):
            return False
        return bool(self._before) or self._tokens.opening is None

    def _is_closed(self, num_after: int) -> bool:
        """Says whether the last tokens but this many are the closing ones."""
        end = len(self._before) - num_after
        begin = end - len(self._tokens.closing)
        return begin >= 0 and self._before[begin:end] == self._tokens.closing

    @property
    def _extra(self) -> Sequence[int]:
        """Returns the tokens that may come besides the grammar's: one that opens the thinking, or a
        blank after it."""
        if self._num_inside or self._is_thinking:
            return ()
        if not self._before:
            return () if self._tokens.opening is None else (self._tokens.opening,)
        return self._tokens.blanks if self._is_closed(0) else ()
