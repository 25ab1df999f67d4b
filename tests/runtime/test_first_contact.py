"""Tests the first minutes with a GPU: what is missing is named, and what cannot be captured runs.

Tests marked `standin` run the real CUDA provider of ONNX Runtime, see tests/cuda_standin.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_ort_cuda as fake
import pytest

from spec_runtime.backends import Runtime, cuda_libraries, session
from spec_runtime.backends.cuda_libraries import DRIVER, LIBRARIES, library_folders

ABSENT = "cannot open shared object file"


class Linker:
    """Stands in for ctypes.CDLL: the libraries of `system` load by name, others by a path.

    What is loaded by a path is found by its name from then on, as by the system's loader.
    """

    def __init__(self, system: set[str]) -> None:
        self.system = system
        self.loaded: list[str] = []
        self.fault = 0  # of cudaGetDeviceCount
        self.cudaGetErrorString = lambda error: f"error {error}".encode()  # takes attributes

    def __call__(self, place: str) -> Any:
        if place not in self.system and not Path(place).exists():
            raise OSError(f"{place}: {ABSENT}")
        self.loaded.append(place)
        self.system.add(Path(place).name)
        return self

    def cudaGetDeviceCount(self, count: Any) -> int:
        return self.fault


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Has the driver; Python's path leads to an empty folder."""
    linker = Linker({DRIVER})
    monkeypatch.setattr(ctypes, "CDLL", linker)
    system = SimpleNamespace(path=["", str(tmp_path)], platform="linux")
    monkeypatch.setattr(cuda_libraries, "sys", system)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    cuda_libraries.load_libraries.cache_clear()
    yield linker
    cuda_libraries.load_libraries.cache_clear()


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    return folder


# ---- libraries ----


def test_without_a_driver_no_library_is_asked_for(linker: Linker) -> None:
    linker.system.clear()
    with pytest.raises(ValueError, match=rf"got no NVIDIA driver here \({DRIVER}: .*GPU") as error:
        cuda_libraries.require_gpu()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named_with_its_wheel(linker: Linker, name: str) -> None:
    linker.system |= set(LIBRARIES) - {name}
    expected = rf"got no {name} \({name}: {ABSENT}\).*pip install {LIBRARIES[name]}, or"
    with pytest.raises(ValueError, match=expected) as error:
        cuda_libraries.require_gpu()
    assert "\n" not in str(error.value)


def test_a_gpu_that_cannot_be_used_is_one_line(linker: Linker) -> None:
    linker.system |= set(LIBRARIES)
    cuda_libraries.require_gpu()
    linker.fault = 35
    with pytest.raises(ValueError, match=r"got no usable GPU \(error 35\), expected") as error:
        cuda_libraries.require_gpu()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("folder", ["nvidia/cu13/lib", "torch/lib"])
def test_libraries_come_from_wheels_and_from_beside_torch(
    linker: Linker, tmp_path: Path, folder: str
) -> None:
    found = put(tmp_path / folder, *LIBRARIES)
    assert library_folders() == library_folders([str(tmp_path)]) == [found]
    cuda_libraries.require_gpu()
    assert linker.loaded[:-1] == [DRIVER, *(str(found / name) for name in LIBRARIES)]


def test_libraries_asked_for_come_first_and_the_system_s_last(
    linker: Linker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second, *others = LIBRARIES
    asked, wheel = tmp_path / "asked", tmp_path / "nvidia/cu13/lib"
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{put(asked, first)}")
    put(wheel, first, second)
    linker.system |= set(LIBRARIES)
    cuda_libraries.require_gpu()
    assert linker.loaded[:-1] == [DRIVER, str(asked / first), str(wheel / second), *others]
