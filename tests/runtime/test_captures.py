"""Tests captures of CUDA graphs: what may not happen meanwhile, and which runs are captured."""

import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from small import raising

from spec_runtime.backends.cuda import graph_cache
from spec_runtime.backends.cuda.captures import capturing, free_later
from spec_runtime.backends.cuda.graph_cache import GraphCache, GraphRun
from spec_runtime.errors import DeviceLostError

if TYPE_CHECKING:
    from cuda_standin import StandIn


SECONDS = 30.0  # far more than anything here takes


def test_what_is_freed_waits_for_the_end_of_a_capture_in_any_thread() -> None:
    freed: list[str] = []

    class Owner:
        pass

    with capturing():
        owner = Owner()
        weakref.finalize(owner, free_later, lambda: freed.append("own"))
        del owner
        gc.collect()
        thread = threading.Thread(target=free_later, args=(lambda: freed.append("other"),))
        thread.start()
        thread.join(SECONDS)
        assert not thread.is_alive(), "a finalizer waits"
        assert freed == []
    assert freed == ["own", "other"]
    free_later(lambda: freed.append("at once"))
    assert freed[-1] == "at once"


def test_a_capture_that_fails_frees_too(caplog: pytest.LogCaptureFixture) -> None:
    def capture() -> None:
        with capturing():
            free_later(raising(RuntimeError("cudaFree: no such address")))
            raise ValueError("broken")

    with (
        caplog.at_level(logging.WARNING, "spec_runtime"),
        pytest.raises(ValueError, match="broken"),
    ):
        capture()
    assert "memory on the device was not freed: cudaFree: no such address" in caplog.text
    with capturing():  # it lets others in
        pass


# Captures one shape after the other, while another thread allocates, frees, opens and captures, and
# a third, which knows nothing of us, allocates.
TWO_THREADS = """
import gc, sys, threading
from pathlib import Path

import numpy as np
import onnx
from cuda.bindings import runtime as cuda
from onnx import TensorProto, helper

from spec_runtime.backends import pad_rows
from spec_runtime.backends.cuda.backend import CudaBackend
from spec_runtime.bundle.manifest import Graph, TensorSpec

pad_rows.WIDTHS = tuple(range(1, 65))  # each number of rows is a shape of its own
x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["M", 64]) for n in ("x0", "x150"))
nodes = [helper.make_node("Neg", [f"x{i}"], [f"x{i + 1}"]) for i in range(150)]
made = helper.make_graph(nodes, "g", [x], [y])
opset = [helper.make_opsetid("", 24)]
model = helper.make_model(made, opset_imports=opset, ir_version=11)
path = Path(sys.argv[1]) / "g.onnx"
onnx.save(model, path)
specs = [TensorSpec(n, "float32", ("M", 64)) for n in ("x0", "x150")]
graph = Graph("g.onnx", "stateless", (specs[0],), (specs[1],))

def capture(num_shapes):
    backend = CudaBackend(path, graph, 1, 1, has_cuda_graphs=True)
    for rows in range(1, num_shapes + 1):
        feeds = {"x0": np.zeros((rows, 64), np.float32)}
        for _ in range(3):
            backend.run(feeds, ["x150"])
    return backend

is_over = threading.Event()
problems = []

def disturb():
    try:
        while not is_over.is_set():
            backend = capture(2)
            backend.copies.host(4096)
            del backend
            gc.collect()
    except Exception as error:
        problems.append(error)

def allocate():
    while not is_over.is_set():
        cuda.cudaMallocHost(64)

threads = [threading.Thread(target=target) for target in (disturb, allocate)]
for thread in threads:
    thread.start()
try:
    capture(60)
except Exception as error:
    problems.append(error)
is_over.set()
for thread in threads:
    thread.join()
print(*problems)
"""


@pytest.mark.standin
def test_no_other_thread_breaks_a_capture(standin: "StandIn", tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = standin.run("-c", TWO_THREADS, tmp_path, log=log)
    lines = log.read_text().splitlines()
    violations = [line for line in lines if line.startswith("violation")]
    assert (done.returncode, done.stdout.strip(), violations) == (0, "", []), done.stderr
    assert "not captured" not in done.stderr
    begun = [i for i, line in enumerate(lines) if line.startswith("capture begin")]
    assert len(begun) > 60, "both threads capture"
    ended = [i for i, line in enumerate(lines) if line.startswith("capture end")]
    spans = zip(begun, ended, strict=True)
    assert any("allocate pinned" in line for i, j in spans for line in lines[i:j]), "none met"


# ---- when runs are captured, replayed and closed; the backends' own tests make real runs ----


class Noted(GraphRun):
    """A run that writes down what happens to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def enqueue(self) -> None:
        self._log.append(f"run {self._name}")

    def capture(self) -> None:
        self._log.append(f"capture {self._name}")
        self._executable = self._name

    def replay(self) -> None:
        self._log.append(f"replay {self._executable}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def played(names: str, cache: GraphCache[Noted]) -> list[str]:
    """Returns what happens when these runs are made in turn; capitals may not be captured."""
    log: list[str] = []
    for name in names:
        run = cache.get(name, lambda: Noted(name, log))  # noqa: B023
        run._log, run.may_capture = log, name.islower() and run.may_capture
        cache.run(run)
    return log


def test_the_second_run_of_a_key_is_captured_and_replayed_from_then_on() -> None:
    cache: GraphCache[Noted] = GraphCache(True)
    is_warm = []
    for name, expected in zip(
        "aabaCC",
        ["run a", "capture a replay a", "run b", "replay a", "run C", "run C"],
        strict=True,
    ):
        assert " ".join(played(name, cache)) == expected
        is_warm.append(cache.is_warm)
    assert is_warm == [False, False, False, True, False, True], "neither eager nor capturing"
    thread_log: list[str] = []
    thread = threading.Thread(target=lambda: thread_log.extend(played("ab", cache)))
    thread.start()
    thread.join(SECONDS)
    assert thread_log == ["replay a", "capture b", "replay b"], "threads share captures"
    assert played("aaa", GraphCache(False)) == ["run a"] * 3


def test_a_run_whose_capture_fails_is_made_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    cache: GraphCache[Noted] = GraphCache(True)
    played("ab", cache)
    for name in "ab":
        cache.get(name, lambda: Noted("", [])).capture = raising(RuntimeError("broken"))  # type: ignore[method-assign]
    assert played("abab", cache) == ["run a", "run b"] * 2
    assert caplog.messages == ["a CUDA graph was not captured, and such runs go without: broken"]
    played("c", cache)
    cache.get("c", lambda: Noted("", [])).capture = raising(DeviceLostError("gone"))  # type: ignore[method-assign]
    with pytest.raises(DeviceLostError):
        played("c", cache)


def test_the_run_unused_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_RUNS", 2)
    cache: GraphCache[Noted] = GraphCache(True)
    assert played("aba", cache) == ["run a", "run b", "capture a", "replay a"]
    assert played("ca", cache) == ["run c", "replay a"]  # b went, for it was used before a
    log: list[str] = []
    cache.get("c", lambda: Noted("c", log))._log = log
    cache.get("a", lambda: Noted("a", log))._log = log
    played("d", cache)
    assert log == ["close c"]
    cache.clear()
    assert log == ["close c", "close a"]
