"""Tests several bundles behind one port, and what a request may choose: its model and drafter."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import small
import uvicorn
from apis import Api, each_door
from gates import GatedRuns, in_loop
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    PATIENCE,
    app_of,
    choice_of,
    in_process,
    metrics,
    post,
    running,
    stream,
    toy_engine,
    wait_until,
)

from spec_runtime import Engine, UserError
from spec_runtime.batch.batch import Batch
from spec_runtime.serve import accepting
from spec_runtime.serve.accepting import IdlestServer
from spec_runtime.serve.app import make_app
from spec_runtime.serve.metrics import Metrics
from spec_runtime.serve.models import Model, Models
from spec_runtime.serve.processes import bind, make_config
from spec_runtime.serve.responses.store import ResponseStore
from spec_runtime.serve.service import Service
from spec_runtime.serve.settings import Settings

BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
MANY = {"model": "letters", "prompt": "hello", "max_tokens": 60, "temperature": 0}


class Shelf:
    """Three toy bundles that count how often they are opened; `bytes` and `other` are alike."""

    def __init__(self, most_open: int | None = None, **settings: Any) -> None:
        self.opened: list[str] = []
        self.engines: dict[str, Engine] = {}
        self.fails = False
        self.may_open = threading.Event()
        self.may_open.set()
        self.settings = Settings("letters", parallel=1, **settings)
        self.metrics, self.kept = Metrics(), ResponseStore()
        found = [
            Model(name, lambda name=name: self._open(name), 200, ["none"], aliases)  # type: ignore[misc]
            for name, aliases in (("letters", ("small",)), ("bytes", ()), ("other", ()))
        ]
        timeout = self.settings.timeout
        self.models = Models(found, self.metrics, self.kept, most_open, timeout)

    def _open(self, name: str) -> Service:
        assert self.may_open.wait(PATIENCE)
        if self.fails:
            raise UserError("the disk is gone")
        self.opened.append(name)
        self.engines[name] = engine = small.toy_engine() if name == "letters" else toy_engine()
        return Service(engine, Settings(name, parallel=1), self.metrics, self.kept)


@contextmanager
def shelved(most_open: int | None = None, **settings: Any) -> Iterator[tuple[Shelf, Any]]:
    shelf = Shelf(most_open, **settings)
    with running(make_app(shelf.models, shelf.settings)) as server, server.client() as client:
        yield shelf, client


def test_each_bundle_is_opened_when_it_is_first_asked_for() -> None:
    with shelved() as (shelf, client):
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [
            *("letters", "small", "bytes", "other")
        ]
        assert client.get("/ready").status_code == 200
        assert shelf.opened == []
        expected = {
            "letters": small.toy_engine().generate("hello", raw=True, max_new_tokens=12).text,
            "bytes": toy_engine().generate("hello", raw=True, max_new_tokens=12).text,
        }
        assert expected["letters"] != expected["bytes"]
        for name in ("bytes", "letters", "bytes", "small", None):
            reply = post(client, COMPLETIONS, **BODY, model=name)
            model = name if name == "bytes" else "letters"
            assert reply["choices"][0]["text"] == expected[model]
            assert reply["model"] == model
        assert shelf.opened == ["bytes", "letters"]
        found = metrics(client)
        assert found["open_models"] == found['openings_total{model="bytes"}'] + 1 == 2
        assert found['answers_total{finish_reason="length"}'] == 5


def test_an_alias_is_a_model_and_what_is_none_is_404_with_the_names() -> None:
    with in_process(aliases=("gpt-4o",)) as client:
        assert post(client, COMPLETIONS, **BODY, model="gpt-4o")["model"] == "toy"
        listed = client.get("/v1/models").json()["data"]
        for each, name in zip(listed, ("toy", "gpt-4o"), strict=True):
            assert client.get(f"/v1/models/{name}").json() == each
            assert (each["id"], each["root"], each["max_model_len"]) == (name, "toy", 400)
        replies = [client.post(COMPLETIONS, json={**BODY, "model": "nobody"})]
        replies.append(client.get("/v1/models/nobody"))
        for reply in replies:
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (404, "model_not_found")
            assert "`toy`, `gpt-4o`" in error["message"]


def test_the_bundle_used_least_recently_makes_room() -> None:
    with shelved(most_open=1) as (shelf, client):
        for name in ("letters", "bytes", "letters"):
            post(client, CHAT, model=name, messages=HELLO, max_tokens=3)
        assert shelf.opened == ["letters", "bytes", "letters"]
        assert metrics(client)["open_models"] == 1
        with pytest.raises(RuntimeError, match="closed"):
            shelf.engines["bytes"].generate("x")
    with shelved(most_open=2) as (shelf, client):
        for name in ("letters", "bytes", "letters", "other", "letters"):
            post(client, COMPLETIONS, **BODY, model=name)
        assert shelf.opened == ["letters", "bytes", "other"]


@in_loop
async def test_a_bundle_lent_to_a_request_that_ends_in_that_moment_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = Shelf()
    model = shelf.models.find("letters")
    asking = asyncio.create_task(shelf.models._opened(model))
    monkeypatch.setattr(shelf.models, "_note", asking.cancel)  # called once it is lent
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert model.opened is not None
    assert model.opened.is_idle
    await shelf.models.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_bundle_is_closed_only_when_its_answers_are_complete(is_stream: bool) -> None:
    """Those asked for later wait for the bundle that waits for room, so that each has its turn."""
    with shelved(most_open=1) as (shelf, client), ThreadPoolExecutor(3) as pool:
        alone = choice_of(client, COMPLETIONS, **MANY)["text"]
        runs = GatedRuns(shelf.engines["letters"])
        ask: Any = stream if is_stream else post
        first = pool.submit(ask, client, COMPLETIONS, **{**MANY, "prompt": "hellp"})
        runs.wait_for_run()
        other = pool.submit(post, client, COMPLETIONS, **BODY, model="bytes")
        wait_until(lambda: metrics(client)["open_models"] == 0)
        later = pool.submit(post, client, COMPLETIONS, **MANY)
        assert not other.done()
        assert shelf.opened == ["letters"]
        runs.let_through()
        assert first.result(PATIENCE)
        assert other.result(PATIENCE)["model"] == "bytes"
        assert later.result(PATIENCE)["choices"][0]["text"] == alone
        assert shelf.opened == ["letters", "bytes", "letters"]


def test_nobody_but_who_needs_room_waits_for_a_bundle_that_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bundle is closed only once the graph that a thread of its own opens is there."""
    is_there = threading.Event()
    with shelved(most_open=2) as (shelf, client), ThreadPoolExecutor(1) as pool:

        def end_opening(batch: Batch) -> None:
            if batch._engine is shelf.engines["letters"]:
                assert is_there.wait(PATIENCE)

        monkeypatch.setattr(Batch, "end_opening", end_opening)
        for name in ("letters", "bytes"):
            post(client, COMPLETIONS, **BODY, model=name)
        needs_room = pool.submit(post, client, COMPLETIONS, **BODY, model="other")
        wait_until(lambda: metrics(client)["open_models"] == 1)
        assert len(stream(client, COMPLETIONS, **BODY, model="bytes")) > 2
        assert client.get("/ready").status_code == 200
        assert not needs_room.done()
        assert shelf.opened == ["letters", "bytes"]
        is_there.set()
        assert needs_room.result(PATIENCE)["model"] == "other"


