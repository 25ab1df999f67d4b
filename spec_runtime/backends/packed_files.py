"""Keeps graphs as ONNX Runtime packs them for this CPU, in files that processes map and share.

ONNX Runtime copies most weights into a layout of its own when it opens a graph: each process has
them again. Written to a file once, that layout is mapped read-only instead, so that processes share
one copy, and opening is faster. The files lie in the user's cache folder, about twice as large as
the bundle's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from spec_runtime.files.onnx_file import read_outline
from spec_runtime.files.writing import LockedError, replacing_folder
from spec_runtime.machine import cache_folder, cpu_model, give_back_memory

GRAPH, WEIGHTS = "graph.onnx", "weights.bin"
LOCK_SECONDS = 0.1  # between two looks whether another process has written the files
MAX_LOCK_SECONDS = 600.0
FORM = 2  # of what `write` makes: files of an earlier form are not taken

log = logging.getLogger("spec_runtime")


def packed_file(path: Path, version: str, write: Callable[[Path], None]) -> Path | None:
    """Returns the ONNX file that holds the graph at `path` as ONNX Runtime `version` packs it here.

    The first time, `write` makes the files GRAPH and WEIGHTS in the folder that it is given; a
    process that comes meanwhile waits. Where they cannot be kept, this warns and returns None.
    """
    try:
        folder = cache_folder() / "packed" / _key(path, version)
        _make(folder, write)
    except (ValueError, OSError) as error:
        log.warning("packed weights of %s are not kept: %s", path.name, str(error))
        return None
    return folder / GRAPH


def _key(path: Path, version: str) -> str:
    """Returns a name for the graph, its weights, the CPU, ONNX Runtime, and the files' form."""
    files = [path.parent / name for name in sorted(read_outline(path).weight_files)]
    states = [(str(f.resolve()), f.stat().st_mtime_ns, f.stat().st_size) for f in files]
    graph = hashlib.sha256(path.read_bytes()).hexdigest()
    text = json.dumps([FORM, graph, states, version, cpu_model(), _instructions()])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU's instruction sets, which a virtual machine may have fewer of than the model;
    they decide how weights are packed."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    end = time.monotonic() + MAX_LOCK_SECONDS
    while not (folder / GRAPH).exists():
        try:
            with replacing_folder(folder, lambda _: (GRAPH, WEIGHTS), "packed weights") as new:
                write(new)
            give_back_memory()
        except LockedError:
            if time.monotonic() > end:
                raise
            time.sleep(LOCK_SECONDS)
