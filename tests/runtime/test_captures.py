"""Tests that captures of CUDA graphs and calls that would break them exclude each other."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small import raising

from spec_runtime.backends.cuda import graph_cache
from spec_runtime.backends.cuda.captures import capturing, free_later, no_capture
from spec_runtime.backends.cuda.graph_cache import GraphCache, GraphRun
from spec_runtime.errors import DeviceLostError

if TYPE_CHECKING:
    from cuda_standin import StandIn


SECONDS = 30.0  # far more than anything here takes


class Block:
    """A thread inside a block until it is let out."""

    def __init__(self, block: Callable[[], AbstractContextManager[Any]]) -> None:
        self.is_inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(block,))
        self._thread.start()

    def _run(self, block: Callable[[], AbstractContextManager[Any]]) -> None:
        with block():
            self.is_inside.set()
            assert self._leave.wait(SECONDS)

    def may_leave(self) -> None:
        """Lets the thread out as soon as it is inside."""
        self._leave.set()

    def leave(self) -> None:
        self.may_leave()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def test_calls_of_several_threads_do_not_wait_for_each_other() -> None:
    blocks = [Block(no_capture) for _ in range(3)]
    assert all(block.is_inside.wait(SECONDS) for block in blocks)
    with no_capture(), no_capture():
        for block in blocks:
            block.leave()


def test_a_capture_waits_for_calls_and_keeps_others_out() -> None:
    call = Block(no_capture)
    assert call.is_inside.wait(SECONDS)
    capture = Block(capturing)
    assert not capture.is_inside.wait(0.05)
    call.leave()
    assert capture.is_inside.wait(SECONDS)
    others = [Block(no_capture), Block(capturing)]  # threads of which nothing is known yet
    assert not any(other.is_inside.wait(0.05) for other in others)
    for other in others:  # whichever comes first, as the second capture keeps the call out
        other.may_leave()
    capture.leave()
    for other in others:
        other.leave()
        assert other.is_inside.is_set()


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
    with no_capture():
        free_later(lambda: freed.append("at once"))
        assert freed[-1] == "at once"


def test_a_capture_that_fails_lets_others_in(caplog: pytest.LogCaptureFixture) -> None:
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
    for block in (Block(no_capture), Block(capturing)):
        assert block.is_inside.wait(SECONDS)
        block.leave()


# Captures one shape after the other, while another thread allocates, frees, opens and captures.
# With "unguarded" nothing keeps the two apart.
TWO_THREADS = """
import contextlib, gc, sys, threading
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from spec_runtime.backends.cuda import captures

if sys.argv[2] == "unguarded":
    captures.no_capture = captures.capturing = contextlib.nullcontext
    captures.free_later = lambda free: free()

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

thread = threading.Thread(target=disturb)
thread.start()
try:
    capture(60)
    while sys.argv[2] == "unguarded" and "violation" not in Path(sys.argv[3]).read_text():
        capture(60)  # until the two have met
except Exception as error:
    problems.append(error)
is_over.set()
thread.join()
print(*problems)
"""


@pytest.mark.standin
@pytest.mark.parametrize("how", ["guarded", "unguarded"])
def test_two_threads_capture_and_allocate(standin: "StandIn", tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    done = standin.run("-c", TWO_THREADS, tmp_path, how, log, log=log)
    lines = log.read_text().splitlines()
    violations = [line for line in lines if line.startswith("violation")]
    if how == "unguarded":
        assert violations, "the two threads never met"
        return
    assert (done.returncode, done.stdout.strip(), violations) == (0, "", []), done.stderr
    assert sum(line.startswith("capture begin") for line in lines) > 60, "both threads capture"


# Captures while another library, which knows nothing of us, allocates.
STRANGER = (
    TWO_THREADS.split("is_over =")[0]
    + """
from cuda.bindings import runtime as cuda

def allocate():
    while not is_over.is_set():
        cuda.cudaMallocHost(64)

is_over = threading.Event()
thread = threading.Thread(target=allocate, daemon=True)
thread.start()
capture(8)
while "violation" not in Path(sys.argv[3]).read_text():
    capture(8)  # until the two have met
is_over.set()
thread.join()
"""
)


@pytest.mark.standin
def test_captures_that_another_library_breaks_are_made_without(
    standin: "StandIn", tmp_path: Path
) -> None:
    log = tmp_path / "log"
    done = standin.run("-c", STRANGER, tmp_path, "guarded", log, log=log)
    assert done.returncode == 0, done.stderr
    assert "cudaMallocHost while another thread captures" in log.read_text()
    assert done.stderr.count("a CUDA graph was not captured") == 1


# ---- when runs are captured, replayed and closed; the backends' own tests make real runs ----


class Noted(GraphRun):
    """A run that writes down what happens to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def enqueue(self) -> None:
        self._log.append(f"run {self._name}")

    def capture(self) -> None:
        self._log.append(f"capture {self._name}")

    def replay(self) -> None:
        self._log.append(f"replay {self._name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def played(names: str, cache: GraphCache[Noted]) -> list[str]:
    """Returns what happens when these runs are made in turn; capitals may not be captured."""
    log: list[str] = []
    for name in names:
        run = cache.get(name, lambda: Noted(name, log))  # noqa: B023
        run._log, run.may_capture = log, name.islower()
        cache.run(run)
    return log


@pytest.mark.parametrize("by_thread", [True, False])
def test_the_second_run_of_a_key_is_captured_and_later_ones_replay_it(by_thread: bool) -> None:
    expected = ["run a", "run b", "capture a", "replay a", "capture b", "run C", "run C", "run C"]
    assert played("abaabCCC", GraphCache(True, by_thread)) == expected
    assert played("aaa", GraphCache(False, by_thread)) == ["run a"] * 3


def test_a_run_whose_capture_fails_is_made_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    cache: GraphCache[Noted] = GraphCache(True, by_thread=True)
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
    assert played("aba", cache) == ["run a", "run b", "capture a"]
    assert played("ca", cache) == ["run c", "replay a"]  # b went, for it was used before a
    log: list[str] = []
    cache.get("a", lambda: Noted("a", log))._log = log
    cache.get("c", lambda: Noted("c", log))._log = log
    played("d", cache)
    assert log == ["close a"]
    cache.clear()
    assert log == ["close a", "close c"]


def test_graphs_of_threads_stay_and_are_counted_over_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_cache, "MAX_RUNS", 2)
    cache: GraphCache[Noted] = GraphCache(True, by_thread=True)
    assert played("aabcda", cache)[-1] == "replay a", "it went with b"
    logs: list[list[str]] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: logs.append(played("aaa", cache)))
        thread.start()
        thread.join()
    assert logs == [["run a", "capture a", "replay a"], ["run a"] * 3]
    (message,) = caplog.messages
    assert message.startswith("2 CUDA graphs are captured, and further shapes run without")