def test_a_bundle_that_cannot_be_opened_is_503_and_tried_again() -> None:
    with shelved() as (shelf, client):
        shelf.fails = True
        reply = client.post(COMPLETIONS, json=BODY)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "model_not_opened"
        assert "disk" not in reply.text
        shelf.fails = False
        post(client, COMPLETIONS, **BODY)
        assert metrics(client)['openings_total{model="letters"}'] == 1


def test_who_waits_too_long_for_a_bundle_gets_504() -> None:
    with shelved(timeout=0.2) as (shelf, client):
        shelf.may_open.clear()
        assert client.post(COMPLETIONS, json=BODY).status_code == 504
        shelf.may_open.set()
        wait_until(lambda: metrics(client)["open_models"] == 1)
        assert shelf.models.find("letters").opened.is_idle  # type: ignore[union-attr]


def test_a_response_is_kept_while_its_bundle_is_closed() -> None:
    with shelved(most_open=1) as (_, client):
        first = post(client, "/v1/responses", model="letters", input="hello")
        post(client, COMPLETIONS, **BODY, model="bytes")
        assert client.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
        more = {"previous_response_id": first["id"], "model": "bytes", "input": "more"}
        assert post(client, "/v1/responses", **more)["model"] == "bytes"


# ---- drafters ----


