"""Tests how requests are handed on to replicas that die, are full, or hang."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

for module in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(module, reason=f"{module} is not installed; the extra serve has it")
from served import events, toy_engine  # noqa: E402

from spec_runtime import QueueFull  # noqa: E402
from spec_runtime.serving.app import make_unguarded_app  # noqa: E402
from spec_runtime.serving.guards import Guards  # noqa: E402
from spec_runtime.serving.metrics import CarriedMetrics, Metrics  # noqa: E402
from spec_runtime.serving.relay import Messages, Relay, ReplicaDied, answers_of  # noqa: E402
from spec_runtime.serving.service import Service  # noqa: E402
from spec_runtime.serving.settings import Settings  # noqa: E402

ASK = {"prompt": "hello", "max_tokens": 30, "temperature": 0}
STREAM = {**ASK, "stream": True}
Replica = Callable[[Any, bytes], Messages]


class Replicas:
    """Replicas on one toy engine, of which the first ones behave as the test says.

    A replica "dies" before it answers, or after so many messages; "full" is a full
    queue, "hangs" never answers, "breaks" fails by a mistake of ours, and "ends" is a mistake in
    the midst of its answer.
    """

    def __init__(self, *first: str | int) -> None:
        self.metrics = CarriedMetrics()
        service = Service(toy_engine(), Settings("toy"), self.metrics)
        self._app = make_unguarded_app(service)
        self._first = list(first)
        self.num_asked = 0
        self.num_left = self.num_messages = 0

    async def ask(self, scope: Any, body: bytes) -> AsyncGenerator[Sequence[Any], None]:
        self.num_asked += 1
        how = self._first.pop(0) if self._first else "answers"
        if how == "full":
            raise QueueFull("9 requests are waiting")
        if how == "dies":
            raise ReplicaDied("it was killed")
        if how == "breaks":
            raise KeyError("a mistake")
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

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.scope: dict[str, Any] = {}
        self.has_left = asyncio.Event()

    async def ask(self, app: Any, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        first = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Any:
            if first:
                return first.pop()
            await self.has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert not self.messages or self.messages[-1].get("more_body", True), "behind the end"
            self.messages.append(message)

        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"abc")]
        self.scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"}
        self.scope |= {"method": "POST", "path": "/v1/completions", "query_string": b""}
        self.scope |= {"headers": headers, "client": ("127.0.0.1", 9), "scheme": "http"}
        await app(self.scope, receive, send)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def text(self) -> str:
        assert not self.messages[-1].get("more_body"), "it was cut"
        return b"".join(message["body"] for message in self.messages[1:]).decode()


def relayed(replicas: Replicas, body: dict[str, Any], timeout: float = 20.0) -> Client:
    """Asks once; returns what the client got."""
    return run(replicas, lambda client, app: client.ask(app, body), timeout)


def run(
    replicas: Replicas, act: Callable[[Client, Any], Awaitable[None]], timeout: float = 20.0
) -> Client:
    metrics = Metrics()
    relay = Relay(replicas.ask, timeout, metrics)
    app = Guards(relay, Settings("front"), metrics, has_ids=True)

    async def main() -> Client:
        client = Client()
        await act(client, app)
        return client

    client = asyncio.run(main())
    client.scope["scraped"] = metrics.scrape().decode()
    return client


def choice_of(client: Client) -> Any:
    assert client.status == 200, client.text
    return json.loads(client.text)["choices"]


EXPECTED = toy_engine().generate("hello", raw=True, max_new_tokens=30).text


def streamed(client: Client) -> tuple[str, Any]:
    """Returns a stream's text and its last event."""
    *parts, last = events(client.text)
    return "".join(part["choices"][0]["text"] for part in parts), last


def test_an_answer_is_the_replicas() -> None:
    client = relayed(Replicas(), ASK)
    assert choice_of(client)[0]["text"] == EXPECTED
    assert "x-specsplit-retries" not in client.headers
    assert "x-request-id" not in client.headers, "the server in front gave it"
    assert client.scope["log"]["completion_tokens"] == 30
    assert 'specsplit_answers_total{finish_reason="length"} 1.0' in client.scope["scraped"]
    assert 'specsplit_tokens_total{kind="completion"} 30.0' in client.scope["scraped"]
    assert 'path="/v1/completions",status="200"} 1.0' in client.scope["scraped"]
    assert streamed(relayed(Replicas(), STREAM)) == (EXPECTED, "[DONE]")


@pytest.mark.parametrize("death", ["dies", 0, 1], ids=["at once", "silent", "behind its headers"])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
def test_a_replica_that_dies_before_it_answers_is_replaced(
    death: str | int, body: dict[str, Any]
) -> None:
    replicas = Replicas(death, "dies")
    client = relayed(replicas, body)
    found = streamed(client)[0] if "stream" in body else choice_of(client)[0]["text"]
    assert found == EXPECTED
    assert client.headers["x-specsplit-retries"] == "2"
    assert client.scope["log"]["replicas_died"] == 2
    assert replicas.num_asked == 3


