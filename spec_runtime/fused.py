"""Runs the fused graph (graphs/fused_step.py): one run verifies, accepts and drafts.

Only for greedy requests without penalties, bias or logprobs. The graph keeps tree and slots; this
file mirrors what became of them in the caches, so that the ordinary loop can go on at any step.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np

from spec_runtime.backends.ort import mask_width
from spec_runtime.backends.stepper import OrtStepper
from spec_runtime.bundle import DRAFT, Bundle, Graph
from spec_runtime.kv import Cache, SlotCache
from spec_runtime.stats import Clock, Stats
from spec_runtime.step import Limits, Step
from spec_runtime.target import Target


class Follower(Protocol):
    """A one-pass proposer, as seen from here: its state in step with a target that it did not see
    run."""

    def enter(self, token: int) -> None:
        """Before the first step, whose root is `token`: makes all rows before it complete."""

    def follow(self, tokens: list[int]) -> None:
        """The drafter's rows of these tokens' step are in its cache. tokens: as in Step."""

    def leave(self, feature_1F: np.ndarray) -> None:
        """After the last step: the feature of the last committed position."""


class FusedSteps:
    """A bundle's fused graph over the target and a proposer on the same device.

    Example of one step's result, D = 2: [7, 8, 9, 0, 2, 3, 0, 5]: tokens 7 and 8 were accepted
    (nodes 2 and 3), 9 is the bonus, node 3 had no child, 5 nodes were drafted.
    """

    def __init__(self, stepper: OrtStepper, graph: Graph, cache: Cache, follower: Follower) -> None:
        assert isinstance(cache, SlotCache), cache
        shapes = {spec.name: spec.shape for spec in (*graph.inputs, *graph.outputs)}
        self.num_nodes = int(shapes["state.token"][0])
        self.depth = int(shapes["path_features"][0]) - 1
        self.num_steps = 0
        self._stepper, self._cache, self._follower = stepper, cache, follower

    def run(
        self, token: int, limits: Limits, stats: Stats, clock: Clock
    ) -> Generator[Step, None, int]:
        """Yields steps while they fit into the cache and `limits` allows; returns the last token.

        `token`: the root of the first. Its tree is that root alone.
        """
        cache, N, P = self._cache, self.num_nodes, self.depth + 1
        slot_N, fresh = cache.free_slots(N)
        if self._need(fresh) > cache.capacity:
            return token
        clock.start()
        begin = time.perf_counter()
        self._follower.enter(token)
        stats.engine_seconds += time.perf_counter() - begin
        width = mask_width(self._need(fresh), cache.capacity)
        self._stepper.start(self._first_state(token, slot_N, fresh, width))
        kept = 0
        try:
            while limits.finish_reason is None and self._need(fresh) <= cache.capacity:
                clock.start()
                if self._need(fresh) > width:
                    width = mask_width(self._need(fresh), cache.capacity)
                    state = self._stepper.state()
                    missing = width - len(state["taken"])
                    state["taken"] = np.append(state["taken"], np.zeros(missing, np.bool_))
                    self._stepper.start(state)
                begin = time.perf_counter()
                result = self._stepper.step()
                stats.engine_seconds += time.perf_counter() - begin
                clock.lap("verify")
                self.num_steps += 1
                emitted, path = result[:P], result[P : 2 * P]
                count = int((path >= 0).sum())
                cache.hold(slot_N)
                slot_N = slot_N.copy()
                slot_N[path[:count]] = fresh + np.arange(count)
                fresh += count
                tokens = limits.cut(emitted[:count].tolist())
                kept = len(tokens)
                num_accepted = min(kept, count - 1)
                step = Step(tokens, num_accepted, path[:kept].tolist())
                cache.commit(step.path)
                self._follower.follow(tokens)
                clock.lap("commit")
                missed = num_accepted < kept and bool(result[2 * P])
                stats.count(kept, num_accepted, int(result[2 * P + 1]), missed)
                token = tokens[-1]
                clock.lap("other")
                yield step
        finally:
            if kept:
                feature_1F = self._stepper.fetch("path_features")[kept - 1 : kept]
                self._follower.leave(feature_1F)
        return token

    def _need(self, fresh: int) -> int:
        """Cache rows that a step can reach: the path's new slots, and the drafter's rows, at most
        2 D + 1 behind the committed ones (fewer than `fresh`)."""
        return fresh + 2 * self.depth + 1

    def _first_state(
        self, token: int, slot_N: np.ndarray, fresh: int, width: int
    ) -> dict[str, np.ndarray]:
        N = self.num_nodes
        zeros = np.zeros(N, np.int64)
        token_N = np.full(N, -1)
        token_N[0] = token
        return {
            "token": token_N,
            "parent": zeros,
            "depth": zeros,
            "ancestor": np.eye(N, dtype=np.bool_),
            "slot": slot_N,
            "taken": self._cache.taken_S[:width],
            "counts": np.array([self._cache.length, fresh]),
        }


def open_steps(
    bundle: Bundle, graph: Graph, target: Target, proposer: Any, threads: int | None
) -> FusedSteps:
    """The bundle's fused graph, on the caches of `target` and of a one-pass proposer opened from
    the same bundle."""
    backend, cache = target.lend()
    follower, drafter_backend = proposer.fusable()
    lenders = {"": backend} | ({} if drafter_backend is None else {DRAFT: drafter_backend})
    is_cuda = bundle.backend.startswith("cuda")
    stepper = OrtStepper(
        bundle.file(graph.file),
        graph,
        lenders,
        threads,
        device="cuda" if is_cuda else "cpu",
        is_captured=bundle.backend == "cuda",
    )
    return FusedSteps(stepper, graph, cache, follower)
