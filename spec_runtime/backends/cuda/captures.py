"""Keeps captures of CUDA graphs apart from what would break them.

We capture in CUDA's thread-local mode: other threads may allocate and copy meanwhile, but none may
wait for the whole device, as ONNX Runtime does when it opens or closes a session, and the thread
that captures may not free. What finalizers free, at any moment in any thread, goes through
`free_later`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("spec_runtime")

_turn = threading.Lock()  # held by whoever captures, opens a session, or frees
_unfreed: deque[Callable[[], None]] = deque()


@contextmanager
def capturing() -> Iterator[None]:
    """Has other threads' such blocks and all of `free_later` wait while this one captures, or opens
    a session."""
    try:
        with _turn:
            yield
    finally:
        _free()


def free_later(free: Callable[[], None]) -> None:
    """Calls `free` at once, or after `capturing` if that is going on. Never waits for it."""
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
