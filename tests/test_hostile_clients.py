"""Lets each kind of hostile client at a server that runs a tiny bundle, beside eight ordinary
clients: these are all answered, and /health answers meanwhile."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import small
from gates import PATIENCE, wait_until
from served import CHAT, HELLO, metrics, served
from test_serving_models import shelved

for module in ("onnx", "onnxruntime"):
    pytest.importorskip(module, reason=f"{module} is not installed")
import httpx  # noqa: E402
import tiny_bundle  # noqa: E402

from spec_runtime.errors import UserError  # noqa: E402
from tools.measure import hostile_clients, load_server  # noqa: E402
from tools.measure.load_server import MORE, Bounds, Ordinary, Server  # noqa: E402

# Far wider than those of the load test: the machine may be busy. What a fault did took minutes, or
# gigabytes.
BOUNDS = Bounds(health=30, first=30, growth=500, patience=30)
SECONDS = 0.4  # of a kind's rounds; what then still runs is left


class Keeper:
    """Keeps one server for all kinds; starts another one after a kind that it has not survived."""

    def __init__(self, folder: Path) -> None:
        self._words = ["--bundle", str(folder), "--no-profile", "--grace", "1"]
        self._cache, self._running = folder / "cache", ExitStack()
        self._server: Server | None = None

    def server(self) -> Server:
        if self._server is None:
            started = load_server.served(self._words, self._cache)
            self._server = self._running.enter_context(started)
        return self._server

    def end(self) -> None:
        self._server = None
        self._running.close()


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_bundle, "MAX_LENGTH", 6000)
        kept = Keeper(tiny_bundle.write(tmp_path_factory.mktemp("hostile") / "tiny"))
    yield kept
    kept.end()


@pytest.mark.parametrize("kind", hostile_clients.KINDS)
def test_a_hostile_client_stops_nobody(kind: str, keeper: Keeper) -> None:
    figures = load_server.measure(keeper.server(), kind, BOUNDS, seconds=SECONDS)
    if figures["broken"]:
        keeper.end()
    assert figures["broken"] == [], json.dumps(figures)
    assert figures["asked"] >= load_server.NUM_CLIENTS


@pytest.mark.slow
def test_the_server_ends_cleanly_after_all_of_them(keeper: Keeper) -> None:
    server = keeper.server()
    load_server.measure(server, "slow_schemas", BOUNDS, rounds=1, seconds=SECONDS)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0, server.log.read_text()
    assert server.num_tracebacks == 0
    keeper.end()


# ---- who waits for whom ----


def test_a_lane_that_opens_slowly_stops_neither_health_nor_other_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request needs no further lane, so that it is answered while the second one's is
    opened; a third one is taken and /health answers meanwhile."""
    may_open, opening = threading.Event(), threading.Event()
    open_lane = small.ToyOpener.open_lane

    def wait_and_open(self: small.ToyOpener, engine: small.Engine) -> small.Engine:
        opening.set()
        assert may_open.wait(PATIENCE), "nobody let this lane open"
        return open_lane(self, engine)

    monkeypatch.setattr(small.ToyOpener, "open_lane", wait_and_open)
    body = {"messages": HELLO, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    with (
        served(small.toy_engine(), parallel=2) as server,
        server.client() as client,
        ThreadPoolExecutor(3) as pool,
    ):
        try:
            asked = [pool.submit(client.post, CHAT, json=body) for _ in range(2)]
            assert opening.wait(PATIENCE), "no lane was opened"
            asked.append(pool.submit(client.post, CHAT, json=body))
            wait_until(lambda: num_taken(client) == 3 or asked[0].done() or asked[1].done())
            assert client.get("/health").status_code == 200
            wait_until(lambda: asked[0].done() or asked[1].done())
        finally:
            may_open.set()
        assert [each.result().status_code for each in asked] == [200] * 3


def test_no_request_is_lost_while_bundles_are_opened_and_closed() -> None:
    with shelved(most_open=1) as (shelf, client):
        ordinary = Ordinary(str(client.base_url), PATIENCE, ["letters", "bytes"])
        asyncio.run(ordinary.run(most=3))
    assert {each.ended_as for each in ordinary.answers} == {"answered"}
    assert len(ordinary.answers) == 3 * load_server.NUM_CLIENTS
    assert len(shelf.opened) > 2, "bundles were closed and opened again"


def num_taken(client: httpx.Client) -> float:
    """Counts the requests that run or wait."""
    found = metrics(client)
    return found["running_requests"] + found["waiting_requests"]


# ---- the tool itself ----


def test_what_a_kind_breaks_is_named() -> None:
    good = {
        "kind": "absolute_form",
        "health": 0.1,
        "unhealthy": 0,
        "first": {"longest": 0.5},
        "lost": {},
        "hostile": {"403": 2, "503": 1},
        "too_large": False,
        "ready_in_vain": 1.0,
        "tracebacks": 0,
        "kept": {"threads": MORE, "files": 0},
    }
    assert load_server.broken(good, Bounds()) == []
    assert load_server.broken(good | {"hostile": {"200": 1, "500": 1}}, Bounds()) == [
        "hostile requests end as 200, 500"
    ]
    assert hostile_clients.faults("burst", {"200": 1, "504": 1}) == []
    slow = good | {"health": 0.3, "first": {"longest": 2.1}}
    assert load_server.broken(slow, Bounds()) == ["health", "first token"]
    assert load_server.broken(slow, Bounds(health=0.4, first=3)) == []
    bad = good | {"unhealthy": 1, "lost": {"504": 1}, "too_large": True, "tracebacks": 1}
    bad |= {"ready_in_vain": 13.0, "kept": {"threads": 0, "files": MORE + 1}}
    assert load_server.broken(bad, Bounds()) == [
        *("health", "lost requests", "memory", "threads or files", "ready", "tracebacks")
    ]


@pytest.mark.parametrize(
    ("times", "ready", "expected"),
    [
        ([0, 9], [(1, 200), (4, 503)], 4),
        ([0, 9], [(1, 200), (4, 200)], 9),
        ([0, 9], [(1, 503), (4, 200)], 1),
        ([0, 9], [(1, 503)], 0),  # it never said that it was ready
        ([0, 9], [], 0),  # it said nothing at all, which /health shows
        ([0, 1, 2, 10], [(0.5, 200), (1.5, 200), (7, 200)], 8),
    ],
)
def test_how_long_ready_was_untrue(
    times: list[float], ready: list[tuple[float, int]], expected: float
) -> None:
    assert load_server.longest_lie(times, ready) == expected


def test_only_loopback_is_attacked() -> None:
    assert hostile_clients.port_of("http://127.0.0.1:8000") == 8000
    for url in ("http://example.com:80", "http://10.0.0.1:8000", "http://localhost"):
        with pytest.raises(ValueError, match="expected an address on loopback with a port"):
            hostile_clients.port_of(url)


def test_unknown_kinds_are_one_line() -> None:
    assert load_server.kinds_of("all") == list(hostile_clients.KINDS)
    assert load_server.kinds_of("burst,lexeme") == ["burst", "lexeme"]
    with pytest.raises(UserError, match="got --kinds 'burts', expected some of nobody, burst, "):
        load_server.kinds_of("burts")


@pytest.mark.parametrize("words", [["--cold"], pytest.param([], marks=pytest.mark.slow)])
def test_a_table_of_kinds_is_printed_and_written(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tiny_bundle.write(tmp_path / "tiny"), tmp_path / "out.json"
    words = [*words, "--kinds", "absolute_form", "--seconds", "0.1", "--json", str(out)]
    words += ["--max-health", "5", "--max-first", "9", "--bundle", str(folder)]
    status = load_server.main(words)
    figures = json.loads(out.read_text())
    (kind,) = figures["kinds"]
    assert status == bool(kind["broken"])
    assert (kind["exit"], kind["lost"]) == ("0", {})
    assert figures["cache"] == ("empty" if "--cold" in words else "full")
    assert "| absolute_form |" in capsys.readouterr().out
