"""Runs every graph of a bundle over the stand-in: python -m cuda_standin.graph_runs BUNDLE

Prints what it found as JSON, a list of Finding's fields. The calls are in the stand-in's log, in
sections "GRAPH PHASE".
"""

import ctypes
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import spec_runtime
from spec_runtime import backends
from spec_runtime.backends import Backend, DeviceBackend, Runtime
from spec_runtime.backends.session import PROVIDERS, as_lender, takes_cuda_graphs
from spec_runtime.backends.shapes import is_cache
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.target import ARGMAX, TOP, Asked, Target, verify_together
from spec_runtime.trees.tree import TokenTree

# What a graph is run for. The first run of a shape is eager, the second captures it.
PHASES = EAGER, CAPTURE, REPLAY = "eager", "capture", "replay"
OPEN = "open"
SCRATCH = 128  # rows that trees may take
NUM_ROWS = 8  # of a run that has a choice
PARENTS = np.array([0, 0, 0, 1, 1, 2, 2, 3])
POSITIONS = "kv.positions"  # the positions of slots, a cache of models with convolutions or windows
# What decoding copies to the host.
FETCHED = ("guess_ids", "guess_log_probs", "pair_log_probs", ARGMAX)

cudart = ctypes.CDLL("libcudart.so.13")


@dataclass
class Finding:
    """What was seen of one graph; `error` says why it was not run to the end.

    `cpu_nodes` are the types of nodes that ONNX Runtime put on the CPU, `num_memcpy` counts the
    copies that it inserted between devices. `smallest_buffer` is in bytes, without the positions of
    slots, which are eight bytes each.
    """

    name: str
    error: str = ""
    has_cuda_graphs: bool = False
    cpu_nodes: list[str] = field(default_factory=list)
    num_memcpy: int = 0
    smallest_buffer: int = 0


