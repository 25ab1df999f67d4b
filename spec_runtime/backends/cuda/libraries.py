"""Finds and loads CUDA's libraries, which ONNX Runtime's CUDA provider links to.

ONNX Runtime itself looks only beside its own folder and prints which ones it misses. This file also
finds them beside an installed torch, prints nothing, and names a missing library, driver or GPU.
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from spec_runtime.errors import UserError
from spec_runtime.files.installed import install, program

RUNTIME = "libcudart.so.13"
# By the wheel that holds each; a library follows those that it links to itself.
LIBRARIES = {
    RUNTIME: "nvidia-cuda-runtime",
    "libcublasLt.so.13": "nvidia-cublas",
    "libcublas.so.13": "nvidia-cublas",
    "libcurand.so.10": "nvidia-curand",
}
DRIVER = "libcuda.so.1"


def library_folders(paths: Iterable[str] | None = None) -> list[Path]:
    """Returns the folders in which wheels keep CUDA's libraries: NVIDIA's own, and torch's.

    `paths` are folders that hold packages; None takes Python's path.
    """
    return [
        folder
        for path in (sys.path if paths is None else paths)
        if path  # "" is the current folder
        for pattern in ("nvidia/*/lib", "torch/lib")
        for folder in sorted(Path(path).glob(pattern))
    ]


@cache
def load_libraries() -> dict[str, str]:
    """Loads the driver and CUDA's libraries; returns why each that is missing is, by its name.

    Those under LD_LIBRARY_PATH come first, then those from wheels, which are of one version, and
    then the system's.
    """
    missing = {}
    for name in (DRIVER, *LIBRARIES):
        fault = _load(name)
        if fault is not None:
            missing[name] = fault
    return missing


def require_gpu() -> None:
    """Raises UserError unless the driver, CUDA's libraries and a GPU are here.

    A library that is missing is named, with the wheel that brings it.
    """
    if sys.platform != "linux":
        return
    missing = load_libraries()
    if DRIVER in missing:
        raise UserError(
            f"got no NVIDIA driver here ({missing[DRIVER]}), expected an NVIDIA GPU and its "
            "driver: install it, give the container the GPU, or choose --backend onnxruntime"
        )
    for name, fault in missing.items():
        raise UserError(
            f"got no {name} ({fault}), expected CUDA 13's libraries for ONNX Runtime: run "
            f"{install('gpu')} or {program('pip')} install {LIBRARIES[name]}, or add its folder to "
            "LD_LIBRARY_PATH"
        )
    runtime, count = ctypes.CDLL(RUNTIME), ctypes.c_int()
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    if error := runtime.cudaGetDeviceCount(ctypes.byref(count)):
        reason = runtime.cudaGetErrorString(error).decode()
        raise UserError(
            f"got no usable GPU ({reason}), expected an NVIDIA GPU with a driver for CUDA 13: see "
            "what nvidia-smi and CUDA_VISIBLE_DEVICES say, or choose --backend onnxruntime"
        )


def _load(name: str) -> str | None:
    """Loads a library, and returns why it could not, or None."""
    chosen = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders = [*(Path(folder) for folder in chosen if folder), *library_folders()]
    for place in (*(str(folder / name) for folder in folders if (folder / name).exists()), name):
        try:
            ctypes.CDLL(place)
            return None
        except OSError as error:
            fault = str(error)
    return fault
