"""Measures the host's time of captured runs over the stand-in: python -m cuda_standin.host_time B

Prints a table of microseconds, medians over many steps, for the target of the bundle B and for each
of its fused steps. `place` chooses slots and makes masks, `run` is the backend's call: feeds to the
device, a replay, and the argmax back. A tree that was seen before is cheaper than a new one.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import spec_runtime
from spec_runtime.backends import DeviceBackend, Runtime
from spec_runtime.backends.shapes import mask_width
from spec_runtime.bundle import manifest as bundles
from spec_runtime.fused_steps import open_steps
from spec_runtime.proposers import PROPOSERS
from spec_runtime.target import ARGMAX, Target

NUM_STEPS, NUM_WARM = 400, 40
NUM_ROWS = (1, 8, 16)
NUM_COMMITTED = 100  # rows before the trees


@dataclass(frozen=True)
class HostTime:
    """Says what one step costs, in microseconds. A fused step has nothing to place."""

    name: str
    place_us: float
    run_us: float

    @property
    def us(self) -> float:
        return self.place_us + self.run_us


def of_target(target: Target, num_rows: int, num_trees: int) -> HostTime:
    """Returns the time of verifying trees of `num_rows` nodes, of which `num_trees` differ."""
    backend, cache = target.lend()
    assert isinstance(backend, DeviceBackend), backend
    rng = np.random.default_rng(0)
    trees = [
        np.array([0] + [int(rng.integers(i)) for i in range(1, num_rows)])
        for _ in range(min(num_trees, NUM_STEPS))
    ]
    token_1N, row_N = np.zeros((1, num_rows), np.int64), np.arange(num_rows)
    times = []
    for step in range(NUM_STEPS):
        begin = time.perf_counter()
        feeds = cache.place(trees[step % len(trees)])
        placed = time.perf_counter()
        feeds["input_ids"], feeds["logit_rows"] = token_1N, row_N
        backend.run_keeping(feeds, [ARGMAX], ["logits"])
        times.append((placed - begin, time.perf_counter() - placed))
        cache.commit([0])
        cache.truncate(NUM_COMMITTED)
    place, run = (1e6 * statistics.median(each) for each in zip(*times[NUM_WARM:], strict=True))
    kind = "new trees" if num_trees > 1 else "one tree"
    return HostTime(f"target, {num_rows} rows, {kind}", place, run)


def of_fused_step(
    bundle: bundles.Bundle, info: bundles.DrafterInfo, target: Target
) -> HostTime | None:
    """Returns the time of a drafter's fused step, or None if it has none."""
    name = bundles.fused_name(info.name)
    graph = bundle.manifest.graphs.get(name)
    if graph is None:
        return None
    runtime = Runtime("cuda", 1)
    proposer = PROPOSERS[info.name](bundle, info, runtime, target)
    stepper = open_steps(bundle, graph, target, proposer, runtime)._stepper
    width = mask_width(1, bundle.manifest.target.max_length + bundle.manifest.target.scratch)
    states = [spec for spec in graph.inputs if spec.name.startswith("state.")]
    shapes = [[n if isinstance(n, int) else width for n in spec.shape] for spec in states]
    stepper.start(
        {
            spec.name.removeprefix("state."): np.zeros(shape, spec.dtype)
            for spec, shape in zip(states, shapes, strict=True)
        }
    )
    times = []
    for _ in range(NUM_STEPS):
        begin = time.perf_counter()
        stepper.step()
        times.append(time.perf_counter() - begin)
    return HostTime(name, 0.0, 1e6 * statistics.median(times[NUM_WARM:]))


def host_times(folder: Path) -> Iterator[HostTime]:
    """Yields the times of a bundle's target and fused steps."""
    ctypes.CDLL("libcudart.so.13").standin_pause_log(1)
    bundle = bundles.read(folder, verify=False)
    target = spec_runtime.load(folder, "none", threads=1, verify=False, backend="cuda").target
    target.prefill(range(NUM_COMMITTED))
    for num_rows in NUM_ROWS:
        for num_trees in (1, NUM_STEPS)[:num_rows]:
            yield of_target(target, num_rows, num_trees)
    for info in bundle.manifest.drafters:
        fused = of_fused_step(bundle, info, target)
        if fused is not None:
            yield fused


def main() -> None:
    print(f"{'':32}{'place':>8}{'run':>8}{'sum':>8}  µs")
    for each in host_times(Path(sys.argv[1])):
        print(f"{each.name:32}{each.place_us:8.1f}{each.run_us:8.1f}{each.us:8.1f}")


if __name__ == "__main__":
    main()
