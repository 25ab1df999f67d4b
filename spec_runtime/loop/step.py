"""Describes what one verify pass commits, and decides where a generation ends."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spec_runtime.loop.stats import Stats
from spec_runtime.loop.target import Verified
from spec_runtime.sampling import TokenLogprob
from spec_runtime.trees.tree import TokenTree


@dataclass(frozen=True)
class Step:
    """Holds what one verify pass committed: as many tokens as rows.

    `tokens` are the accepted draft and then the bonus, unless generation ended before it. `path`
    are the committed rows as node ids, root first. `features` f32[P, F] are those of the rows, if
    the proposer wants them; `logprobs` belong to `tokens`, if the request asks for them.
    `num_drafted` counts the nodes of the `tree` without the root. The prompt's step has the first
    token, no path, and the features of all rows that the prompt's pass added.
    """

    tokens: list[int]
    num_accepted: int  # how many of `tokens` were drafted
    path: list[int] = field(default_factory=list)
    features: np.ndarray | None = field(default=None, repr=False)
    # Valid until the next target run. None for a proposer whose tree was changed by a grammar.
    verified: Verified | None = field(default=None, repr=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    num_drafted: int = 0
    tree: TokenTree | None = field(default=None, repr=False)  # None in the prompt's step
    # The counts are the generation's so far, and go on changing.
    stats: Stats | None = field(default=None, repr=False)

    @property
    def depths(self) -> list[int]:
        """Returns the depth in the tree at which each token was drafted; 0 is the target's own
        token.

        >>> Step(tokens=[7, 8, 9], num_accepted=2).depths
        [1, 2, 0]
        """
        return [i if i <= self.num_accepted else 0 for i in range(1, len(self.tokens) + 1)]


class Ending:
    """Decides where generation ends: at EOS and stop ids, stop strings, or a number of tokens.

    `finish_reason` is None until then, and "stop" or "length" from then on. Between two steps
    `interruption` may end it too: it returns the reason, or None while generation may go on.
    """

    def __init__(
        self,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        ends_stop_string: Callable[[int], bool] = lambda token: False,
        interruption: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.remaining = max_tokens
        self.finish_reason: str | None = None if max_tokens > 0 else "length"
        self.stop_ids = stop_ids
        self._ends_stop_string = ends_stop_string
        self._interruption = interruption

    def goes_on(self) -> bool:
        """Asks, before a step, whether generation goes on, and notes why not."""
        if self.finish_reason is None:
            self.finish_reason = self._interruption()
        return self.finish_reason is None

    def cut(self, tokens: list[int]) -> list[int]:
        """Returns the tokens up to and including the one that ends generation, if one does."""
        for num_tokens, token in enumerate(tokens, 1):
            self.remaining -= 1
            # The hook is asked first because it has to see every committed token.
            if self._ends_stop_string(token) or token in self.stop_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tokens[:num_tokens]
        return tokens


def end_step(path: list[int], tokens: list[int], ending: Ending) -> Step:
    """Returns the step that accepted `path` and emitted `tokens`, cut where generation ends.

    `tokens` are those of the path's drafted nodes and the bonus. If the last token that remains was
    drafted, its row is not committed: it becomes the root of what follows, like any bonus.

    Example: path [0, 2, 5] with tokens [7, 8, 9] has two accepted tokens. If 8 is the EOS, the step
    has tokens [7, 8], two accepted, and path [0, 2].
    """
    tokens = ending.cut(tokens)
    return Step(tokens, min(len(tokens), len(path) - 1), path[: len(tokens)])


def count_step(stats: Stats, step: Step, has_children: bool) -> None:
    """Adds a step to the statistics; `has_children` says whether the last node of the path had
    children, all of which were then refused."""
    missed = has_children and step.num_accepted < len(step.tokens)
    stats.count(len(step.tokens), step.num_accepted, step.num_drafted, missed)
