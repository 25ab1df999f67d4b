"""Tests how requests are handed on to replicas that die, are full, or hang."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from served import COMPLETIONS, events, toy_engine

from spec_runtime import QueueFull
from spec_runtime.serve.app import make_unguarded_app
from spec_runtime.serve.guards import Guards
from spec_runtime.serve.metrics import CarriedMetrics, Metrics
from spec_runtime.serve.models import models_of
from spec_runtime.serve.relay import Relay, ReplicaDied, answers_of
from spec_runtime.serve.service import Service
from spec_runtime.serve.settings import Settings

ASK = {"prompt": "hello", "max_tokens": 30, "temperature": 0}
STREAM = {**ASK, "stream": True}
EXPECTED = toy_engine().generate("hello", raw=True, max_new_tokens=30).text


class Replicas:
    """Replicas on one toy engine, of which the first ones behave as the test says.

    A replica "dies" before it answers, or after a number of messages; "full" is a full queue,
    "hangs" never answers, "breaks" fails by a mistake of ours, and "ends" is a mistake in the midst
    of its answer.
    """

    def __init__(self, *first: str | int) -> None:
        self.metrics = CarriedMetrics()
        service = Service(toy_engine(), Settings("toy"), self.metrics)
        self._app = make_unguarded_app(models_of(service))
        self._first = list(first)
        self.num_asked = self.num_left = self.num_messages = 0

    async def ask(self, scope: Any, body: bytes) -> AsyncGenerator[Sequence[Any], None]:
        self.num_asked += 1
        how = self._first.pop(0) if self._first else "answers"
        raised = {
            "full": QueueFull("9 requests are waiting"),
            "dies": ReplicaDied("it was killed"),
            "breaks": KeyError("a mistake"),
        }
        if how in raised:
            raise raised[str(how)]
        if how == "hangs":
            try:
                await asyncio.Future()
            finally:
                self.num_left += 1
        self.num_messages = 0
        async with aclosing(answers_of(self._app, scope, body, self.metrics)) as answer:
            async for messages in answer:
                for message in messages:
                    if self.num_messages == how:
                        raise ReplicaDied("it was killed")
                    if how == "ends" and self.num_messages == 3:
                        return
                    yield [message]
                    self.num_messages += 1


class Client:
    """Asks an app as a server does; `messages` are what it got."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.messages: list[Any] = []
        self.metrics = Metrics()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"abc")]
        self.scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}}
        self.scope |= {"method": "POST", "path": COMPLETIONS, "query_string": b""}
        self.scope |= {"headers": headers, "client": ("127.0.0.1", 9), "scheme": "http"}
        data = json.dumps(body).encode()
        self._first = [{"type": "http.request", "body": data, "more_body": False}]

    async def ask(self, replicas: Replicas, timeout: float, has_left: asyncio.Event) -> None:
        async def receive() -> Any:
            if self._first:
                return self._first.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            is_open = not self.messages or self.messages[-1].get("more_body", True)
            assert is_open, "a message after the end"
            self.messages.append(message)

        relay = Relay(replicas.ask, timeout, self.metrics)
        app = Guards(relay, Settings("front"), self.metrics, has_ids=True)
        await app(self.scope, receive, send)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> str:
        assert not self.messages[-1].get("more_body"), "it was cut"
        return b"".join(message["body"] for message in self.messages[1:]).decode()

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]

    @property
    def text(self) -> str:
        """Returns the text that came of an answer."""
        assert self.status == 200, self.body
        if self.headers["content-type"].startswith("text/event-stream"):
            parts = events(self.body)[:-1]
        else:
            parts = [json.loads(self.body)]
        return "".join(part["choices"][0]["text"] for part in parts)


def relayed(replicas: Replicas, body: dict[str, Any], timeout: float = 20.0) -> Client:
    """Asks once; returns what the client got."""
    client = Client(body)
    asyncio.run(client.ask(replicas, timeout, asyncio.Event()))
    return client


def left(replicas: Replicas, body: dict[str, Any], num_messages: int) -> Client:
    """Asks, and leaves when a replica has the request and `num_messages` messages have come."""

    async def ask_and_leave() -> None:
        has_left = asyncio.Event()
        task = asyncio.create_task(client.ask(replicas, 20.0, has_left))
        while not replicas.num_asked or len(client.messages) < num_messages:
            await asyncio.sleep(0)
        has_left.set()
        await task

    client = Client(body)
    asyncio.run(ask_and_leave())
    return client


def test_an_answer_is_the_replicas() -> None:
    client = relayed(Replicas(), ASK)
    assert client.text == EXPECTED
    assert "x-specsplit-retries" not in client.headers
    assert "x-request-id" not in client.headers, "the server in front gave it"
    assert client.scope["log"]["completion_tokens"] == 30
    scraped = client.metrics.scrape().decode()
    assert 'specsplit_answers_total{finish_reason="length"} 1.0' in scraped
    assert 'specsplit_tokens_total{kind="completion"} 30.0' in scraped
    assert 'path="/v1/completions",status="200"} 1.0' in scraped
    client = relayed(Replicas(), STREAM)
    assert (client.text, events(client.body)[-1]) == (EXPECTED, "[DONE]")


