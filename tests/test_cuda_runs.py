"""Tests what the CUDA backend has ONNX Runtime's CUDA provider do: capture, replay, copy and wait.

All cases run in one process over tests/cuda_standin, whose numbers mean nothing: its log of CUDA's
calls is looked at, a section a run. Answers are compared in tests/runtime/test_ort_cuda.py.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")

from cuda_standin import StandIn
from cuda_standin.calls import Calls, read_calls
from onnx_text import model_of
from workshop import Workshop

pytestmark = pytest.mark.standin

# Prints, as JSON, what each case says of itself.
RUNS = """
import ctypes, json, os, sys, threading
from pathlib import Path
import numpy as np
import onnx
import onnxruntime as ort

import spec_runtime
from host_cuda import step_feeds
from spec_runtime.backends import Runtime, open_graph, pad_rows, session
from spec_runtime.backends.cuda import device_runs, graph_cache
from spec_runtime.backends.cuda.backend import CudaBackend
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import Graph, TensorSpec
from spec_runtime.loop.kv import open_cache

cudart = ctypes.CDLL("libcudart.so.13")
mark = lambda text: cudart.standin_mark(text.encode())
fp16, fp32, pad = sys.argv[1:]
said = {}
sessions = []

class Seen(ort.InferenceSession):
    def __init__(self, *arguments, provider_options=None, **more):
        super().__init__(*arguments, provider_options=provider_options, **more)
        sessions.append(provider_options)

ort.InferenceSession = Seen

def open_target(folder, cuda_graphs=True):
    bundle = bundles.read(Path(folder))
    capacity = bundle.manifest.target.max_length + 128
    graph = bundle.manifest.graphs["target"]
    backend = open_graph(bundle, graph, capacity, Runtime("cuda", 1, cuda_graphs))
    return backend, open_cache(graph.form, capacity, backend)

def run_widths(name, folder, widths):
    backend, cache = open_target(folder)
    for i, width in enumerate(widths):
        feeds = step_feeds(cache, [5] * width, [0] * width)
        mark(f"{name} {i}")
        backend.run(feeds, ["logits"])
        mark("")
        cache.commit([0])

run_widths("shapes", fp32, [1, 1, 1, 2, 1, 1, 2, 1, 1])
sessions.clear()
open_target(fp16)
open_target(fp32, cuda_graphs=False)
said["settings"] = [each[0] for each in sessions if each]
said["cudnn"] = os.environ["ORT_ENABLE_CUDNN_FLASH_ATTENTION"]

backend, cache = open_target(fp16)
feeds = step_feeds(cache, [5, 6], [0, 0])
for number in range(2):
    def run():
        for i in range(4):
            mark(f"thread {number} {i}")
            backend.run(feeds, ["logits"])
            mark("")
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

spec = TensorSpec("x", "int64", (4,)), TensorSpec("y", "int64", (6,))
padding = CudaBackend(Path(pad), Graph("pad.onnx", "stateless", spec[:1], spec[1:]), 1, 1,
                      has_cuda_graphs=True)
for i in range(3):
    mark(f"on the CPU {i}")
    padding.run({"x": np.zeros(4, np.int64)}, ["y"])
    mark("")
del padding

before = device_runs.MAX_CAPTURED_ROWS, graph_cache.MAX_RUNS, pad_rows.WIDTHS
device_runs.MAX_CAPTURED_ROWS, graph_cache.MAX_RUNS, pad_rows.WIDTHS = 3, 2, (1, 2, 3, 4)
run_widths("limits", fp16, [width for width in (4, 3, 1, 2) for _ in range(3)])
device_runs.MAX_CAPTURED_ROWS, graph_cache.MAX_RUNS, pad_rows.WIDTHS = before

from cuda_standin import zeroed

def generate(engine, name, times=1, **options):
    options = {"max_new_tokens": 20, "ignore_eos": True, "reuse": False} | options
    for _ in range(times):
        mark(name)
        before = engine.target.lend()[0].bytes_to_host
        result = engine.generate("say abc, 3", **options)
        mark("")
        said[name] = {
            "tokens": len(result.token_ids),
            "steps": result.stats.steps,
            "bytes": engine.target.lend()[0].bytes_to_host - before,
            "sessions": len(sessions),
        }

engine = spec_runtime.load(fp16, "none", threads=1, backend="cuda", lookup=False)
said["row"] = 4 * engine.target.vocab_size
sessions.clear()
for name in ("warm", "warm again", "greedy"):
    generate(engine, name)
generate(engine, "logprobs", logprobs=2)
generate(engine, "bias", logit_bias={7: 1.0})
draws = {"temperature": 1.0, "seed": 3, "top_k": 3}
for name in ("first draws", "more draws", "draws"):
    generate(engine, name, **draws)
