"""Drafts by prompt lookup: what followed the last few tokens earlier in this very text.

It needs no model and no features, only an index of n-grams, extended token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_runtime.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import TreeBuilder
from spec_runtime.trees.tree import TokenTree

# One more match is worth as much as this many more tokens of the match before it (on 300 answers
# of the demo target: accepted length 1.50 with one match, 1.55 to 1.56 with four at 4, 2 or 1).
_TOKENS_PER_MATCH = 2


class LookupProposer:
    """Drafts the continuations of the longest n-gram that occurred before, newest match first.

    Example with the text "a b c d a b" and root "b": the 3-gram "d a b" is new, the 2-gram "a b"
    was followed by "c d a b", so the tree is the root with that chain. Several matches share the
    node budget, and their common beginnings.
    """

    wants_features = False
    run_seconds = 0.0

    def __init__(
        self, max_ngram: int = 3, num_tokens: int = 10, max_matches: int = 4, min_ngram: int = 1
    ) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._max_matches = max_matches
        self._tokens: list[int] = []
        # n-gram -> where its continuations begin, oldest first
        self._starts: dict[tuple[int, ...], list[int]] = {}
        # (match, depth) in the order nodes are added; each match's own depths ascend
        self._order = sorted(
            ((match, depth) for match in range(max_matches) for depth in range(num_tokens)),
            key=lambda node: (node[1] + _TOKENS_PER_MATCH * node[0], node[0]),
        )

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        assert len(self._tokens) == reused, (len(self._tokens), reused)
        self._extend(prompt[reused:])

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self._extend([token])
        tree = TreeBuilder(token)
        starts = self._matches()
        node_of = [0] * len(starts)
        max_depth = len(self._tokens) if budget.max_depth is None else budget.max_depth
        for match, depth in self._order if starts else ():
            if len(tree) >= budget.max_nodes:
                break
            if match < len(starts) and depth < max_depth:
                at = starts[match] + depth
                if at < len(self._tokens):
                    node_of[match] = tree.add(node_of[match], self._tokens[at])
        return tree.build()

    def commit(self, step: Step) -> None:
        # the root came with `propose`, the last token will come with the next one
        self._extend(step.tokens[:-1])

    def truncate(self, length: int) -> None:
        if length == 0:
            self._tokens.clear()
            self._starts.clear()
        while len(self._tokens) > length:
            end = len(self._tokens)
            for n in range(1, min(self._max_ngram, end) + 1):
                self._starts[tuple(self._tokens[end - n :])].pop()
            self._tokens.pop()

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in range(1, min(self._max_ngram, end) + 1):
                self._starts.setdefault(tuple(self._tokens[end - n :]), []).append(end)

    def _matches(self) -> list[int]:
        """Returns where earlier occurrences of the longest known suffix go on, newest first."""
        end = len(self._tokens)
        for n in range(min(self._max_ngram, end), self._min_ngram - 1, -1):
            # the last entry is the suffix itself
            earlier = self._starts[tuple(self._tokens[end - n :])][-1 - self._max_matches : -1]
            if earlier:
                return earlier[::-1]
        return []
