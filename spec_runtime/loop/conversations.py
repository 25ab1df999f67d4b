"""Knows which tokens the target's rows hold, and brings back those of earlier conversations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakSet

import numpy as np

from spec_runtime.interruption import Interrupted
from spec_runtime.loop.call import Call
from spec_runtime.loop.fair_lock import Holder
from spec_runtime.loop.row_store import ConversationRows, RestoredRows, RowStore, common_length
from spec_runtime.loop.step import Step
from spec_runtime.loop.target import Target

MIN_ROWS = 32  # fewer are read again sooner than copied, and are not worth their place


class Conversations:
    """Remembers one engine's calls: the rows of the last, and copies of earlier ones.

    The last call's rows are in the target as long as no other engine has run it. Copies take up to
    `max_bytes` on the host, 0 for none; they hold the features f32[T, F] of the rows too, where
    `feature_width` is F, or None if the drafter reads none. All methods but `__init__` need the
    target's lock.

    Those of other lanes, `others`, share the copies, and a call may begin with a copy of rows that
    another lane's target has, also while that lane's call goes on. One thread runs all lanes.
    """

    def __init__(
        self,
        target: Target,
        feature_width: int | None,
        max_bytes: int,
        others: Conversations | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self._target = target
        self._feature_width = feature_width
        self._store: RowStore = RowStore(max_bytes) if others is None else others._store
        self._lanes: WeakSet[Conversations] = WeakSet() if others is None else others._lanes
        self._lanes.add(self)
        self.are_shared = others is not None  # by lanes: each may need the others' rows
        self._holder: Holder | None = None  # of our last run
        self._held: list[int] = []  # tokens whose KV the target has while its rows are that run's
        self._prompt: list[int] = []  # of a call that goes on
        self._answered: list[int] = []  # prompt and answer of such a call, from its first token on
        self._features: list[np.ndarray] | None = None  # of all rows, if copies need them
        self._unproven: ConversationRows | None = None  # taken up by a call that has not ended well

    def begin(self, call: Call) -> tuple[int, RestoredRows | None]:
        """Returns how many of the prompt's rows the target has, perhaps brought back from a copy or
        copied from another lane; copies what it has of another conversation.

        From here to `end` no call relies on the target's rows, whatever interrupts this one.
        """
        target, store, prompt = self._target, self._store, call.prompt
        if self._unproven is not None:  # that call failed, perhaps because of them
            store.drop(self._unproven)
            self._unproven = None
        is_ours = self._is_ours
        target.rows_of = None
        may_reuse = self.may_reuse(call)
        length = common_length(self._held, prompt) if is_ours and may_reuse else 0
        kept, kept_length = store.find(prompt) if may_reuse else (None, 0)
        if may_reuse and target.keeps_rows:
            copied = self._copy_of_others(prompt, max(length, kept_length) + MIN_ROWS)
            if copied is not None:
                kept, kept_length = copied, len(copied.tokens)
        if self.max_bytes and is_ours and len(self._held) - length >= MIN_ROWS:
            store.add(self._copy(len(self._held)))
        self._prompt = prompt
        if kept is None or kept_length - length < MIN_ROWS:
            # One token fewer: the last row's feature and logits have to be computed anew.
            reused = max(0, length - 1)
            if not (self.max_bytes or self.are_shared) or (reused and self._features is None):
                self._features = None
            else:
                self._features = [np.concatenate(self._features)[:reused]] if self._features else []
            return reused, None
        reused = kept_length - 1
        self._unproven = kept
        target.restore_rows(kept.kv, reused)
        features = None if kept.features_TF is None else kept.features_TF[:reused]
        self._features = [] if features is None else [features]
        return reused, RestoredRows(features)

    def may_reuse(self, call: Call) -> bool:
        """Says whether a call may begin with rows of earlier ones.

        Where rows are not exact, they depend on which others were computed with them, and a seed
        would not give the same tokens again.
        """
        return call.reuse and (call.params.seed is None or self._target.has_exact_rows)

    def add(self, step: Step) -> None:
        """Takes in what a step committed."""
        if self._features is not None and step.features is not None:
            self._features.append(step.features)
        if self.are_shared:
            self._answered += step.tokens if self._answered else [*self._prompt, *step.tokens]

    def end(self, holder: Holder, tokens: list[int]) -> None:
        """Notes that the target's rows belong to the first of `tokens`, and may be relied on."""
        self._unproven = None
        self._answered = []
        self._held = tokens[: self._target.length]
        self._target.rows_of = self._holder = holder

    def fail(self) -> None:
        """Notes that the call ended in the midst of a step; no row may be relied on."""
        self._answered = []

    def num_common(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens at the beginning of the prompt have rows in the target."""
        return common_length(self._copyable, prompt)

    @property
    def num_held(self) -> int:
        """Returns how many tokens have rows in the target that may be copied."""
        return len(self._copyable)

    @property
    def _is_ours(self) -> bool:
        return self._holder is not None and self._target.rows_of is self._holder

    @property
    def _copyable(self) -> list[int]:
        """Returns the tokens of the rows that may be copied, also while a call goes on."""
        if self._feature_width is not None and self._features is None:
            return []
        if self._answered:
            return self._answered[: self._target.length]
        return self._held if self._is_ours else []

    def _copy_of_others(self, prompt: list[int], at_least: int) -> ConversationRows | None:
        """Returns a copy of the rows of another lane that the prompt begins with, if there are so
        many; of a lane that another thread has, none."""
        others = [lane for lane in self._lanes if lane is not self]
        most = max(others, key=lambda lane: lane.num_common(prompt), default=self)
        if most is self or most.num_common(prompt) < at_least:
            return None
        with suppress(Interrupted), most._target.lock.hold_beside():
            length = most.num_common(prompt)
            return most._copy(length) if length >= at_least else None
        return None

    def _copy(self, length: int) -> ConversationRows:
        """Returns copies of the first `length` rows that the target has of our last run."""
        features = np.concatenate(self._features)[:length] if self._features and length else None
        tokens = self._answered or self._held
        return ConversationRows(tokens[:length], self._target.copy_rows(length), features)
