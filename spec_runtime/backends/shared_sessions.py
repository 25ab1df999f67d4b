"""Keeps one session for all engines of this process that run the same file in the same way.

A session on the CPU holds weights, most of them as ONNX Runtime packed them when it opened the
file, and threads, but nothing of a generation: KV buffers and outputs are bound by each backend.
Runs of several threads on one session are safe, and its threads serve them all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from spec_runtime.files.onnx_file import read_outline

_sessions: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_session(path: Path, settings: Hashable, open_new: Callable[[], Any]) -> Any:
    """Returns the session of the ONNX file at `path` with these settings that is open already, else
    what `open_new` returns.

    A file that was replaced or changed since counts as another one.
    """
    # One at a time: of two threads that open the same file, the second is to find it open.
    with _lock:
        key = (_state_of(path), settings)
        session = _sessions.get(key)
        if session is None:
            session = _sessions[key] = open_new()
        return session


def _state_of(path: Path) -> Hashable:
    """Returns what tells this file and those of its weights from others, by place and time."""
    files = [path, *(path.parent / name for name in sorted(read_outline(path).weight_files))]
    states = [file.stat() for file in files]
    return tuple((s.st_dev, s.st_ino, s.st_mtime_ns, s.st_size) for s in states)
