"""Describes what one verify pass commits, and decides where a generation ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spec_runtime.sampling import TokenLogprob
from spec_runtime.target import Verified


@dataclass(frozen=True)
class Step:
    """What one verify pass committed: as many tokens as rows.

    tokens: the accepted draft, then the bonus (unless truncated before it). path: the committed
    rows as node ids, root first. features f32[P, F]: of these rows, if the proposer wants them.
    logprobs: of `tokens`, if asked for. The step of the prompt has the first token and no rows.
    """

    tokens: list[int]
    num_accepted: int  # of `tokens`, how many were drafted
    path: list[int] = field(default_factory=list)
    features: np.ndarray | None = field(default=None, repr=False)
    verified: Verified | None = field(default=None, repr=False)  # until the target's next run
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)


class Limits:
    """Where generation ends: EOS and stop ids, a hook for stop strings, the number of tokens."""

    def __init__(
        self,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        ends_stop_string: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.remaining = max_tokens
        self.finish_reason: str | None = None if max_tokens > 0 else "length"
        self._stop_ids = stop_ids
        self._ends_stop_string = ends_stop_string

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens up to and including the one that ends generation, if one of them does."""
        for num_kept, token in enumerate(tokens, 1):
            self.remaining -= 1
            # the hook is asked first: it has to see every committed token
            if self._ends_stop_string(token) or token in self._stop_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tokens[:num_kept]
        return tokens