class Feeder:
    """Makes random but valid feeds of one graph, over a cache of its own.

    Every feeder of a graph makes the same feeds.
    """

    def __init__(
        self, graph: bundles.Graph, capacity: int, vocab_size: int, num_levels: int = 1
    ) -> None:
        self._graph, self._vocab_size, self._num_levels = graph, vocab_size, num_levels
        self._cache = None
        if graph.form != "stateless":
            self._cache = open_cache(graph.form, capacity)
        self._rng = np.random.default_rng(0)
        self._level = 0

    def feeds(self, parent_N: np.ndarray) -> dict[str, np.ndarray]:
        """Returns feeds for a tree after the rows that were kept.

        Raises ValueError for an input of no known meaning.
        """
        n = len(parent_N)
        feeds = {} if self._cache is None else self._cache.place(parent_N)
        for spec in self._graph.inputs:
            if spec.name in feeds or is_cache(spec):
                continue
            shape = tuple(n if isinstance(axis, str) else axis for axis in spec.shape)
            if spec.name == "input_ids":
                feeds[spec.name] = self._rng.integers(self._vocab_size, size=shape)
            elif spec.name == "logit_rows":
                feeds[spec.name] = np.arange(n, dtype=np.int64)
            elif spec.name == "level":
                feeds[spec.name] = np.full(shape, self._level % self._num_levels, np.int64)
            elif spec.name == bundles.BANK_ROWS:
                feeds[spec.name] = np.arange(shape[0], dtype=np.int64)
            elif spec.name in (bundles.FEATURE_ROWS, bundles.STATE_ROWS):
                # Never rows that the run writes: a captured run is run three times.
                feeds[spec.name] = n + self._rng.integers(SCRATCH // 2, size=shape)
                if spec.name == bundles.FEATURE_ROWS:  # one feature of its own, or zeros
                    feeds[spec.name][-1] = -1 - n
            elif spec.name in ("features", "state", "logits"):
                feeds[spec.name] = self._rng.standard_normal(shape, np.float32)
            else:
                raise ValueError(f"got input {spec.name}, which this script has no feeds for")
        self._level += 1
        return feeds


class WatchedSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that records where its nodes were put; `last` is the last one on CUDA."""

    last: "WatchedSession"

    def __init__(
        self, model: Any, sess_options: Any = None, providers: Any = None, **more: Any
    ) -> None:
        if providers != [PROVIDERS["cuda"]]:
            super().__init__(model, sess_options, providers, **more)
            return
        sess_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "optimized.onnx"
            sess_options.optimized_model_filepath = str(file)
            super().__init__(model, sess_options, providers, **more)
            nodes = onnx.load(file, load_external_data=False).graph.node
        self.num_memcpy = sum(node.op_type.startswith("Memcpy") for node in nodes)
        self.cpu_nodes = [
            node.op_type
            for part in self.get_provider_graph_assignment_info()
            if part.ep_name == PROVIDERS["cpu"]
            for node in part.get_nodes()
        ]
        WatchedSession.last = self


class GraphRuns:
    """Opens and runs the graphs of one bundle, and keeps a finding of each."""

    def __init__(self, bundle: bundles.Bundle) -> None:
        info = bundle.manifest.target
        self.findings: list[Finding] = []
        self._bundle, self._info = bundle, info
        self._runtime = Runtime("cuda", 1)
        self._capacity = info.max_length + info.scratch
        self._backends: dict[str, Backend] = {}
        self._target: Target

    @contextmanager
    def _finding(self, name: str) -> Iterator[Finding]:
        """Gives the finding of a graph, and keeps an error of the block in it."""
        finding = Finding(name)
        self.findings.append(finding)
        try:
            yield finding
        except Exception as error:  # ONNX Runtime's own kinds are among them
            finding.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        mark("", "")

    def run_target(self) -> None:
        """Runs the target's graph as verifying does."""
        with self._finding("target") as finding:
            mark(finding.name, OPEN)
            target = self._open_target()
            self._target, (self._backends["target"], _) = target, target.lend()
            _see_session(finding, self._backends["target"])
            target.prefill(range(24))
            tree = TokenTree(np.zeros(NUM_ROWS, np.int64), PARENTS)
            _run_phases(finding, lambda: target.verify(tree).argmax_N)

    def run_lanes(self) -> None:
        """Runs a pass for each number of lanes that there is a graph for."""
        for num_lanes in range(2, bundles.MAX_LANES + 1):
            name = bundles.lanes_name(num_lanes)
            if name not in self._bundle.manifest.graphs:
                continue
            with self._finding(name) as finding:
                mark(name, OPEN)
                passes = backends.open_lanes(self._bundle, self._runtime)
                assert passes is not None, "no passes"
                targets = [self._open_target() for _ in range(num_lanes)]
                for target in targets:
                    target.prefill(range(24))

                def run(num_rows: int) -> None:
                    tree = TokenTree(np.zeros(num_rows, np.int64), PARENTS[:num_rows])
                    asked = [Asked(tree)] * len(targets)  # noqa: B023
                    verify_together(passes, targets, asked)  # noqa: B023

                run(1)  # opens the graph
                _see_session(finding, targets[0].lend()[0])
                _run_phases(finding, lambda: run(NUM_ROWS))

    def _open_target(self) -> Target:
        return spec_runtime.load(
            self._bundle.path, "none", threads=1, verify=False, backend="cuda"
        ).target

    def run_sampling(self) -> None:
        """Runs the graph that finds the largest logits, on some that the target left."""
        with self._finding(bundles.SAMPLING) as finding:
            backend, cache = self._target.lend()
            assert isinstance(backend, DeviceBackend), backend
            feeds = cache.place(PARENTS)
            feeds["input_ids"] = np.zeros((1, NUM_ROWS), np.int64)
            feeds["logit_rows"] = np.arange(NUM_ROWS)
            _, kept = backend.start(feeds, [], ["logits"])()
            sampling = backends.open_sampling(self._bundle, backend, self._runtime)
            assert sampling is not None, "no graph"
            _run_phases(finding, lambda: sampling.run(kept["logits"], TOP))
            _see_session(finding, backend)

    def run_drafter(self, info: bundles.DrafterInfo) -> None:
        """Runs every graph of a drafter."""
        for role, graph in info.graphs.items():
            with self._finding(f"{info.name} {role}") as finding:
                start = self._backends.get(f"{info.name} start")
                backend = self._open(finding, graph, start)
                config = info.config
                vocab_size = config.get("mask_token_base", self._info.dims.vocab_size)
                vocab_size += config.get("num_masks", 0)
                feeder = Feeder(graph, backend.capacity, vocab_size, config.get("num_guesses", 1))
                feeds = feeder.feeds(PARENTS)
                outputs = [spec.name for spec in graph.outputs if spec.name in FETCHED]
                _run_phases(finding, lambda: backend.run(feeds, outputs))  # noqa: B023

    def _open(
        self, finding: Finding, graph: bundles.Graph, start: Backend | None = None
    ) -> Backend:
        """Opens a graph with the buffers and banks of others, as the drafters' proposers do."""
        target = self._backends.get("target")
        lender: dict[str, Backend | None] = {}
        if start is not None and graph.has_input(bundles.STATE_ROWS):
            lender = {"banks": start}
        elif graph.has_input(bundles.FEATURE_ROWS):
            lender = {"banks": target}
        elif finding.name == "skip_layer drafter":
            lender = {"share": target}
        mark(finding.name, OPEN)
        backend = backends.open_graph(self._bundle, graph, self._capacity, self._runtime, **lender)
        self._backends[finding.name] = backend
        _see_session(finding, backend)
        return backend


def _see_session(finding: Finding, lender: Backend) -> None:
    """Notes what the session opened last is like; `lender` has its buffers."""
    session = WatchedSession.last
    finding.has_cuda_graphs = takes_cuda_graphs(session)
    finding.cpu_nodes, finding.num_memcpy = session.cpu_nodes, session.num_memcpy
    buffers = as_lender(lender).buffers
    sizes = [value.tensor_size_in_bytes() for name, value in buffers.items() if name != POSITIONS]
    finding.smallest_buffer = min(sizes, default=0)


def _run_phases(finding: Finding, run: Callable[[], Any]) -> None:
    for phase in PHASES:
        mark(finding.name, phase)
        run()


def mark(graph: str, phase: str) -> None:
    """Begins a section of the log."""
    cudart.standin_mark(f"{graph} {phase}".encode())


def main() -> None:
    ort.InferenceSession = WatchedSession
    bundle = bundles.read(Path(sys.argv[1]), verify=False)
    runs = GraphRuns(bundle)
    runs.run_target()
    runs.run_lanes()
    runs.run_sampling()
    for info in bundle.manifest.drafters:
        runs.run_drafter(info)
    print(json.dumps([dataclasses.asdict(finding) for finding in runs.findings]))


if __name__ == "__main__":
    main()
