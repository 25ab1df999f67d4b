"""Drafts by prompt lookup: what followed the end of the text earlier in this very text.

It needs no model and no features, only an index of the text, extended token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_runtime.proposers.text_index import TextIndex
from spec_runtime.step import Step
from spec_runtime.trees.best_first import grow_best_first
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree


class LookupProposer:
    """Drafts the likeliest continuations of the longest suffix that occurred before, and of its own
    suffixes.

    Example with the text "a b c d a b" and root "b": the 3-gram "d a b" is new, the 2-gram "a b"
    was followed by "c d a b", so the tree is the root with that chain. With `memory`, up to so many
    tokens of earlier answers are looked up as well. Of a growth that is not `Grown`, only the size
    counts: a rank says nothing about a match.
    """

    wants_features = False
    run_seconds = 0.0

    def __init__(self, memory: int = 0) -> None:
        self._index = TextIndex(memory)
        self._prompt_length = 0

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        assert len(self._index) == reused, (len(self._index), reused)
        self._index.extend(prompt[reused:])
        self._prompt_length = len(prompt)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        index = self._index
        index.extend([token])
        return grow_best_first(token, index.end(), index.continuations, index.advance, budget)

    def commit(self, step: Step) -> None:
        # the root came with `propose`, the last token will come with the next one
        self._index.extend(step.tokens[:-1])

    def truncate(self, length: int) -> None:
        # a new request begins: what stands behind the last prompt is its answer
        self._index.remember(self._prompt_length)
        self._index.truncate(length)
        self._prompt_length = min(self._prompt_length, length)


class PublishedLookupProposer:
    """Drafts as the authors of prompt lookup published it, to compare with.

    The last 3 tokens, else the last 2, else the last one are looked for from the text's beginning
    on. The first match with 10 tokens behind it gives these as a chain.
    """

    wants_features = False
    run_seconds = 0.0

    def __init__(self, max_ngram: int = 3, num_tokens: int = 10) -> None:
        self._max_ngram, self._num_tokens = max_ngram, num_tokens
        self._tokens: list[int] = []
        # n-gram -> where its continuations begin, oldest first
        self._starts: dict[tuple[int, ...], list[int]] = {}

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        assert len(self._tokens) == reused, (len(self._tokens), reused)
        self._extend(prompt[reused:])

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self._extend([token])
        length = min(budget.max_nodes - 1, self._num_tokens)
        if budget.max_depth is not None:
            length = min(length, budget.max_depth)
        return TokenTree.chain([token, *self._continuation()[:length]])

    def commit(self, step: Step) -> None:
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

    def _continuation(self) -> list[int]:
        """Returns the tokens behind the first match that is followed by enough of them."""
        end = len(self._tokens)
        for n in range(min(self._max_ngram, end), 0, -1):
            start = self._starts[tuple(self._tokens[end - n :])][0]
            if start + self._num_tokens <= end and start < end - n:
                return self._tokens[start : start + self._num_tokens]
        return []
