"""Keeps captures of CUDA graphs apart from other threads' calls that would break them.

ONNX Runtime captures in CUDA's global mode: meanwhile no thread may allocate, free, open a session
or wait for a stream. Such calls are made inside `no_capture`, a capture inside `capturing`, and
what finalizers free goes through `free_later`.

Each thread has a lock of its own, so that calls of several threads do not wait for each other: a
thread that waits for its stream holds only its own lock. A capture takes the locks of all threads.
Nothing deadlocks: a call holds no lock but its thread's, and a capture never begins inside
`no_capture`. A finalizer may run at any moment in any thread, and therefore never waits.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

log = logging.getLogger("spec_runtime")

_turn = threading.Lock()  # held by whoever captures, and by whoever frees
_registry = threading.Lock()  # held while a thread's lock is added, and during a capture
_locks: weakref.WeakSet[Any] = weakref.WeakSet()  # of all threads alive
_unfreed: deque[Callable[[], None]] = deque()


class _OwnLock(threading.local):
    """The lock of one thread, reentrant."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        with _registry:
            _locks.add(self.lock)


_own = _OwnLock()


def no_capture() -> Any:
    """Returns a context manager inside which no other thread captures.

    Blocks of several threads run at the same time, and a thread may nest them.
    """
    return _own.lock


@contextmanager
def capturing() -> Iterator[None]:
    """Waits until all threads have left `no_capture`, and keeps them out while the block runs.

    Must not be entered inside `no_capture`.
    """
    try:
        with _turn, _registry, ExitStack() as held:
            for lock in list(_locks):
                held.enter_context(lock)
            yield
    finally:
        _free()


def free_later(free: Callable[[], None]) -> None:
    """Calls `free` at once, or if a thread captures, when it is done. Never waits for a capture."""
    _unfreed.append(free)
    _free()


def _free() -> None:
    # Whoever holds the turn comes here afterwards, so that nothing stays unfreed.
    while _unfreed and _turn.acquire(blocking=False):
        try:
            while _unfreed:
                _call(_unfreed.popleft())
        finally:
            _turn.release()


def _call(free: Callable[[], None]) -> None:
    try:
        free()
    except RuntimeError as error:  # there is nobody to tell: the owner is gone
        log.warning("memory on the device was not freed: %s", error)
