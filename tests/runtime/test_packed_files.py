"""Weights that processes share: packed once, mapped from a file, and never in the way."""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_shared_sessions import GRAPH, WIDTH, graph_of, product, write

from spec_runtime.backends import session
from spec_runtime.backends.cpu import packed_files
from spec_runtime.backends.cpu.backend import CpuBackend
from spec_runtime.backends.cpu.packed_files import SEAL, WEIGHTS
from spec_runtime.bundle.manifest import Graph
from spec_runtime.bundle.onnx_file import read_outline
from spec_runtime.files.writing import locked, sha256


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specsplit" / "packed"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "spec_runtime"):
        yield caplog


def answer(path: Path) -> float:
    """Returns the product of a backend with mapped weights; its session goes with it."""
    return product(open_mapped(path), 1.0)


def open_mapped(path: Path, graph: Graph = GRAPH) -> CpuBackend:
    """Opens the graph with mapped weights, which have the hashes that a manifest would list."""
    hashes = {file: sha256(file) for file in (path, path.with_suffix(".bin"))}
    return CpuBackend(path, graph, 1, 1, hashes=hashes)


def packed_folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_weights_are_packed_once_and_mapped(
    tmp_path: Path, cache: Path, warnings: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, 2.0)
    backend = open_mapped(path)
    assert product(backend, 1.0) == 2.0 * WIDTH
    (folder,) = packed_folders(cache)
    weights = folder / WEIGHTS
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(weights) in maps.read_text()
    written = weights.stat().st_mtime_ns
    del backend
    assert answer(path) == 2.0 * WIDTH
    assert packed_folders(cache) == [folder]
    assert weights.stat().st_mtime_ns == written
    assert warnings.messages == []


@pytest.mark.parametrize(("width", "is_kept"), [(4096, True), (4099, False), (1024, False)])
def test_weights_below_a_megabyte_are_mapped_where_they_are_aligned(
    width: int, is_kept: bool, tmp_path: Path, cache: Path
) -> None:
    """Weights of 128 KiB, 96 bytes more, after which packed ones would lie badly, and 32 KiB."""
    path = write(tmp_path, 2.0, width)
    for _ in range(2):  # packed, and read
        backend = open_mapped(path, graph_of(width))
        assert product(backend, 1.0, width) == 2.0 * width
        del backend
    (folder,) = packed_folders(cache)
    outline = read_outline(folder / packed_files.GRAPH)
    assert len(outline.packed_offsets) == len(outline.weights) == is_kept


def test_equal_weights_of_several_graphs_lie_on_the_disk_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """Graphs for several numbers of lanes have them; here it is one graph for several CPUs.

    Other weights and other CPUs have files of their own.
    """
    (tmp_path / "other").mkdir()
    path, other = write(tmp_path, 2.0), write(tmp_path / "other", 3.0)
    for cpu in ("one", "two", "three", "one"):
        monkeypatch.setattr(packed_files, "cpu_model", lambda cpu=cpu: cpu)
        assert (answer(path), answer(other)) == (2.0 * WIDTH, 3.0 * WIDTH)
    files = [folder / WEIGHTS for folder in packed_folders(cache)]
    assert len(files) == 6
    assert len({file.stat().st_ino for file in files}) == 2
    assert warnings.messages == []  # a link is no change that makes files be packed anew


def test_who_comes_while_another_process_packs_waits(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, 2.0)
    answer(path)
    (folder,) = packed_folders(cache)
    aside = tmp_path / "aside"
    folder.rename(aside)
    lock = ExitStack()
    lock.enter_context(locked(folder))
    waited: list[float] = []

    def other_process_ends(seconds: float) -> None:
        waited.append(seconds)
        aside.rename(folder)
        lock.close()

    monkeypatch.setattr(packed_files.time, "sleep", other_process_ends)
    assert answer(path) == 2.0 * WIDTH
    assert len(waited) == 1
    assert warnings.messages == []


def test_without_room_for_files_weights_are_packed_in_memory(
    tmp_path: Path, cache: Path, warnings: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the way")
    assert answer(write(tmp_path, 2.0)) == 2.0 * WIDTH
    (warning,) = warnings.messages
    assert "packed weights of scale.onnx are not kept" in warning


def overwrite(path: Path, content: Any) -> None:
    """Writes to a file in place, so that size and time of modification stay."""
    time = path.stat().st_mtime_ns
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(time, time))


