"""Runs steps of the fused graph: one run verifies a tree, accepts a path and drafts the next tree.

Greedy requests without penalties, bias or logprobs take it. The graph keeps tree and slots itself;
this file mirrors them in the caches after each step, so that the ordinary loop can go on from any
step. `spec_export/graphs/fused_step.py` makes the graph.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

import numpy as np

from spec_runtime.backends import Runtime
from spec_runtime.backends.cuda.stepper import OrtStepper
from spec_runtime.backends.shapes import mask_width
from spec_runtime.bundle.manifest import DRAFT, Bundle, Graph
from spec_runtime.bundle.operators import require_known_graph
from spec_runtime.loop.generate import Generation
from spec_runtime.loop.kv import Cache, SlotCache
from spec_runtime.loop.proposer import Follower, Fusable, Proposer
from spec_runtime.loop.stats import Clock
from spec_runtime.loop.step import Step, count_step, end_step
from spec_runtime.loop.target import Target


class FusedSteps:
    """Steps of a bundle's fused graph, over the target's cache and a one-pass drafter's.

    A step returns, for a drafter of D guesses, D + 1 tokens, D + 1 nodes of the path (-1 after its
    end), whether the last node had children, and how many nodes were drafted. Example with D = 2:
    [7, 8, 9, 0, 2, 3, 0, 5] accepted tokens 7 and 8 (nodes 2 and 3) with the bonus 9; node 3 had no
    child, and 5 nodes were drafted.
    """

    def __init__(self, stepper: OrtStepper, graph: Graph, cache: Cache, follower: Follower) -> None:
        assert isinstance(cache, SlotCache), cache
        shapes = {spec.name: spec.shape for spec in (*graph.inputs, *graph.outputs)}
        self.num_nodes = int(shapes["state.token"][0])
        self.depth = int(shapes["path_features"][0]) - 1
        self.num_steps = 0
        self._stepper, self._cache, self._follower = stepper, cache, follower
        self._reads_whole_buffers = graph.attention == "full_buffer"

    def around(
        self, steps: Generator[Step, None, None], run: Generation
    ) -> Generator[Step, None, None]:
        """Yields the prompt's step of the loop, fused steps while they can be taken, and then the
        loop's again; see engine.StepRunner."""
        with closing(steps):
            yield next(steps)
            if run.params.is_plainly_greedy and run.target.strict_gap is None:
                yield from self._run(run)
            yield from steps

    def _run(self, run: Generation) -> Generator[Step, None, None]:
        """Yields steps while they fit into the cache and the generation goes on.

        The first step's tree is only its root, the last token committed.
        """
        cache, N, P = self._cache, self.num_nodes, self.depth + 1
        slot_N, fresh = cache.free_slots(N)
        if self._need(fresh) > cache.capacity or not run.ending.goes_on():
            return
        token, stats = run.tokens[-1], run.stats
        clock = Clock(stats.timings)
        begin = time.perf_counter()
        self._follower.enter(token)
        stats.engine_seconds += time.perf_counter() - begin
        width = self._mask_width(fresh)
        self._stepper.start(self._first_state(token, slot_N, fresh, width))
        clock.lap("draft")
        num_rows = 0  # of the last step
        try:
            while run.ending.goes_on() and self._need(fresh) <= cache.capacity:
                clock.start()
                if self._need(fresh) > width:
                    width = self._mask_width(fresh)
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
                step = end_step(path[:count].tolist(), emitted[:count].tolist(), run.ending)
                step = replace(step, num_drafted=int(result[2 * P + 1]))
                num_rows = len(step.path)
                cache.commit(step.path)
                self._follower.follow(step.tokens)
                clock.lap("commit")
                count_step(stats, step, bool(result[2 * P]))
                run.tokens += step.tokens
                clock.lap("other")
                yield step
        finally:
            if num_rows:
                feature_1F = self._stepper.fetch("path_features")[num_rows - 1 : num_rows]
                self._follower.leave(feature_1F)

    def _need(self, fresh: int) -> int:
        """Returns how many cache rows a step can reach.

        These are the path's new slots, and the drafter's rows: at most 2 D + 1 after the committed
        ones, which are fewer than `fresh`.
        """
        return fresh + 2 * self.depth + 1

    def _mask_width(self, fresh: int) -> int:
        """Returns how many slots the next step's mask covers: all of them where the graph reads
        whole buffers, which its mask must then be as wide as."""
        if self._reads_whole_buffers:
            return self._cache.capacity
        return mask_width(self._need(fresh), self._cache.capacity)

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
    bundle: Bundle,
    graph: Graph,
    target: Target,
    proposer: Proposer,
    runtime: Runtime,
    must_capture: bool = False,
) -> FusedSteps:
    """Opens the bundle's fused graph on the caches of `target` and of a one-pass proposer that was
    opened from the same bundle.

    See OrtStepper for `must_capture` and for the errors raised.
    """
    assert isinstance(proposer, Fusable), proposer
    backend, cache = target.lend()
    follower, drafter_backend = proposer.fusable()
    require_known_graph(bundle, graph)
    lenders = {"": backend} | ({} if drafter_backend is None else {DRAFT: drafter_backend})
    stepper = OrtStepper(bundle.file(graph.file), graph, lenders, runtime, must_capture)
    return FusedSteps(stepper, graph, cache, follower)
