"""Keeps graphs as ONNX Runtime packs them for this CPU, in files that processes map and share.

ONNX Runtime copies most weights into a layout of its own when it opens a graph: each process has
them again. Written to a file once, that layout is mapped read-only instead, so that processes share
one copy, and opening is faster. The files lie in the user's cache folder, about twice as large as
the bundle's. They are named by the hashes of graph and weights, so that no other bundle's are ever
taken, and a file in their folder has their own hashes. Graphs of one target share one file of
weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from spec_runtime.bundle.manifest import Bundle, Graph
from spec_runtime.bundle.onnx_file import read_outline
from spec_runtime.errors import UserError
from spec_runtime.files.kept import read_kept
from spec_runtime.files.machine import cache_folder, cpu_model, give_back_memory
from spec_runtime.files.writing import (
    LockedError,
    file_state,
    replacing_folder,
    sha256,
    write_atomically,
)

GRAPH, WEIGHTS, SEAL = "graph.onnx", "weights.bin", "seal.json"
LOCK_SECONDS = 0.1  # between two looks whether another process has written the files
MAX_LOCK_SECONDS = 600.0
NICENESS = 10  # of the thread that packs, beside those that answer
FORM = 3  # of what `write` makes: files of an earlier form are not taken

log = logging.getLogger("spec_runtime")


def hashes_of(bundle: Bundle, graph: Graph) -> dict[Path, str]:
    """Returns the SHA-256 of the graph's file and of its files of weights, by path, as the manifest
    lists them. The graph must be one that `require_known_graph` takes."""
    path, listed = bundle.file(graph.file), bundle.manifest.files
    weights = [path.parent / name for name in sorted(read_outline(path).weight_files)]
    hashes = {file: listed[file.relative_to(bundle.path).as_posix()] for file in weights}
    return {path: listed[graph.file], **hashes}


def packed_file(
    path: Path, hashes: Mapping[Path, str], version: str, write: Callable[[Path], None]
) -> Path | None:
    """Returns the ONNX file that holds the graph at `path` as ONNX Runtime `version` packs it here.

    `hashes` has the hashes of the graph's file and its files of weights, see `hashes_of`. The first
    time, `write` makes GRAPH, and WEIGHTS if there are large ones, in the folder that it is given,
    once the hashes are found to be right; a process that comes meanwhile waits. Files that were
    altered since are packed anew, with a warning. Where they cannot be kept, this warns and returns
    None.
    """
    try:
        folder = cache_folder() / "packed" / _key(hashes, version)
        _make(folder, path.name, hashes, write)
    except (ValueError, OSError) as error:
        log.warning("packed weights of %s are not kept: %s", path.name, str(error))
        return None
    return folder / GRAPH


def _key(hashes: Mapping[Path, str], version: str) -> str:
    """Returns a name for the graph, its weights, the CPU, ONNX Runtime, and the files' form."""
    text = json.dumps([FORM, [*hashes.values()], version, cpu_model(), _instructions()])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU's instruction sets, which a virtual machine may have fewer of than the model;
    they decide how weights are packed."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _make(
    folder: Path, name: str, hashes: Mapping[Path, str], write: Callable[[Path], None]
) -> None:
    """Writes the files of `folder` unless they are there and whole, or waits for another process
    that does. Raises UserError if a file of the graph has not the hash that `hashes` gives it."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    end = time.monotonic() + MAX_LOCK_SECONDS
    was_there = folder.exists()
    while not _is_whole(folder):
        if was_there:
            log.warning("packed weights of %s are damaged: they are packed anew", name)
            was_there = False
        try:
            with replacing_folder(folder, os.listdir, "packed weights") as new:
                for file, expected in hashes.items():
                    if sha256(file) != expected:
                        raise UserError(f"{file.name} has not the hash that the manifest lists")
                with ThreadPoolExecutor(1, initializer=_give_way) as thread:
                    thread.submit(write, new).result()
                hashes_there = {file.name: sha256(file) for file in new.iterdir()}
                _share_weights(new, hashes_there.get(WEIGHTS))
                _seal(new, hashes_there)
            give_back_memory()
        except LockedError:
            if time.monotonic() > end:
                raise
            time.sleep(LOCK_SECONDS)


def _give_way() -> None:
    """Lets other threads go before this one, where threads have a priority of their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def _seal(folder: Path, hashes: dict[str, str]) -> None:
    """Writes the hashes and states of the folder's files into the same folder."""
    states = {name: file_state(folder / name) for name in hashes}
    write_atomically(folder / SEAL, json.dumps({"hashes": hashes, "states": states}))


def _share_weights(new: Path, wanted: str | None) -> None:
    """Replaces the weights in `new` by a link to those of a neighbouring folder, if they have the
    hash `wanted`, as graphs of one target for several numbers of lanes do."""
    same = []
    for folder in new.parent.iterdir():
        with suppress(OSError, ValueError, KeyError, TypeError):
            hashes = read_kept(folder / SEAL)["hashes"]
            if WEIGHTS in hashes and hashes[WEIGHTS] == wanted and _is_whole(folder):
                same.append((folder, hashes))
    if same:
        with suppress(OSError):  # a file system without links
            os.link(same[0][0] / WEIGHTS, new / f"{WEIGHTS}.link")
            os.replace(new / f"{WEIGHTS}.link", new / WEIGHTS)
    for folder, hashes in same:
        _seal(folder, hashes)  # a link counts as a change


def _is_whole(folder: Path) -> bool:
    """Returns whether the files in `folder` are as they were written.

    Those that nobody wrote to since are not read for that: hashing a gigabyte takes longer than
    opening it. Others, such as copies on another disk, are hashed, and sealed again if they agree.
    """
    try:
        seal = read_kept(folder / SEAL)
        hashes, states = seal["hashes"], seal["states"]
        if GRAPH not in hashes or not all((folder / name).is_file() for name in hashes):
            return False
        if all(list(file_state(folder / name)) == states[name] for name in hashes):
            return True
        if any(sha256(folder / name) != hashes[name] for name in hashes):
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    with suppress(OSError):  # a folder that only others may write to
        _seal(folder, hashes)
    return True
