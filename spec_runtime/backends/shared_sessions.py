"""Keeps one session for all engines of this process that run the same file in the same way.

A session on the CPU holds weights, most of them as ONNX Runtime packed them when it opened the
file, and threads, but nothing of a generation: KV buffers and outputs are bound by each backend.
Runs of several threads on one session are safe, and its threads serve them all.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from spec_runtime.bundle.onnx_file import read_outline
from spec_runtime.files.writing import file_state

_sessions: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_opening: weakref.WeakValueDictionary[Hashable, threading.Lock] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # guards `_opening`, whose locks are held while a file is opened


def shared_session(path: Path, settings: Hashable, open_new: Callable[[], Any]) -> Any:
    """Returns the session of the ONNX file at `path` with these settings that is open already, else
    what `open_new` returns.

    A file that was replaced or written to since counts as another one, whatever time it shows.
    """
    files = [path, *(path.parent / name for name in sorted(read_outline(path).weight_files))]
    key = (*map(file_state, files), settings)
    with _lock:
        opening = _opening.setdefault(key, threading.Lock())
    # Of two threads that open the same file, the second finds it open. Nobody waits for another
    # file, which may take minutes to be packed.
    with opening:
        session = _sessions.get(key)
        if session is None:
            session = _sessions[key] = open_new()
        return session