drafting = spec_runtime.load(fp16, "hydra", threads=1, backend="cuda", lookup=False)
for name in ("hydra first", "hydra again", "hydra"):
    generate(drafting, name)
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Runs:
    """What the cases said of themselves, CUDA's calls by section, and what was warned of."""

    said: dict[str, Any]
    sections: dict[str, Calls]
    warnings: list[str]

    def kinds(self, name: str) -> str:
        """Returns what became of a case's runs: e(ager), c(aptured) or r(eplayed)."""
        found = ""
        while (calls := self.sections.get(f"{name} {len(found)}")) is not None:
            assert calls.violations == []
            assert bool(calls.captured_kernels) <= bool(calls.num_graph_launches) <= 1
            captured = "c" if calls.captured_kernels else "r"
            found += captured if calls.num_graph_launches else "e"
        return found


@pytest.fixture(scope="module")
def runs(standin: StandIn, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    import onnx

    folder = tmp_path_factory.mktemp("runs")
    pad = "pad (int64[4] x) => (int64[6] y) <int64[2] pads = {1, 1}> { y = Pad(x, pads) }"
    onnx.save(model_of(pad), folder / "pad.onnx")  # CUDA has no kernel that pads integers
    paths = [*map(workshop.lanes, ("fp16", "fp32")), folder / "pad.onnx"]
    log = folder / "log"
    done = standin.run("-c", RUNS, *paths, log=log, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    return Runs(json.loads(done.stdout), read_calls(log), done.stderr.splitlines())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("shapes", "ecrerrcrr", id="a repeated shape is captured, then replayed"),
        pytest.param("limits", "eeeecrecrecr", id="no wide runs; others make room"),
        pytest.param("thread 0", "ecrr", id="a thread"),
        pytest.param("thread 1", "rrrr", id="another thread replays what the first captured"),
        pytest.param("on the CPU", "eee", id="a graph with a node on the CPU runs without"),
    ],
)
def test_which_runs_are_captured(runs: Runs, name: str, expected: str) -> None:
    assert runs.kinds(name) == expected


@pytest.mark.parametrize("name", ["shapes", "limits", "thread 0"])
def test_all_feeds_of_a_run_go_to_the_device_in_one_piece(runs: Runs, name: str) -> None:
    for i in range(len(runs.kinds(name))):
        calls = runs.sections[f"{name} {i}"]
        assert [kind for kind, _ in (*calls.copies, *calls.captured_copies)].count("H2D") == 1


def test_what_is_not_captured_is_warned_of(runs: Runs) -> None:
    (pad,) = runs.warnings
    assert pad.startswith("pad.onnx runs without CUDA graphs: ")


def test_settings_follow_from_attention_and_graphs(runs: Runs) -> None:
    """Whole buffers leave out the kernel that copies; other graphs leave the choice to ONNX
    Runtime. All compute exactly, and without cuDNN's attention."""
    assert runs.said["cudnn"] == "0"
    settings = runs.said["settings"]
    assert len({each.pop("user_compute_stream") for each in settings}) == 2
    assert settings == [
        {"use_tf32": "0", "enable_cuda_graph": "1"},
        {"use_tf32": "0", "enable_cuda_graph": "0", "sdpa_kernel": "16"},
    ]


def test_only_what_is_read_comes_to_the_host(runs: Runs) -> None:
    """A greedy request fetches ids, one that looks at logits a row a token too."""
    for name, num_bytes in (
        ("greedy", 8),
        ("logprobs", 8 + runs.said["row"]),
        ("bias", 8 + runs.said["row"]),
    ):
        about, calls = runs.said[name], runs.sections[name]
        fetched = sum(n for kind, n in calls.copies if kind == "D2H")
        assert fetched == about["bytes"] == num_bytes * about["tokens"], name


def test_the_largest_logits_are_found_only_for_requests_that_sample(runs: Runs) -> None:
    """Their graph is opened by the first of them, and captured too; it reads the logits in place.
    Both kinds of request replay the same graphs of the target."""
    said, calls = runs.said, runs.sections["draws"]
    assert (
        said["bias"]["sessions"] == 0 < said["first draws"]["sessions"] == said["draws"]["sessions"]
    )
    steps = said["draws"]["tokens"]
    assert not calls.captured_kernels
    assert calls.num_graph_launches == 2 * steps
    assert [kind for kind, _ in calls.copies].count("H2D") == steps, "the logits were copied"
    assert not runs.sections["greedy"].captured_kernels
    assert runs.sections["greedy"].num_graph_launches == said["greedy"]["tokens"]


def test_the_host_waits_only_for_what_it_reads(runs: Runs) -> None:
    """The runs of a drafter's start graph leave their states on the device."""
    calls = runs.sections["hydra"]
    num_runs = [kind for kind, _ in calls.copies].count("H2D")
    assert num_runs - calls.num_waits > runs.said["hydra"]["steps"] / 2
