"""Lets a model think before it writes a text of a grammar."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spec_runtime.grammar.base import Matcher


class ThinkingTokens(NamedTuple):
    """The tokens between which a model thinks; `opening` is None where the prompt ends inside of
    its thinking. One of `blanks` may follow the closing ones. `ending` is what ends the thinking
    where it stands, `head` what opens each message of it, empty for a model that writes none."""

    opening: int | None
    closing: list[int]
    blanks: Sequence[int]
    ending: Sequence[int] = ()
    head: Sequence[int] = ()


class AnyText:
    """Implements grammar.base.Matcher: allows every token."""

    def __init__(self, num_logits: int) -> None:
        self._allowed_V = np.ones(num_logits, np.bool_)

    def advance(self, token: int) -> bool:
        return True

    def retreat(self, num_tokens: int) -> None:
        """See Matcher.retreat."""

    def allowed(self) -> np.ndarray:
        return self._allowed_V

    def forced(self, most: int) -> list[int]:
        return []


class ThinkingMatcher:
    """Implements grammar.base.Matcher: the grammar of another matcher begins after the
    thinking, or at once if the first token does not open any. EOS does not end the thinking. After
    `budget` tokens of it, what ends it has to come; None is no budget.

    Example, of the grammar "yes": "<think>", "a", "</think>", "\\n", "yes".
    """

    def __init__(
        self,
        matcher: Matcher,
        tokens: ThinkingTokens,
        eos: Sequence[int],
        num_logits: int,
        budget: int | None = None,
    ) -> None:
        self._matcher, self._tokens, self._budget = matcher, tokens, budget
        self._eos, self._num_logits = frozenset(eos), num_logits
        self._before: list[int] = []  # tokens read before the grammar's
        self._num_inside = 0  # tokens that the other matcher has read

    def advance(self, token: int) -> bool:
        if self._is_thinking:
            due = self._due
            is_read = token == due[0] if due else token not in self._eos
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
        num_inside = min(num_tokens, self._num_inside)
        if num_inside:
            self._matcher.retreat(num_inside)
            self._num_inside -= num_inside
        del self._before[len(self._before) - (num_tokens - num_inside) :]

    def allowed(self) -> np.ndarray:
        if self._is_thinking:
            due = self._due
            allowed_V = np.full(self._num_logits, not due)
            allowed_V[due[:1] or [each for each in self._eos if each < self._num_logits]] = bool(
                due
            )
            return allowed_V
        allowed_V = self._matcher.allowed()
        if extra := self._extra:
            allowed_V = allowed_V.copy()
            allowed_V[[*extra]] = True
        return allowed_V

    def forced(self, most: int) -> list[int]:
        if self._is_thinking:
            return self._due[:most]
        is_certain = not self._extra
        return self._matcher.forced(most) if is_certain else []

    @property
    def _is_thinking(self) -> bool:
        """Says whether the closing token has still to come."""
        if self._num_inside or self._is_closed(0) or self._is_closed(1):
            return False
        return bool(self._before) or self._tokens.opening is None

    @property
    def _due(self) -> list[int]:
        """Returns what has to come to end the thinking, nothing within the budget, or outside of
        its messages: a call has an end of its own, and a head has to be whole."""
        before, (opening, _, _, ending, head) = self._before, self._tokens
        if self._budget is None or len(before) - (opening is not None) < self._budget:
            return []
        for length in range(len(ending) - 1, 0, -1):
            if before[-length:] == [*ending[:length]]:
                return [*ending[length:]]
        is_inside = not head or _last_run(before, head) > _last_run(before, ending[:1])
        return [*ending] if is_inside else []

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


def _last_run(tokens: Sequence[int], run: Sequence[int]) -> int:
    """Returns the last place where these tokens stand, -1 if there is none."""
    places = range(len(tokens) - len(run), -1, -1)
    return next((at for at in places if [*tokens[at : at + len(run)]] == [*run]), -1)
