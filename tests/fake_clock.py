"""A clock for tests of what the loop says a generation cost."""

from collections.abc import Callable
from typing import Any


class FakeClock:
    """A clock that stands still but for what wrapped functions take."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def taking(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self.now += seconds
            return function(*arguments, **options)

        return timed