@pytest.mark.parametrize("death", ["dies", 0, 1], ids=["at once", "silent", "after its headers"])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
def test_a_replica_that_dies_before_it_answers_is_replaced(
    death: str | int, body: dict[str, Any]
) -> None:
    replicas = Replicas(death, "dies")
    client = relayed(replicas, body)
    assert client.text == EXPECTED
    assert client.headers["x-specsplit-retries"] == "2"
    assert client.scope["log"]["replicas_died"] == 2
    assert replicas.num_asked == 3


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
def test_a_request_that_kills_is_given_up(body: dict[str, Any]) -> None:
    replicas = Replicas(*["dies"] * 9)
    client = relayed(replicas, body)
    assert client.status == 503
    assert client.error["code"] == client.scope["log"]["error"] == "replica_died"
    assert replicas.num_asked == 3, "not all replicas are taken along"


def test_a_stream_that_is_cut_ends_with_an_error() -> None:
    replicas = Replicas(3)  # its headers and two events
    client = relayed(replicas, STREAM)
    assert events(client.body)[-1]["error"]["code"] == "replica_died"
    assert EXPECTED.startswith(client.text)
    assert 0 < len(client.text) < len(EXPECTED)
    assert replicas.num_asked == 1, "a stream that was begun is not begun again"


def test_a_death_after_the_end_is_no_error() -> None:
    """Only the report is missing then, which no client sees."""
    whole = Replicas()
    relayed(whole, STREAM)
    client = relayed(Replicas(whole.num_messages - 1), STREAM)
    assert (client.text, events(client.body)[-1]) == (EXPECTED, "[DONE]")
    assert "completion_tokens" not in client.scope["log"], "it died before its report"


def test_no_part_of_an_answer_that_is_no_stream_is_sent_before_the_rest() -> None:
    replicas = Replicas()

    async def ask(scope: Any, body: bytes) -> AsyncGenerator[Sequence[Any], None]:
        replicas.num_asked += 1
        part = b"%d, " % replicas.num_asked
        yield [{"type": "http.response.start", "status": 200, "headers": []}]
        yield [{"type": "http.response.body", "body": part, "more_body": True}]
        if replicas.num_asked == 1:
            raise ReplicaDied("it was killed")
        yield [{"type": "http.response.body", "body": b"and more", "more_body": False}]

    replicas.ask = ask  # type: ignore[method-assign]
    assert relayed(replicas, ASK).body == "2, and more"


def test_a_full_queue_refuses_new_requests_only() -> None:
    client = relayed(Replicas("full"), ASK)
    assert client.status == 429
    assert client.headers["retry-after"] == "1"
    full = "9 requests are waiting, the most allowed here; try again in 1 s"
    assert client.error["message"] == full
    accepted = Replicas("dies", "full", "full")
    assert relayed(accepted, ASK).text == EXPECTED
    assert accepted.num_asked == 4


def test_a_replica_that_hangs_is_a_timeout() -> None:
    replicas = Replicas("hangs")
    client = relayed(replicas, ASK, timeout=0.05)
    assert (client.status, client.error["code"]) == (504, "timeout")
    assert replicas.num_left == 1, "the replica is told"


def test_a_mistake_of_ours_is_500(caplog: pytest.LogCaptureFixture) -> None:
    replicas = Replicas("breaks", "ends")
    client = relayed(replicas, ASK)
    assert (client.status, client.error["code"]) == (500, "internal_error")
    client = relayed(replicas, STREAM)
    assert events(client.body)[-1]["error"]["code"] == "internal_error"
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert replicas.num_asked == 2


@pytest.mark.parametrize("body", [{**ASK, "temperature": 9}, {**STREAM, "prompt": [999]}])
def test_refusals_of_a_replica_are_handed_on(body: dict[str, Any]) -> None:
    client = relayed(Replicas(), body)
    assert (client.status, client.error["type"]) == (400, "invalid_request_error")


def test_a_client_that_leaves_is_not_asked_for_again() -> None:
    replicas = Replicas("hangs")
    client = left(replicas, ASK, num_messages=0)
    assert client.messages == []
    assert client.scope["log"]["gone"] is True
    assert replicas.num_asked == replicas.num_left == 1


def test_leaving_ends_the_answer_of_a_replica() -> None:
    replicas = Replicas()
    client = left(replicas, {**STREAM, "max_tokens": 300}, num_messages=3)
    assert client.messages[-1]["more_body"], "nothing is sent to nobody"
    assert ("count_end", ("cancelled",)) in replicas.metrics.take()


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "spec_runtime.serve.ray_app", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("spec_runtime.serve.ray_app")
    assert str(caught.value) == "Ray Serve is not installed: pip install 'specsplit[ray]'"