def overwrite_weights(folder: Path) -> None:
    overwrite(folder / WEIGHTS, np.full((folder / WEIGHTS).stat().st_size // 4, 7.0, "f4"))


def cut_short(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 100)


def seal_says(text: str) -> Callable[[Path], object]:
    """Returns what writes `text` as the seal."""
    return lambda folder: (folder / SEAL).write_text(text)


def put_a_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


DAMAGES: list[Callable[[Path], object]] = [
    overwrite_weights,
    put_a_pipe,
    *map(seal_says, ("[" * 100_000, "[]", '"hashes"', '{"hashes": NaN, "states": {}}', "\0")),
    *map(seal_says, ('{"hashes": [], "states": []}', '{"hashes": {}, "states": {}}')),
    seal_says('{"hashes": {"graph.onnx": 5}, "states": {"graph.onnx": [1e308]}}'),
    cut_short,
    lambda folder: overwrite(folder / packed_files.GRAPH, b"nothing of ONNX"),
    lambda folder: (folder / SEAL).unlink(),
    lambda folder: (folder / SEAL).write_text("{}"),
    lambda folder: (folder / WEIGHTS).unlink(),
]


def test_a_damaged_file_is_packed_anew(
    tmp_path: Path, cache: Path, warnings: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, 2.0)
    answer(path)
    for damage in DAMAGES:
        warnings.clear()
        (folder,) = packed_folders(cache)
        damage(folder)
        for _ in range(2):  # packed anew, and read
            assert answer(path) == 2.0 * WIDTH
        damaged = "packed weights of scale.onnx are damaged: they are packed anew"
        assert warnings.messages == [damaged], damage


def test_a_damaged_seal_stops_no_other_graph(
    tmp_path: Path, cache: Path, warnings: pytest.LogCaptureFixture
) -> None:
    answer(write(tmp_path, 2.0))
    (folder,) = packed_folders(cache)
    for number, text in enumerate(["[" * 100_000, "[]", '{"hashes": ["weights.bin"]}']):
        (folder / SEAL).write_text(text)
        assert answer(write(tmp_path, 3.0 + number)) == (3.0 + number) * WIDTH
    assert warnings.messages == []


def test_a_copy_of_the_files_is_as_good(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, 2.0)
    answer(path)
    shutil.copytree(cache, tmp_path / "copy" / "specsplit" / "packed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copy"))
    monkeypatch.setattr(session, "_write_packed", None)  # nothing is packed
    assert answer(path) == 2.0 * WIDTH
    assert warnings.messages == []


def test_files_that_onnx_runtime_does_not_take_are_ignored(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    def write_nonsense(path: Path, folder: Path) -> None:
        for name in (packed_files.GRAPH, WEIGHTS):
            (folder / name).write_bytes(b"nothing of ONNX")

    monkeypatch.setattr(session, "_write_packed", write_nonsense)
    assert answer(write(tmp_path, 2.0)) == 2.0 * WIDTH
    (warning,) = warnings.messages
    assert "is ignored" in warning


def test_weights_of_another_hash_than_the_manifest_lists_are_not_packed(
    tmp_path: Path, cache: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """Without verify, a file may have other content; nobody else must get it from the cache."""
    path = write(tmp_path, 2.0)
    hashes = {file: sha256(file) for file in (path, path.with_suffix(".bin"))}
    write(tmp_path, 3.0)
    assert product(CpuBackend(path, GRAPH, 1, 1, hashes=hashes), 1.0) == 3.0 * WIDTH
    assert packed_folders(cache) == []
    assert warnings.messages == [
        "packed weights of scale.onnx are not kept: scale.bin has not the hash that the manifest "
        "lists"
    ]


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_other_weights_of_the_same_size_and_time_are_others(
    is_mapped: bool, is_open: bool, tmp_path: Path, cache: Path
) -> None:
    """The bundle at a path is replaced by another; its session may be open still."""
    path = write(tmp_path, 2.0)
    opened = open_mapped(path) if is_mapped else CpuBackend(path, GRAPH, 1, 1)
    assert product(opened, 1.0) == 2.0 * WIDTH
    if not is_open:
        del opened
    overwrite(path.with_suffix(".bin"), np.full((WIDTH, 8), 3.0, "f4"))
    other = open_mapped(path) if is_mapped else CpuBackend(path, GRAPH, 1, 1)
    assert product(other, 1.0) == 3.0 * WIDTH


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
def test_packing_goes_after_what_answers(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    write_packed, seen = session._write_packed, list[int]()

    def note(path: Path, folder: Path) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        write_packed(path, folder)

    monkeypatch.setattr(session, "_write_packed", note)
    assert answer(write(tmp_path, 2.0)) == 2.0 * WIDTH
    assert seen == [max(before, packed_files.NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