@each_door
def test_a_request_may_name_its_drafter(api: Api) -> None:
    """The text is the same, and what is drafted is not."""
    with in_process(small.toy_engine(), parallel=2) as client:
        texts, drafted = [], []
        for drafter in ("prompt_lookup", "none", None):
            texts.append(api.read(post(client, api.path, **api.body(40), drafter=drafter)).text)
            drafted.append(metrics(client)['tokens_total{kind="drafted"}'])
        assert texts[0] == texts[1] == texts[2] != ""
        assert 0 < drafted[0] == drafted[1] < drafted[2]


def test_another_drafter_than_the_servers_is_opened_once_a_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = []
    open_drafter = small.ToyOpener.open

    def counting(self: small.ToyOpener, name: str | None, lookup: bool | None) -> Any:
        opened.append(name)
        return open_drafter(self, name, lookup)

    with in_process(small.toy_engine("none"), parallel=1) as client:
        monkeypatch.setattr(small.ToyOpener, "open", counting)
        plain, *others = (
            choice_of(client, COMPLETIONS, **BODY, drafter=name)["text"]
            for name in (None, "prompt_lookup", "prompt_lookup", "none")
        )
        assert others == [plain] * 3
        assert opened == ["prompt_lookup"]


# ---- worker processes ----


def test_the_process_with_fewest_connections_takes_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two servers in threads stand for two processes."""
    monkeypatch.setattr(accepting, "WAIT_SECONDS", PATIENCE)
    monkeypatch.setattr(accepting, "MOST_SECONDS", PATIENCE)
    apps = [app_of(toy_engine(), Settings("toy")) for _ in range(2)]
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        sockets = [bound.dup() for _ in apps]
        servers = [IdlestServer(make_config(app, grace=PATIENCE)) for app in apps]
        threads = [
            threading.Thread(target=asyncio.run, args=(server.serve([each]),))
            for server, each in zip(servers, sockets, strict=True)
        ]
        for thread in threads:
            thread.start()
        connections: list[socket.socket] = []
        try:
            for number in (1, 2):
                connections.append(socket.create_connection(bound.getsockname(), PATIENCE))
                wait_until(lambda number=number: _num_connections(servers) == number)  # type: ignore[misc]
            assert [len(each.server_state.connections) for each in servers] == [1, 1]
        finally:
            for each in connections:
                each.close()
            for server in servers:
                server.should_exit = True
            for thread in threads:
                thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)


def _num_connections(servers: Sequence[uvicorn.Server]) -> int:
    return sum(len(each.server_state.connections) for each in servers)


def test_no_request_is_lost_while_bundles_are_opened_and_closed() -> None:
    with shelved(most_open=1) as (shelf, client):
        for _ in range(2):
            with ThreadPoolExecutor(4) as pool:
                asked = [
                    pool.submit(post, client, COMPLETIONS, model=name, prompt="a", max_tokens=8)
                    for name in 3 * ("letters", "bytes")
                ]
            assert all(each.result()["usage"]["completion_tokens"] for each in asked)
    assert len(shelf.opened) > 2, "bundles were closed and opened again"
