"""One-pass drafters: one graph run both takes in what was committed and guesses K + 1 positions.

For ParallelSpec. The drafter's row t holds the pair (feature of position t, token t + 1), so the
row of the last committed position waits for the root. This file knows the pairs, not the network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spec_runtime.backends import Backend
from spec_runtime.kv import Cache, open_cache
from spec_runtime.tree import Budget, TokenTree, chain_parents, grow

if TYPE_CHECKING:
    from spec_runtime.bundle import Bundle, DrafterInfo
    from spec_runtime.generate import Step

CHUNK_ROWS = 256


class OnePassProposer:
    """Mask rows behind the committed rows, in one chain; their guesses grown into a tree.

    Example, 2 masks, committed tokens a b c (rows 0 and 1 of the drafter done) and root d: the
    run has row 2 = (feature of c, d) and masks 1 and 2 at positions 3 and 4; the three guess
    the tokens at positions 4, 5 and 6. Row 2 stays, the mask rows are scratch.
    """

    def __init__(
        self,
        backend: Backend,
        cache: Cache,
        *,
        num_masks: int,
        mask_token_base: int,
        wants_features: bool,
    ) -> None:
        self.wants_features = wants_features
        self.run_seconds = 0.0
        self._backend = backend
        self._cache = cache
        self._mask_ids = np.arange(mask_token_base, mask_token_base + num_masks, dtype=np.int64)
        self._tokens: list[int] = []
        # of the positions from cache.length on, whose rows are still to be run
        self._features_PF: np.ndarray | None = None

    @classmethod
    def open(cls, bundle: Bundle, info: DrafterInfo | None, threads: int | None) -> OnePassProposer:
        from spec_runtime.backends import open_graph  # here: it may pull in an engine

        assert info is not None, "a trained drafter needs its manifest entry"
        missing = {"num_masks", "mask_token_base", "inputs"} - set(info.config)
        if missing or len(info.graphs) != 1:
            raise ValueError(
                f"drafter {info.name!r}: got config keys {sorted(info.config)} and graphs "
                f"{sorted(info.graphs)}, expected num_masks, mask_token_base, inputs and one "
                "graph; build the bundle again"
            )
        capacity = bundle.manifest.target.max_length + bundle.manifest.target.scratch
        (graph,) = info.graphs.values()
        return cls(
            open_graph(bundle, graph, capacity, threads),
            open_cache(graph.form, capacity),
            num_masks=info.config["num_masks"],
            mask_token_base=info.config["mask_token_base"],
            wants_features=info.config["inputs"] != "tokens",
        )

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        assert len(self._tokens) == reused >= self._cache.length, (len(self._tokens), reused)
        self._tokens += prompt[reused:]
        self._take(features_TF)
        self._catch_up(most_waiting=0)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self._tokens.append(token)
        if budget.is_root_only:
            return TokenTree.root(token)
        self._catch_up(most_waiting=CHUNK_ROWS)
        outputs = self._run(self._mask_ids, ["guess_ids", "guess_log_probs"])
        return grow(token, outputs["guess_ids"], outputs["guess_log_probs"], budget)

    def commit(self, step: Step) -> None:
        # the root came with `propose`, the last token will come with the next one
        self._tokens += step.tokens[:-1]
        self._take(step.features)

    def truncate(self, length: int) -> None:
        del self._tokens[length:]
        if length <= self._cache.length:
            self._cache.truncate(length)
            self._features_PF = None
        elif self._features_PF is not None:
            self._features_PF = self._features_PF[: length - self._cache.length]

    def _take(self, features_PF: np.ndarray | None) -> None:
        if self._features_PF is None:
            self._features_PF = features_PF
        elif features_PF is not None:
            self._features_PF = np.concatenate([self._features_PF, features_PF])

    def _catch_up(self, most_waiting: int) -> None:
        """Runs pairs in chunks until at most so many wait."""
        while len(self._tokens) - 1 - self._cache.length > most_waiting:
            self._run(self._mask_ids[:0], [])

    def _run(self, mask_ids: np.ndarray, outputs: list[str]) -> dict[str, np.ndarray]:
        """Up to CHUNK_ROWS waiting pairs, mask rows behind them; keeps the pairs' rows."""
        begin = self._cache.length
        pair_tokens = self._tokens[begin + 1 : begin + 1 + CHUNK_ROWS]
        c, n = len(pair_tokens), len(pair_tokens) + len(mask_ids)
        assert c >= 1, "no pair is waiting"
        feeds = self._cache.place(chain_parents(n))
        feeds["input_ids"] = np.concatenate([np.array(pair_tokens, np.int64), mask_ids])[None]
        feeds["logit_rows"] = np.arange(c - 1, n, dtype=np.int64)
        if self.wants_features:
            waiting_PF = self._features_PF
            assert waiting_PF is not None, "no features"
            assert len(waiting_PF) >= c, (len(waiting_PF), c)
            features_1NF = np.zeros((1, n, waiting_PF.shape[1]), np.float32)
            features_1NF[0, :c] = waiting_PF[:c]
            feeds["features"] = features_1NF
            self._features_PF = waiting_PF[c:].copy() if len(waiting_PF) > c else None
        start = time.perf_counter()
        result = self._backend.run(feeds, outputs)
        self.run_seconds += time.perf_counter() - start
        self._cache.commit(range(c))
        return result
