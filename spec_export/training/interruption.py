"""Keeps Ctrl-C and SIGTERM out of the moments in which a run's state is half of two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def delayed() -> Iterator[None]:
    """Handles a signal that comes during the block at its end.

    Does nothing outside of the main thread, where Python runs no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def remember(number: int, frame: Any) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, remember) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not set by Python and cannot be set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for received in arrived:
        signal.raise_signal(received)
