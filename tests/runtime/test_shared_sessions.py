"""Engines that run the same file in the same way have one session, and nothing else, in common."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import PATIENCE
from onnx_text import model_of

from spec_runtime.backends import session
from spec_runtime.backends.cpu.backend import CpuBackend
from spec_runtime.bundle.manifest import Graph, TensorSpec
from spec_runtime.errors import UserError
from spec_runtime.files.machine import default_threads

onnx = pytest.importorskip("onnx")

WIDTH = 40_000


def graph_of(width: int) -> Graph:
    return Graph(
        "scale.onnx",
        "stateless",
        (TensorSpec("x", "float32", ("N", width)),),
        (TensorSpec("y", "float32", ("N", 8)),),
    )


GRAPH = graph_of(WIDTH)


def write(folder: Path, factor: float, width: int = WIDTH) -> Path:
    """Writes a graph y = x · w, all of whose weights, in a file of their own, are `factor`."""
    folder.mkdir(exist_ok=True)
    model = model_of(f"scale (float[N, {width}] x) => (float[N, 8] y) {{ y = MatMul(x, w) }}")
    weight = onnx.numpy_helper.from_array(np.full((width, 8), factor, np.float32), "w")
    model.graph.initializer.append(weight)
    path = folder / "scale.onnx"
    (folder / "scale.bin").unlink(missing_ok=True)
    onnx.save(model, path, save_as_external_data=True, location="scale.bin", size_threshold=0)
    return path


def open_graph(path: Path, threads: int = 1) -> CpuBackend:
    return CpuBackend(path, GRAPH, 1, threads)


def product(backend: CpuBackend, factor: float, width: int = WIDTH) -> float:
    x = np.full((2, width), factor, np.float32)
    return float(backend.run({"x": x}, ["y"])["y"][0, 0])


def test_backends_of_the_same_file_share_its_session(tmp_path: Path) -> None:
    path = write(tmp_path, 2.0)
    first, second = open_graph(path), open_graph(tmp_path / "." / "scale.onnx")
    assert first.session is second.session
    assert open_graph(path, threads=2).session is not first.session
    other = tmp_path / "other"
    other.mkdir()
    assert open_graph(write(other, 2.0)).session is not first.session
    assert (product(first, 1.0), product(second, 3.0)) == (2.0 * WIDTH, 6.0 * WIDTH)


def test_more_threads_than_cpus_do_not_spin(tmp_path: Path) -> None:
    path, cpus, name = write(tmp_path, 2.0), default_threads(), "session.intra_op.allow_spinning"

    def options(threads: int) -> Any:
        return open_graph(path, threads).session.get_session_options()

    assert options(cpus + 1).get_session_config_entry(name) == "0"
    with pytest.raises(RuntimeError):  # it is not set
        options(cpus).get_session_config_entry(name)


def test_the_session_goes_with_its_last_backend(tmp_path: Path) -> None:
    path = write(tmp_path, 2.0)
    first, second = open_graph(path), open_graph(path)
    session = weakref.ref(first.session)
    del first
    assert product(second, 1.0) == 2.0 * WIDTH
    del second
    assert session() is None


def test_a_file_whose_weights_changed_is_another_one(tmp_path: Path) -> None:
    before = open_graph(write(tmp_path, 2.0))
    path = write(tmp_path, 5.0)
    os.utime(path, ns=(1, 1))  # the graph itself may well have the time that it had
    after = open_graph(path)
    assert after.session is not before.session
    assert (product(after, 1.0), product(before, 1.0)) == (5.0 * WIDTH, 2.0 * WIDTH)


def test_threads_run_a_shared_session_at_the_same_time(tmp_path: Path) -> None:
    path = write(tmp_path, 1.0)
    wrong: list[float] = []

    def work(factor: float) -> None:
        backend = open_graph(path)
        wrong.extend(got for _ in range(200) if (got := product(backend, factor)) != factor * WIDTH)

    threads = [threading.Thread(target=work, args=[float(n)]) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_file_that_is_no_graph_is_refused_each_time(tmp_path: Path) -> None:
    path = tmp_path / "scale.onnx"
    path.write_bytes(b"nothing of ONNX")
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot load scale\.onnx"):
            open_graph(path)


def test_nobody_waits_for_another_file_to_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who opens the same file waits, and finds it open."""
    slow, quick = (write(tmp_path / name, 2.0) for name in ("slow", "quick"))
    begun, may_end = threading.Event(), threading.Event()
    opened: list[Path] = []
    open_new = session._open

    def open_slowly(path: Path, options: Any) -> Any:
        opened.append(path)
        if path == slow:
            begun.set()
            assert may_end.wait(PATIENCE)
        return open_new(path, options)

    monkeypatch.setattr(session, "_open", open_slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(open_graph, slow)
        assert begun.wait(PATIENCE)
        second = pool.submit(open_graph, slow)
        assert product(open_graph(quick), 3.0) == 6.0 * WIDTH
        assert not first.done()
        assert not second.done()
        may_end.set()
        assert first.result(PATIENCE).session is second.result(PATIENCE).session
    assert opened == [slow, quick]
