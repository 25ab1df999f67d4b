"""Makes the environment that the parts of tools/gpu_check.py run in: carried wheels, CUDA's
libraries.

This file imports the standard library alone, so that it also works where nothing else does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

INSTALL_SECONDS = 300


def install_wheels(folder: Path, site: Path) -> list[str]:
    """Installs every wheel of `folder` into `site`, without a network, and returns their names.

    What the wheels need besides must be among them, or installed already. Raises ValueError, in one
    line, if there is none or pip refuses one.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"got no *.whl in {folder}, expected the wheels to install")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    command += ["--target", str(site), *map(str, wheels)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"pip took more than {INSTALL_SECONDS} s for {folder}") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason"]
        raise ValueError(f"pip cannot install the wheels of {folder}: {said[-1][:300]}")
    return [wheel.name for wheel in wheels]


def library_folders(search: Sequence[Path]) -> list[Path]:
    """Returns the folders below these that hold CUDA's libraries, as wheels bring them.

    They are `nvidia/*/lib` and `torch/lib`. ONNX Runtime's `preload_dlls` looks for them only
    beside itself, so that those of an installed PyTorch are not found where ONNX Runtime was
    carried.
    """
    folders = []
    for place in search:
        folders += sorted(x for x in place.glob("nvidia/*/lib") if any(x.glob("*.so*")))
        torch = place / "torch" / "lib"
        folders += [torch] if any(torch.glob("libcu*.so*")) else []
    return list(dict.fromkeys(folders))


def environment(root: Path, site: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a part's process.

    What was carried (`site`) comes first on Python's path, then the checkout `root`, then what the
    caller had set. Libraries that the caller names come first on the loader's path, then those
    carried, then those of this Python's packages.
    """
    carried = [] if site is None else [site]
    folders = library_folders([*carried, *(Path(place) for place in sys.path if place)])
    return {
        **given,
        "PYTHONPATH": _joined(*carried, root, given.get("PYTHONPATH")),
        "LD_LIBRARY_PATH": _joined(given.get("LD_LIBRARY_PATH"), *folders),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _joined(*places: str | Path | None) -> str:
    return os.pathsep.join(str(place) for place in places if place)
