"""Counts what a generation cost and how much of its drafts was accepted.

Every metric of the project is defined here, and only here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

PHASES = ("prefill", "draft", "verify", "accept", "commit", "other")


@dataclass
class Stats:
    """Holds the counts and seconds of one generation, or of several together (`total`).

    `prefill` covers the prompt's pass, the first token's draw and the proposer's start. That first
    token is in no other count: steps, committed_tokens, drafted_tokens and all other seconds belong
    to decoding. The time that the caller spends between two steps is not counted.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, whose KV was still there
    steps: int = 0  # verify passes
    committed_tokens: int = 0  # after truncation
    drafted_tokens: int = 0  # tree nodes without the roots
    drafted_steps: int = 0  # those whose trees had drafted nodes
    engine_seconds: float = 0.0  # of decoding, spent inside graph runs (target's and drafter's)
    timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    depth_trials: list[int] = field(default_factory=list)  # [0] is depth 1
    depth_accepts: list[int] = field(default_factory=list)

    def count(self, num_tokens: int, num_accepted: int, num_drafted: int, missed: bool) -> None:
        """Adds one verify step: its committed tokens, how many of them were drafted nodes, the
        tree's drafted nodes, and whether the last accepted node had children that were all
        refused."""
        self.steps += 1
        self.committed_tokens += num_tokens
        self.drafted_tokens += num_drafted
        self.drafted_steps += num_drafted > 0
        num_tried = num_accepted + missed
        while len(self.depth_trials) < num_tried:
            self.depth_trials.append(0)
            self.depth_accepts.append(0)
        for d in range(num_tried):
            self.depth_trials[d] += 1
            self.depth_accepts[d] += d < num_accepted

    @property
    def prefill_seconds(self) -> float:
        return self.timings["prefill"]

    @property
    def decode_seconds(self) -> float:
        return sum(self.timings.values()) - self.timings["prefill"]

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second of decoding, without prefill; 0.0 if nothing was decoded."""
        return self.committed_tokens / self.decode_seconds if self.committed_tokens else 0.0

    @property
    def accepted_length(self) -> float:
        """Committed tokens per verify step, bonus included: 1.0 for plain decoding, 0.0 without
        steps."""
        return self.committed_tokens / self.steps if self.steps else 0.0

    @property
    def drafted_length(self) -> float:
        """Committed tokens per step with drafted nodes, bonus included; 1.0 without such steps."""
        return 1.0 + ratio(sum(self.depth_accepts), self.drafted_steps)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """P(accepted at depth d, given that depth d - 1 was accepted and had a child); entry 0 is
        d = 1."""
        pairs = zip(self.depth_accepts, self.depth_trials, strict=True)
        return [accepts / trials for accepts, trials in pairs]

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Returns the sum of `parts`, whose ratios weigh each step and each second alike."""
        whole = cls()
        for part in parts:
            for name, count in vars(part).items():
                mine = getattr(whole, name)
                if isinstance(count, dict):
                    for phase in PHASES:
                        mine[phase] += count[phase]
                elif isinstance(count, list):
                    mine[:] = [a + b for a, b in zip_longest(mine, count, fillvalue=0)]
                else:
                    setattr(whole, name, mine + count)
        return whole


def ratio(a: float, b: float) -> float:
    """Returns a / b, and 0.0 where nothing was measured."""
    return a / b if b else 0.0


class Clock:
    """Splits time into phases: call `start`, then `lap(phase)` after each phase."""

    def __init__(self, timings: dict[str, float]) -> None:
        self._timings = timings
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._timings[phase] += now - self._last
        self._last = now
