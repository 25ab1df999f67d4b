"""Weights that processes share: packed once, mapped from a file, and never in the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_shared_sessions import GRAPH, WIDTH, graph_of, product, write

from spec_runtime.backends import packed_files
from spec_runtime.backends.cpu import CpuBackend
from spec_runtime.backends.packed_files import WEIGHTS
from spec_runtime.files.onnx_file import read_outline
from spec_runtime.files.writing import locked


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
    return product(CpuBackend(path, GRAPH, 1, 1, is_mapped=True), 1.0)


def packed_folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_weights_are_packed_once_and_mapped(
    tmp_path: Path, cache: Path, warnings: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, 2.0)
    backend = CpuBackend(path, GRAPH, 1, 1, is_mapped=True)
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
        backend = CpuBackend(path, graph_of(width), 1, 1, is_mapped=True)
        assert product(backend, 1.0, width) == 2.0 * width
        del backend
    (folder,) = packed_folders(cache)
    outline = read_outline(folder / packed_files.GRAPH)
    assert len(outline.packed_offsets) == len(outline.weights) == is_kept


def test_other_weights_and_other_cpus_have_files_of_their_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(write(tmp_path, 2.0)) == 2.0 * WIDTH
    path = write(tmp_path, 3.0)
    assert answer(path) == 3.0 * WIDTH
    assert len(packed_folders(cache)) == 2
    monkeypatch.setattr(packed_files, "cpu_model", lambda: "another")
    assert answer(path) == 3.0 * WIDTH
    assert len(packed_folders(cache)) == 3


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
    assert "\n" not in warning


def test_a_damaged_file_is_ignored(
    tmp_path: Path, cache: Path, warnings: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, 2.0)
    answer(path)
    (folder,) = packed_folders(cache)
    (folder / packed_files.GRAPH).write_bytes(b"nothing of ONNX")
    assert answer(path) == 2.0 * WIDTH
    (warning,) = warnings.messages
    assert "is ignored" in warning
    assert "\n" not in warning
