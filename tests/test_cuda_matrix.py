"""Runs every graph of a CUDA bundle over the stand-in, in each precision and on each kind of GPU.

What is launched and copied does not depend on weights.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cuda_standin import StandIn  # noqa: E402
from cuda_standin.calls import Calls, read_calls  # noqa: E402
from workshop import UntrainedWorkshop, Workshop  # noqa: E402

from spec_export import drafters  # noqa: E402
from spec_runtime.bundle import manifest as bundles  # noqa: E402

pytestmark = pytest.mark.standin

Build = Callable[[str, str], bundles.Bundle]
CAPABILITIES = ("8.0", "9.0", "12.0")
# Of each kind of target its family and fields of its config.
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "convolution": {  # whose heads share its width
        "family": "lfm2",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "windows, softcaps": {"family": "gemma2"} | MIXED,
    "windows, sinks, experts": {"family": "gpt_oss", "num_local_experts": 4} | MIXED,
}
# Kernels differ by precision, and by capability: the oldest and the newest in each precision.
MATRIX = [("llama", "fp16", capability) for capability in CAPABILITIES]
MATRIX += [("llama", *pair) for pair in product(("bf16", "fp32"), ("8.0", "12.0"))]
MATRIX += [(kind, "fp16", "9.0") for kind in KINDS if kind != "llama"]
MATRIX += [("convolution", "fp8", "9.0")]
OF_OTHER_KINDS = ("parallelspec", "skip_layer")  # drafters: one runs layers of the target
# What attention over whole buffers may not be, by parts of kernels' names.
UNWANTED = ("attention_kernel", "Ungroup", "flash", "fmha", "cudnn")
# Nodes that ONNX Runtime may put on the CPU: they work out shapes, which are there anyway.
SHAPE_NODES = {"Cast", "Concat", "Shape", "Squeeze"}


@dataclass(frozen=True)
class GraphRun:
    """What a process found of one graph (see graph_runs.Finding), and its calls by phase."""

    name: str
    error: str
    has_cuda_graphs: bool
    cpu_nodes: list[str]
    num_memcpy: int
    smallest_buffer: int
    calls: dict[str, Calls]

    @property
    def running(self) -> list[Calls]:
        """The calls of all phases in which the graph runs."""
        return [self.calls[phase] for phase in ("eager", "capture", "replay")]

    @property
    def violations(self) -> list[str]:
        return [text for calls in self.calls.values() for text in calls.violations]


# ---- the conditions; each returns what is wrong, "" if nothing is ----


def opens_with_cuda_graphs(run: GraphRun) -> str:
    return run.error or ("" if run.has_cuda_graphs else "opened without CUDA graphs")


def has_no_memcpy_node(run: GraphRun) -> str:
    return f"{run.num_memcpy} Memcpy nodes" if run.num_memcpy else ""


def has_only_shapes_on_the_cpu(run: GraphRun) -> str:
    return ", ".join(sorted(set(run.cpu_nodes) - SHAPE_NODES))


def makes_no_call_that_capture_forbids(run: GraphRun) -> str:
    return "; ".join(text for text in run.violations if "changed since" not in text)


def replays_after_the_second_run(run: GraphRun) -> str:
    replay = run.calls["replay"]
    is_replayed = replay.num_graph_launches == 1 and not replay.kernels
    return (
        "" if is_replayed else f"{replay.num_graph_launches} graphs, {len(replay.kernels)} kernels"
    )


def copies_no_rows_for_query_heads(run: GraphRun) -> str:
    """In float32. ONNX Runtime has kernels that do, or that need half precision."""
    kernels = {name for calls in run.running for name in (*calls.kernels, *calls.captured_kernels)}
    return ", ".join(name for name in kernels if any(part in name for part in UNWANTED))


def copies_no_buffer(run: GraphRun) -> str:
    copies = [copy for calls in run.running for copy in (*calls.copies, *calls.captured_copies)]
    return ", ".join(f"{kind} {n}" for kind, n in copies if n >= run.smallest_buffer > 0)


def captures_no_copy_from_the_host(run: GraphRun) -> str:
    """The feeds are copied before a graph is replayed: what is captured would be read again."""
    copies = [n for kind, n in run.calls["capture"].captured_copies if kind == "H2D"]
    return f"copies of {copies} bytes" if copies else ""


def does_without_cudnn(run: GraphRun) -> str:
    return run.error if "cudnn" in run.error.lower() else ""


def reads_the_same_host_memory_at_replay(run: GraphRun) -> str:
    return "; ".join(text for text in run.violations if "changed since" in text)


CONDITIONS = (
    opens_with_cuda_graphs,
    has_no_memcpy_node,
    has_only_shapes_on_the_cpu,
    makes_no_call_that_capture_forbids,
    replays_after_the_second_run,
    copies_no_rows_for_query_heads,
    copies_no_buffer,
    captures_no_copy_from_the_host,
    does_without_cudnn,
    reads_the_same_host_memory_at_replay,
)


# ---- bundles, and processes that run their graphs ----


def drafters_of(kind: str) -> Sequence[str]:
    return drafters.trainable() if kind == "llama" else OF_OTHER_KINDS


@pytest.fixture(scope="module")
def build(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Returns a function that builds a bundle of a kind's drafters in a precision, each once."""
    folder = tmp_path_factory.mktemp("kinds")
    workshops: dict[str, Workshop] = {"llama": workshop}
    for kind in KINDS.keys() - workshops.keys():
        workshops[kind] = UntrainedWorkshop(folder / kind, KINDS[kind])
    return cache(
        lambda kind, precision: bundles.read(workshops[kind].lanes(precision, drafters_of(kind)))
    )


