"""Tests the first minutes with a GPU: what is missing is named, and what cannot be captured runs.

Tests marked `standin` run the real CUDA provider of ONNX Runtime, see tests/cuda_standin.
"""

import ctypes
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_standin import StandIn
from cuda_standin.build import PROVIDER
from workshop import Workshop

from spec_runtime.backends.base import Runtime
from spec_runtime.backends.cuda import libraries as cuda_libraries
from spec_runtime.backends.cuda.libraries import DRIVER, LIBRARIES, library_folders
from spec_runtime.errors import UserError

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
    with pytest.raises(UserError, match=rf"got no NVIDIA driver here \({DRIVER}: .*GPU"):
        cuda_libraries.require_gpu()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named_with_its_wheel(linker: Linker, name: str) -> None:
    linker.system |= set(LIBRARIES) - {name}
    expected = rf"got no {name} \({name}: {ABSENT}\).*pip install {LIBRARIES[name]}, or"
    with pytest.raises(UserError, match=expected):
        cuda_libraries.require_gpu()


def test_a_gpu_that_cannot_be_used_is_one_line(linker: Linker) -> None:
    linker.system |= set(LIBRARIES)
    cuda_libraries.require_gpu()
    linker.fault = 35
    with pytest.raises(UserError, match=r"got no usable GPU \(error 35\), expected"):
        cuda_libraries.require_gpu()


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


# ---- the flag ----


@pytest.mark.parametrize("backend", ["cuda_eager", "tensorrt_eager"])
def test_the_names_that_the_flag_replaced_are_answered_with_it(backend: str) -> None:
    with pytest.raises(UserError, match=r"expected one of .*; --no-cuda-graphs leaves"):
        Runtime(backend)
    assert not Runtime("cuda", cuda_graphs=False).has_cuda_graphs
    assert Runtime("cuda").has_cuda_graphs
    assert not Runtime("onnxruntime").has_cuda_graphs


# ---- the real provider ----


@pytest.mark.standin
def test_the_provider_links_to_the_libraries_that_we_load(standin: StandIn) -> None:
    """All others belong to every Linux."""
    provider = standin.wheels / "ort" / PROVIDER
    done = subprocess.run(["readelf", "-d", provider], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", done.stdout))
    system = r"(lib(dl|rt|pthread|stdc\+\+|m|gcc_s|c)|ld-linux-x86-64)\.so\.\d+"
    assert {name for name in needed if not re.fullmatch(system, name)} == {DRIVER, *LIBRARIES}


@pytest.mark.standin
@pytest.mark.parametrize(
    ("flags", "is_captured"),
    [([], True), (["--temperature", "0.8", "--seed", "1"], True), (["--no-cuda-graphs"], False)],
)
def test_the_first_command_ends_with_tokens(
    standin: StandIn, workshop: Workshop, tmp_path: Path, flags: list[str], is_captured: bool
) -> None:
    """They are meaningless, as nothing is computed. Nothing but the summary is said."""
    words = ["generate", "say abc", "--bundle", str(workshop.lanes("fp16"))]
    log = tmp_path / "log"
    words += ["--backend", "cuda", *flags, "--max-new-tokens", "24", "--ignore-eos"]
    done = standin.run("-c", "from spec_runtime.cli import main; main()", *words, log=log)
    assert done.returncode == 0, done.stderr
    (summary,) = done.stderr.splitlines()
    assert re.match(r"24 tokens, .* finished by length$", summary)
    lines = log.read_text().splitlines()
    assert any(line.startswith("graph launch") for line in lines) == is_captured
    assert [line for line in lines if line.startswith("violation")] == []
