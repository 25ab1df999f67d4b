"""Builds the stand-in once for this machine: wheels from the registry, libraries with g++."""

import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from spec_runtime.files.machine import cache_folder
from spec_runtime.files.writing import LockedError, locked

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
BINDINGS = HERE / "runtime_bindings.py"
# Where CUDA's headers come from.
HEADER_VERSION = "13.5.37"
PATIENCE_S = 600  # for another process that builds the same

# Every library that the provider links to, with the file that it looks for.
CUDART, DRIVER = "libcudart.so.13", "libcuda.so.1"
MATHS = {"cublas": "libcublas.so.13", "cublasLt": "libcublasLt.so.13", "curand": "libcurand.so.10"}
CUDART_SOURCES = ("log.cpp", "streams.cpp", "memory.cpp", "kernels.cpp", "device.cpp")
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"


class UnavailableError(Exception):
    """Says why the stand-in cannot be built here."""


def built() -> tuple[Path, Path]:
    """Returns the folders of the wheels and of the libraries, built before if they are missing.

    Raises UnavailableError where it cannot be built: on another platform than Linux on x86_64,
    without g++, or without the wheels and a registry to fetch them from.
    """
    if (system := (platform.system(), platform.machine())) != ("Linux", "x86_64"):
        raise UnavailableError(f"the stand-in for CUDA is for Linux x86_64, this is {system}")
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"the stand-in for CUDA is compiled here, and {tool} is missing")
    cache = cache_folder() / "cuda_standin"
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    wheels = cache / f"wheels-{onnxruntime_version()}-{HEADER_VERSION}-{python}"
    _make_once(wheels, _install_wheels)
    libraries = cache / f"libraries-{_hash_of_sources(wheels.name)}"
    _make_once(libraries, lambda folder: _compile(wheels, folder))
    return wheels, libraries


def onnxruntime_version() -> str:
    """Returns the version of ONNX Runtime that specsplit is tested with."""
    found = re.search(r"(?m)^onnxruntime==(\S+)", (CHECKOUT / "constraints.txt").read_text())
    assert found is not None
    return found[1]


def _hash_of_sources(wheels: str) -> str:
    digest = hashlib.sha256(wheels.encode())
    for path in sorted([*HERE.glob("native/*"), HERE / "build.py", BINDINGS]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Calls `make` with an empty folder that then takes the name `folder`, unless that is there.

    Workers of a parallel test run ask for the same at once: one makes it, the others wait.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + PATIENCE_S
    while not folder.exists():
        try:
            with locked(folder):
                if not folder.exists():
                    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
                        temporary = Path(parent) / "made"
                        temporary.mkdir()
                        make(temporary)
                        temporary.rename(folder)
        except LockedError as error:
            if time.monotonic() > end:
                raise UnavailableError(str(error)) from None
            time.sleep(0.5)


def _install_wheels(folder: Path) -> None:
    """Puts ONNX Runtime with its CUDA provider and CUDA's headers into `folder`: 600 MB."""
    _pip("install", "--target", str(folder / "ort"), f"onnxruntime-gpu=={onnxruntime_version()}")
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        packages = [f"nvidia-cuda-{part}=={HEADER_VERSION}" for part in ("runtime", "crt")]
        _pip("download", "--dest", downloads, *packages)
        for wheel in Path(downloads).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if "/include/" in name]
                archive.extractall(folder / "headers", names)


def _pip(command: str, *arguments: str) -> None:
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--retries=1"]
    try:
        _run([sys.executable, "-m", "pip", command, *options, *arguments])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no message").splitlines()[-1]
        raise UnavailableError(
            f"the stand-in for CUDA needs wheels that pip could not get: {last}"
        ) from None


def _compile(wheels: Path, folder: Path) -> None:
    """Compiles every library into lib/ of `folder`, and puts the bindings into python/."""
    headers = next(wheels.glob("headers/**/cuda_runtime_api.h")).parent
    lib = folder / "lib"
    lib.mkdir()
    native = HERE / "native"
    _library(lib, CUDART, [native / name for name in CUDART_SOURCES], [f"-I{headers}"])
    _library(lib, DRIVER, [native / "driver.cpp"])
    provider = wheels / "ort" / PROVIDER
    for prefix, name in MATHS.items():
        generated = folder / f"{prefix}.cpp"
        generated.write_text(_stubs(provider, name, native / "cublas.cpp"))
        sources = [generated, native / "cublas.cpp"]
        options = [f"-DPART_{prefix.upper()}=1", f"-L{lib}", f"-l:{CUDART}"]
        _library(lib, name, sources, options)
    bindings = folder / "python" / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings.parent / "__init__.py").touch()
    (bindings / "__init__.py").touch()
    shutil.copyfile(BINDINGS, bindings / "runtime.py")


def _library(lib: Path, name: str, sources: list[Path], options: list[str] | None = None) -> None:
    """Compiles one library whose symbols carry its name as their version, as NVIDIA's do."""
    versions = lib / f"{name}.map"
    versions.write_text(f"{name} {{ global: *; }};\n")
    _run(
        [
            *("g++", "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", "-o", str(lib / name)),
            *(f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}"),
            *(str(source) for source in sources),
            *(options or []),
        ]
    )


def _stubs(provider: Path, library: str, written: Path) -> str:
    """Returns the C++ source of all functions that `provider` asks of `library`, but for those
    that the file `written` has.

    What makes an object hands out a piece of memory, what computes counts as a kernel, and the rest
    does nothing. A function's first argument is the handle, which holds the stream.
    """
    symbols = _run(["nm", "--dynamic", "--undefined-only", str(provider)])
    names = re.findall(rf"(\w+)@+{re.escape(library)}", symbols)
    own = written.read_text()
    lines = [
        "#include <cstdlib>",
        'extern "C" {',
        "void standin_library_kernel(const char *name, void *stream);",
    ]
    for name in sorted(set(names)):
        if re.search(rf"\b{name}\(", own):
            continue
        if name.endswith("Create"):
            body = "*handle = static_cast<void **>(std::calloc(1, 256)); return 0;"
            lines.append(f"int {name}(void ***handle) {{ {body} }}")
        elif name.endswith("Destroy"):
            lines.append(f"int {name}(void **handle) {{ std::free(handle); return 0; }}")
        elif library == MATHS["cublas"]:
            body = f'standin_library_kernel("{name}", *handle); return 0;'
            lines.append(f"int {name}(void **handle) {{ {body} }}")
        else:
            lines.append(f"int {name}() {{ return 0; }}")
    return "\n".join([*lines, "}", ""])


def _run(command: list[str]) -> str:
    """Runs a command and returns what it prints. Raises CalledProcessError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)  # pytest shows it where this fails
    done.check_returncode()
    return done.stdout