def test_a_request_that_kills_is_given_up() -> None:
    replicas = Replicas(*["dies"] * 9)
    for body in (ASK, STREAM):
        client = relayed(replicas, body)
        assert client.status == 503
        assert json.loads(client.text)["error"]["code"] == "replica_died"
        assert client.scope["log"]["error"] == "replica_died"
    assert replicas.num_asked == 6, "not all replicas are taken along"


def test_a_stream_that_is_cut_ends_with_an_error() -> None:
    replicas = Replicas(3)  # its headers and two events
    client = relayed(replicas, STREAM)
    assert client.status == 200
    text, last = streamed(client)
    assert last["error"]["code"] == "replica_died"
    assert EXPECTED.startswith(text)
    assert 0 < len(text) < len(EXPECTED)
    assert replicas.num_asked == 1, "a stream that was begun is not begun again"


def test_a_death_behind_the_end_is_no_error() -> None:
    """The report alone is missing then, which no client sees."""
    whole = Replicas()
    relayed(whole, STREAM)
    client = relayed(Replicas(whole.num_messages - 1), STREAM)
    assert streamed(client) == (EXPECTED, "[DONE]")
    assert "completion_tokens" not in client.scope["log"], "it died before its report"


def test_no_part_of_an_answer_that_is_no_stream_is_sent_before_the_rest() -> None:
    num_asked = 0

    async def ask(scope: Any, body: bytes) -> AsyncGenerator[Sequence[Any], None]:
        nonlocal num_asked
        num_asked += 1
        yield [{"type": "http.response.start", "status": 200, "headers": []}]
        yield [{"type": "http.response.body", "body": b"%d, " % num_asked, "more_body": True}]
        if num_asked == 1:
            raise ReplicaDied("it was killed")
        yield [{"type": "http.response.body", "body": b"and more", "more_body": False}]

    replicas = Replicas()
    replicas.ask = ask  # type: ignore[method-assign]
    assert relayed(replicas, ASK).text == "2, and more"


def test_a_full_queue_refuses_new_requests_only() -> None:
    replicas = Replicas("full")
    client = relayed(replicas, ASK)
    assert client.status == 429
    assert client.headers["retry-after"] == "1"
    assert (
        json.loads(client.text)["error"]["message"]
        == "9 requests are waiting, the most allowed here; try again in 1 s"
    )
    accepted = Replicas("dies", "full", "full")
    assert choice_of(relayed(accepted, ASK))[0]["text"] == EXPECTED
    assert accepted.num_asked == 4


def test_a_replica_that_hangs_is_a_timeout() -> None:
    replicas = Replicas("hangs")
    client = relayed(replicas, ASK, timeout=0.05)
    assert client.status == 504
    assert json.loads(client.text)["error"]["code"] == "timeout"
    assert replicas.num_left == 1, "the replica is told"


@pytest.mark.parametrize("how", ["breaks", "ends"])
def test_a_mistake_of_ours_is_500(how: str, caplog: pytest.LogCaptureFixture) -> None:
    replicas = Replicas(how)
    client = relayed(replicas, ASK if how == "breaks" else STREAM)
    if how == "breaks":
        assert client.status == 500
        assert json.loads(client.text)["error"]["code"] == "internal_error"
    else:
        assert streamed(client)[1]["error"]["code"] == "internal_error"
    assert caplog.records[0].levelname == "ERROR"
    assert replicas.num_asked == 1


def test_refusals_of_a_replica_are_handed_on() -> None:
    for body in ({**ASK, "temperature": 9}, {**STREAM, "prompt": [999]}):
        client = relayed(Replicas(), body)
        assert client.status == 400
        assert json.loads(client.text)["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_is_not_asked_for_again() -> None:
    replicas = Replicas("hangs")

    async def leave(client: Client, app: Any) -> None:
        task = asyncio.create_task(client.ask(app, ASK))
        while not replicas.num_asked:
            await asyncio.sleep(0)
        client.has_left.set()
        await task

    client = run(replicas, leave)
    assert client.messages == []
    assert client.scope["log"]["gone"] is True
    assert replicas.num_asked == replicas.num_left == 1


def test_leaving_ends_the_answer_of_a_replica() -> None:
    replicas = Replicas()

    async def leave(client: Client, app: Any) -> None:
        task = asyncio.create_task(client.ask(app, {**STREAM, "max_tokens": 300}))
        while len(client.messages) < 3:
            await asyncio.sleep(0)
        client.has_left.set()
        await task

    client = run(replicas, leave)
    assert client.messages[-1]["more_body"], "nothing is sent to nobody"
    assert ("count_end", ("cancelled",)) in replicas.metrics.take()


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "spec_runtime.serving.ray_app", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("spec_runtime.serving.ray_app")
    assert str(caught.value) == "Ray Serve is not installed: pip install 'specsplit[ray]'"
