"""Tests when runs are captured, replayed and closed; the backends' own tests make real runs."""

from __future__ import annotations

import threading

import pytest

from spec_runtime.backends.cuda import graph_cache
from spec_runtime.backends.cuda.graph_cache import GraphCache, GraphRun


class Noted(GraphRun):
    """A run that writes down what happens to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def enqueue(self) -> None:
        self._log.append(f"run {self._name}")

    def capture(self) -> None:
        self._log.append(f"capture {self._name}")

    def replay(self) -> None:
        self._log.append(f"replay {self._name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def played(names: str, cache: GraphCache[Noted]) -> list[str]:
    """Returns what happens when these runs are made in turn; capitals may not be captured."""
    log: list[str] = []
    for name in names:
        run = cache.get(name, lambda: Noted(name, log))  # noqa: B023
        run._log, run.may_capture = log, name.islower()
        cache.run(run)
    return log


@pytest.mark.parametrize("by_thread", [True, False])
def test_the_second_run_of_a_key_is_captured_and_later_ones_replay_it(by_thread: bool) -> None:
    expected = ["run a", "run b", "capture a", "replay a", "capture b", "run C", "run C", "run C"]
    assert played("abaabCCC", GraphCache(True, by_thread)) == expected
    assert played("aaa", GraphCache(False, by_thread)) == ["run a"] * 3


def test_the_run_unused_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_RUNS", 2)
    cache: GraphCache[Noted] = GraphCache(True)
    assert played("aba", cache) == ["run a", "run b", "capture a"]
    assert played("ca", cache) == ["run c", "replay a"]  # b went, for it was used before a
    log: list[str] = []
    cache.get("a", lambda: Noted("a", log))._log = log
    cache.get("c", lambda: Noted("c", log))._log = log
    played("d", cache)
    assert log == ["close a"]
    cache.clear()
    assert log == ["close a", "close c"]


def test_graphs_of_threads_stay_and_are_counted_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_RUNS", 2)
    cache: GraphCache[Noted] = GraphCache(True, by_thread=True)
    assert played("aabcda", cache)[-1] == "replay a", "it went with b"
    logs: list[list[str]] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: logs.append(played("aaa", cache)))
        thread.start()
        thread.join()
    assert logs == [["run a", "capture a", "replay a"], ["run a"] * 3]
