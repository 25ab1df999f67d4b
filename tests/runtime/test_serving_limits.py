"""Tests what a server does under load and bad clients: queue, timeouts, disconnects, stops."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

for module in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(module, reason=f"{module} is not installed; the extra serve has it")
httpx = pytest.importorskip("httpx")
from served import (  # noqa: E402
    PATIENCE,
    events,
    held_engine,
    metrics,
    served,
    toy_engine,
    wait_until,
)

from spec_runtime import Chunk, QueueFull  # noqa: E402
from spec_runtime.requests.call import Call  # noqa: E402
from spec_runtime.serving.errors import as_api_error  # noqa: E402
from spec_runtime.serving.settings import Settings  # noqa: E402
from spec_runtime.text.tokenizer import Prompt  # noqa: E402
from spec_runtime.waiting.admission import Admission  # noqa: E402

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 30, "temperature": 0}


def gauge(client: Any, name: str) -> float:
    return metrics(client)[f"specsplit_{name}"]


def test_a_full_queue_is_429_and_the_rest_is_answered_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, holder = held_engine()
    answer = engine.answer
    ended: list[int] = []  # the max_tokens of those answered

    def noted(call: Call) -> Generator[Chunk, None, None]:
        for chunk in answer(call):
            if chunk.result is not None:
                ended.append(call.params.max_new_tokens)
            yield chunk

    prepare = engine.prepare
    asked: list[object] = []  # prompts, in the order in which the engine's queue got them

    def noted_prompt(prompt: Prompt, **options: Any) -> Call:
        asked.append(prompt)
        return prepare(prompt, **options)

    monkeypatch.setattr(engine, "answer", noted)
    monkeypatch.setattr(engine, "prepare", noted_prompt)

    def ask(client: Any, number: int) -> Any:
        return client.post(COMPLETIONS, json={**BODY, "max_tokens": 60 + number})

    with served(engine, max_waiting=2) as server, server.client() as client:
        with ThreadPoolExecutor(3) as pool:
            waiting = []
            for number in range(3):
                waiting.append(pool.submit(ask, client, number))
                wait_until(lambda n=number: len(asked) == n + 1)
            wait_until(lambda: holder.num_begun == 1)
            assert gauge(client, "waiting_requests") == 2
            assert gauge(client, "running_requests") == 1
            assert client.get("/ready").status_code == 503
            for more in ({}, {"stream": True}):
                reply = client.post(COMPLETIONS, json={**BODY, **more})
                assert reply.status_code == 429
                assert 1 <= int(reply.headers["retry-after"]) <= 60
                assert reply.json()["error"]["code"] == "rate_limit_exceeded"
            holder.free()
            replies = [each.result() for each in waiting]
        assert ended == [60, 61, 62]
        assert [r.json()["usage"]["completion_tokens"] for r in replies] == ended
        assert client.get("/ready").status_code == 200
        assert client.post(COMPLETIONS, json=BODY).status_code == 200


def test_a_refused_request_gives_its_place_back() -> None:
    with served(toy_engine(), max_waiting=0, max_streams=1) as server, server.client() as client:
        for body in ({**BODY, "prompt": [999]}, {**BODY, "stop": [""]}) * 2:
            for more in ({}, {"stream": True}):
                assert client.post(COMPLETIONS, json={**body, **more}).status_code == 400
        assert client.post(COMPLETIONS, json={**BODY, "stream": True}).status_code == 200
        wait_until(lambda: gauge(client, "open_streams") == 0)
        assert client.post(COMPLETIONS, json={**BODY, "stream": True}).status_code == 200


def test_streams_are_limited() -> None:
    engine, holder = held_engine()
    with served(engine, max_streams=1) as server, server.client() as client:
        with server.open_request(COMPLETIONS, {**BODY, "stream": True}) as stream:
            wait_until(lambda: holder.num_begun == 1)
            reply = client.post(COMPLETIONS, json={**BODY, "stream": True})
            assert reply.status_code == 429
            assert "1 streams are open" in reply.json()["error"]["message"]
            holder.free()
            assert b"[DONE]" in read_all(stream)
        wait_until(lambda: gauge(client, "open_streams") == 0)
        assert client.post(COMPLETIONS, json={**BODY, "stream": True}).status_code == 200


def read_all(connection: socket.socket) -> bytes:
    """Reads a chunked response up to its last chunk."""
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = connection.recv(65536)
        if not part:
            return data
        data += part
    return data


def test_a_timeout_is_504_or_a_streams_last_event() -> None:
    engine, holder = held_engine()
    with served(engine, timeout=1.0) as server, server.client() as client:
        holder.allowed.release(1)
        reply = client.post(COMPLETIONS, json={**BODY, "stream": True})
        assert reply.status_code == 200
        *parts, last = events(reply.text)
        assert parts
        assert last["error"]["code"] == "timeout"
        assert holder.num_begun == 2, "it was in the midst of a step"
        for more in ({}, {"stream": True}):
            reply = client.post(COMPLETIONS, json={**BODY, **more})  # which never has its turn
            assert reply.status_code == 504
            assert reply.json()["error"]["code"] == "timeout"
        for name in ("running_requests", "open_streams"):  # which fall behind the reply's end
            wait_until(lambda name=name: gauge(client, name) == 0)
        holder.free()
        wait_until(lambda: client.post(COMPLETIONS, json=BODY).status_code == 200)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_disconnect_ends_the_answer_within_a_step(is_stream: bool) -> None:
    engine, holder = held_engine()
    body = {**BODY, "max_tokens": 200, "stream": is_stream}
    with served(engine, max_waiting=1) as server, server.client() as client:
        connection = server.open_request(COMPLETIONS, body)
        waiting = server.open_request(COMPLETIONS, body)
        wait_until(lambda: gauge(client, "waiting_requests") == 1)
        wait_until(lambda: holder.num_begun == 1)
        waiting.close()  # before its turn came
        wait_until(lambda: gauge(client, "waiting_requests") == 0)
        connection.close()
        wait_until(lambda: gauge(client, "running_requests") == 0)
        holder.allowed.release(1)
        with ThreadPoolExecutor(1) as pool:
            after = pool.submit(client.post, COMPLETIONS, json={**BODY, "max_tokens": 1})
            assert after.result().status_code == 200, "it needs no step of the drafter"
        assert holder.num_begun == 1, "the step that ran when the client left was the last"
        holder.free()


def test_a_slow_reader_holds_up_nobody() -> None:
    engine = toy_engine(max_length=1200)
    long = {"prompt": "hello", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    long |= {"logprobs": 5, "stream": True}
    with served(engine) as server, server.client() as client:
        slow = server.open_request(COMPLETIONS, long)
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        assert gauge(client, "running_requests") == 0
        assert gauge(client, "open_streams") == 1
        assert b"[DONE]" in read_all(slow), "nothing is lost for the slow reader"
        slow.close()
        wait_until(lambda: gauge(client, "open_streams") == 0)
        lost = server.open_request(COMPLETIONS, long)
        wait_until(lambda: gauge(client, "open_streams") == 1)
        lost.close()  # with most of its answer unread
        wait_until(lambda: gauge(client, "open_streams") == 0)


def test_a_stop_finishes_running_and_waiting_answers() -> None:
    engine, holder = held_engine()
    with served(engine) as server, server.client() as client, ThreadPoolExecutor(3) as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=BODY)
        wait_until(lambda: holder.num_begun == 1)
        stream = pool.submit(client.post, COMPLETIONS, json={**BODY, "stream": True})
        wait_until(lambda: gauge(client, "waiting_requests") == 1)
        server.server.should_exit = True

        def is_refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", server.port), 1).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_until(is_refused)
        holder.free()
        assert whole.result().json()["usage"]["completion_tokens"] == 30
        assert events(stream.result().text)[-1] == "[DONE]"


@pytest.mark.parametrize("is_forced", [False, True], ids=["grace over", "second Ctrl-C"])
def test_answers_that_a_stop_cuts_off_end_with_an_error(
    is_forced: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, holder = held_engine()
    holder.allowed.release(1)
    encode = engine.encode
    may_encode = threading.Event()

    def encode_later(prompt: Prompt, *arguments: Any, **options: Any) -> list[int]:
        assert prompt != "later" or may_encode.wait(PATIENCE), "no test allowed this prompt"
        return encode(prompt, *arguments, **options)

    monkeypatch.setattr(engine, "encode", encode_later)
    monkeypatch.setattr(logging.getLogger("spec_runtime.access"), "propagate", True)
    caplog.set_level(logging.INFO, "spec_runtime.access")
    bodies = [{**BODY, "stream": True}, BODY, {**BODY, "stream": True}, {**BODY, "prompt": "later"}]
    half = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{"
    with (
        served(engine) as server,
        server.client() as client,
        ThreadPoolExecutor(4) as pool,
        socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection,
    ):
        connection.sendall(half.encode())
        wait_until(lambda: server.server.server_state.tasks)
        replies = [pool.submit(client.post, COMPLETIONS, json=bodies[0])]
        wait_until(lambda: holder.num_begun == 2)
        replies += [pool.submit(client.post, COMPLETIONS, json=body) for body in bodies[1:]]
        wait_until(lambda: gauge(client, "waiting_requests") == 3)
        server.server.config.timeout_graceful_shutdown = None if is_forced else 0
        server.server.force_exit = is_forced
        server.server.should_exit = True
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        stream, *others = [each.result() for each in replies]
        may_encode.set()
        holder.free()
    assert stream.status_code == 200
    *parts, last = events(stream.text)
    assert parts
    for reply in others:
        assert reply.status_code == 503
        assert reply.json() == last
    assert last["error"]["code"] == "cancelled"
    assert "Traceback" not in caplog.text
    access = [each for each in caplog.records if each.name == "spec_runtime.access"]
    lines = [json.loads(each.getMessage()) for each in access]
    cut = [line["status"] for line in lines if line.get("error") == "cancelled"]
    assert sorted(cut) == [200, 503, 503, 503, 503]


def test_a_reader_who_takes_nothing_does_not_hold_up_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spec_runtime.serving.guards.NOTICE_SECONDS", 0.01)
    long = {"prompt": "hello", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    long |= {"logprobs": 5, "stream": True}
    with (
        served(toy_engine(max_length=1200)) as server,
        server.client() as client,
        server.open_request(COMPLETIONS, long),
    ):
        wait_until(lambda: gauge(client, "open_streams") == 1)
        wait_until(lambda: gauge(client, "running_requests") == 0)
        server.server.force_exit = server.server.should_exit = True
        wait_until(lambda: not server.thread.is_alive())


def test_a_body_that_never_ends_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_runtime.serving.guards.BODY_SECONDS", 0.05)
    with served(toy_engine()) as server:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            connection.sendall(head.encode() + b"{")
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            connection.sendall(head.encode() + b"{")
        with server.client() as client:
            assert client.post(COMPLETIONS, json=BODY).status_code == 200


def test_broken_http_is_refused_and_does_no_harm() -> None:
    with served(toy_engine()) as server, server.client() as client:
        for data in (
            b"\x16\x03\x01\x02\x00",
            b"GET\r\n\r\n",
            b"POST / HTTP/1.1\r\nA: \xff\x00\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
                connection.sendall(data + b"\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        assert client.post(COMPLETIONS, json=BODY).status_code == 200


# ---- gates and settings ----


def test_a_full_queue_asks_for_patience_by_how_long_the_last_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    admission = Admission(max_waiting=3)
    for _ in range(50):
        place = admission.enter()
        now += 10
        place.leave()
    places = [admission.enter() for _ in range(4)]
    with pytest.raises(QueueFull, match=r"3 requests are waiting, .* try again in 20 s") as caught:
        admission.enter()
    assert as_api_error(caught.value).headers == {"Retry-After": "20"}
    places[0].leave()
    places[0].leave()  # twice does no harm
    admission.enter()
    assert not admission.has_room


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_waiting": -1}, "got max_waiting -1, expected 0 or more"),
        ({"max_streams": 0}, "got max_streams 0, expected 1 or more"),
        ({"max_body": 0}, "got max_body 0, expected 1 or more"),
        ({"max_prompt": 0}, "got max_prompt 0, expected 1 or more, or None"),
        ({"timeout": 0.0}, "got timeout 0.0, expected seconds above 0"),
        ({"timeout": float("nan")}, "got timeout nan, expected seconds above 0"),
        ({"api_key": ""}, "got an empty API key"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings("toy", **change)


def test_errors_are_json_that_every_client_can_read() -> None:
    from spec_runtime.serving.errors import ApiError, response

    error = response(ApiError(400, "half a pair: \ud800, and é"))
    assert json.loads(bytes(error.body))["error"]["message"].endswith("é")