@pytest.fixture(scope="module")
def runs_of(
    standin: StandIn, build: Build, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], list[GraphRun]]:
    """Returns a function that runs all graphs of a kind and precision on a device of a
    capability."""

    logs = tmp_path_factory.mktemp("logs")

    @cache
    def runs_of(kind: str, precision: str, capability: str) -> list[GraphRun]:
        bundle = build(kind, precision)
        log = logs / f"{kind}-{precision}-{capability}.log"
        words = ("-m", "cuda_standin.graph_runs", bundle.path)
        done = standin.run(*words, log=log, capability=capability, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr[-2000:]
        sections = read_calls(log)
        return [
            GraphRun(
                **finding,
                calls={
                    phase: sections.get(f"{finding['name']} {phase}", Calls())
                    for phase in ("open", "eager", "capture", "replay")
                },
            )
            for finding in json.loads(done.stdout)
        ]

    return runs_of


# ---- tests ----


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
@pytest.mark.parametrize(("kind", "precision", "capability"), MATRIX)
def test_every_graph(
    runs_of: Callable[[str, str, str], list[GraphRun]],
    kind: str,
    precision: str,
    capability: str,
    condition: Callable[[GraphRun], str],
) -> None:
    if condition is copies_no_rows_for_query_heads and precision != "fp32":
        return
    runs = runs_of(kind, precision, capability)
    assert not {run.name: text for run in runs if (text := condition(run))}


@pytest.mark.parametrize(
    ("kind", "precision", "capability"), {each[:2]: each for each in MATRIX}.values()
)
def test_no_graph_is_left_out(
    build: Build,
    runs_of: Callable[[str, str, str], list[GraphRun]],
    kind: str,
    precision: str,
    capability: str,
) -> None:
    manifest = build(kind, precision).manifest
    assert {info.name for info in manifest.drafters} == set(drafters_of(kind))
    expected = {f"{info.name} {role}" for info in manifest.drafters for role in info.graphs}
    names = {run.name for run in runs_of(kind, precision, capability)}
    assert names == expected | set(manifest.graphs)


FINE = GraphRun(
    *("target", "", True, ["Cast"], 0, 4096),
    calls={
        "open": Calls(),
        "eager": Calls(kernels=["MatMul"], copies=[("H2D", 64)]),
        "capture": Calls(captured_kernels=["MatMul"], num_graph_launches=1),
        "replay": Calls(copies=[("H2D", 64)], num_graph_launches=1),
    },
)
CHANGED = "a captured copy reads 4 bytes of the host that changed since the capture"
FAULTS: dict[Callable[[GraphRun], str], GraphRun] = {
    opens_with_cuda_graphs: replace(FINE, has_cuda_graphs=False),
    has_no_memcpy_node: replace(FINE, num_memcpy=2),
    has_only_shapes_on_the_cpu: replace(FINE, cpu_nodes=["Cast", "Pad"]),
    makes_no_call_that_capture_forbids: replace(
        FINE, calls=FINE.calls | {"capture": Calls(violations=["cudaMalloc while …"])}
    ),
    replays_after_the_second_run: replace(FINE, calls=FINE.calls | {"replay": Calls(["MatMul"])}),
    copies_no_rows_for_query_heads: replace(FINE, calls=FINE.calls | {"eager": Calls(["Ungroup"])}),
    copies_no_buffer: replace(
        FINE, calls=FINE.calls | {"capture": Calls(captured_copies=[("D2D", 4096)])}
    ),
    captures_no_copy_from_the_host: replace(
        FINE, calls=FINE.calls | {"capture": Calls(captured_copies=[("H2D", 64)])}
    ),
    does_without_cudnn: replace(FINE, error="cannot run: libcudnn.so.9 …"),
    reads_the_same_host_memory_at_replay: replace(
        FINE, calls=FINE.calls | {"replay": Calls(violations=[CHANGED])}
    ),
}


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_a_fault_is_noticed(condition: Callable[[GraphRun], str]) -> None:
    assert condition(FINE) == ""
    assert condition(FAULTS[condition]) != ""
