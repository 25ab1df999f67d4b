"""Tests what a server does under load and bad clients: queue, timeouts, disconnects, stops."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from bpe_tokenizer import BpeTokenizer
from gates import in_loop
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MESSAGES,
    PATIENCE,
    RESPONSES,
    GatedRuns,
    events,
    held,
    in_process,
    metrics,
    served,
    toy_engine,
    wait_until,
)
from small import raising
from test_trials import BOMB, PATIENT, as_format
from toy_backend import CHATML
from toy_engine import make_engine

from spec_runtime import QueueFull, SamplingParams, UserError
from spec_runtime.batch.batch import Batch
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.errors import DeviceLostError
from spec_runtime.loop.call import Call
from spec_runtime.queue.admission import Admission
from spec_runtime.queue.engine_queue import EngineQueue
from spec_runtime.serve import service, streams
from spec_runtime.serve.answers import Answers
from spec_runtime.serve.errors import ApiError, as_api_error, response
from spec_runtime.serve.metrics import Metrics
from spec_runtime.serve.settings import Settings
from spec_runtime.text.prompt import Prompt

BODY = {"prompt": "hello", "max_tokens": 30, "temperature": 0}
STREAM = {**BODY, "stream": True}
LONG = {**STREAM, "max_tokens": 1000, "ignore_eos": True, "logprobs": 5}
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


def wait_for(client: Any, number: int, name: str) -> None:
    wait_until(lambda: metrics(client)[name] == number)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    """Reads a chunked response up to its last chunk."""
    data = b""
    while not data.endswith(b"0\r\n\r\n") and (part := connection.recv(65536)):
        data += part
    return data


def test_a_full_queue_is_429_and_the_rest_is_answered() -> None:
    with held(max_waiting=2) as (_, client, runs), ThreadPoolExecutor(3) as pool:
        bodies = [{**BODY, "max_tokens": 60 + number} for number in range(3)]
        replies = [pool.submit(client.post, COMPLETIONS, json=body) for body in bodies]
        runs.wait_for_run()
        wait_for(client, 2, "waiting_requests")
        assert metrics(client)["running_requests"] == 1
        assert client.get("/ready").status_code == 503
        for body in (BODY, STREAM):
            reply = client.post(COMPLETIONS, json=body)
            assert reply.status_code == 429
        runs.let_through()
        tokens = [each.result().json()["usage"]["completion_tokens"] for each in replies]
        assert tokens == [60, 61, 62]
        assert client.get("/ready").status_code == 200
        assert client.post(COMPLETIONS, json=BODY).status_code == 200


@pytest.mark.slow
def test_a_grammar_that_does_not_end_keeps_nobody_waiting() -> None:
    """Its stream is over after the server's time; others are answered meanwhile."""
    tokenizer = BpeTokenizer(ChatTemplate(CHATML, name="the toy template"), limits=PATIENT)
    engine = make_engine("none", vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    with served(engine, timeout=2.0) as server, ThreadPoolExecutor(1) as pool:
        client = server.client()
        chat = {"messages": HELLO, "max_tokens": 4}
        asked = {**chat, "stream": True, "response_format": as_format(BOMB)}
        bomb = pool.submit(client.post, CHAT, json=asked)
        wait_for(client, 1, "running_requests")
        for grammar in (None, {"type": "regex", "regex": "[ab]"}):
            assert client.post(CHAT, json={**chat, "response_format": grammar}).is_success
        assert client.get("/ready").status_code == 200
        assert not bomb.done()
        assert events(bomb.result().text)[-1]["error"]["code"] == "timeout"
        wait_for(client, 0, "running_requests")


def test_a_server_whose_preparation_is_stuck_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_end = toy_engine(), threading.Event()
    make_call = engine.make_call

    def make_late(*arguments: Any, **options: Any) -> Call:
        assert may_end.wait(PATIENCE)
        return make_call(*arguments, **options)

    monkeypatch.setattr(engine, "make_call", make_late)
    monkeypatch.setattr(service, "STUCK_SECONDS", 0.1)
    with served(engine) as server, ThreadPoolExecutor(1) as pool:
        client = server.client()
        reply = pool.submit(client.post, COMPLETIONS, json=BODY)
        wait_until(lambda: client.get("/ready").status_code == 503)
        may_end.set()
        assert reply.result().status_code == 200
        assert client.get("/ready").status_code == 200


def test_a_server_where_nobody_is_answered_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STUCK_SECONDS", 0.1)
    with held() as (_, client, runs), ThreadPoolExecutor(1) as pool:
        assert client.get("/ready").status_code == 200
        reply = pool.submit(client.post, COMPLETIONS, json=BODY)
        wait_until(lambda: client.get("/ready").status_code == 503)
        runs.let_through()
        assert reply.result().status_code == 200
        assert client.get("/ready").status_code == 200


def test_a_refused_request_gives_its_place_back() -> None:
    with served(max_waiting=0, max_streams=1) as server, server.client() as client:
        for wrong in ({"prompt": [999]}, {"stop": [""]}) * 2:
            for body in (BODY, STREAM):
                assert client.post(COMPLETIONS, json={**body, **wrong}).status_code == 400
        for _ in range(2):
            assert client.post(COMPLETIONS, json=STREAM).status_code == 200
            wait_for(client, 0, "open_streams")


def test_streams_are_limited() -> None:
    with held(max_streams=1) as (server, client, runs):
        with server.open_request(COMPLETIONS, STREAM) as stream:
            runs.wait_for_run()
            reply = client.post(COMPLETIONS, json=STREAM)
            assert reply.status_code == 429
            assert "1 streams are open" in reply.json()["error"]["message"]
            runs.let_through()
            assert b"[DONE]" in read_all(stream)
        wait_for(client, 0, "open_streams")
        assert client.post(COMPLETIONS, json=STREAM).status_code == 200


def test_a_request_that_took_too_long_gives_its_place_back() -> None:
    with held(num_runs=2, timeout=0.4) as (_, client, runs):
        *_, last = events(client.post(COMPLETIONS, json=STREAM).text)
        assert last["error"]["code"] == "timeout"
        for name in ("running_requests", "open_streams"):  # which are counted after the reply's end
            wait_for(client, 0, name)
        runs.let_through()
        wait_until(lambda: client.post(COMPLETIONS, json=BODY).status_code == 200)


@in_loop
async def test_a_request_ends_when_its_timeout_is_over() -> None:
    class Noting(Metrics):
        def count_end(self, reason: str) -> None:
            ends.append(reason)

    def prepare() -> list[Call]:
        return [engine.prepare("hello", params=SamplingParams(max_new_tokens=30))]

    ends: list[str] = []
    later = asyncio.Event()
    engine = toy_engine()
    runs = GatedRuns(engine)
    queue = EngineQueue(Batch(engine), Admission(max_waiting=1))
    answers = Answers(queue, prepare, False, timeout=0.1, metrics=Noting())
    asyncio.get_running_loop().call_later(0.15, ends.append, "later")
    asyncio.get_running_loop().call_later(0.15, later.set)
    await later.wait()
    runs.let_through()
    answers.close()
    await queue.close()
    assert ends == ["timeout", "later"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, BODY), (COMPLETIONS, STREAM), ("/page/answer", {"messages": HELLO})],
)
def test_a_disconnect_ends_the_answer_within_a_step(path: str, body: dict[str, Any]) -> None:
    body = {**body, "max_tokens": 200}
    with held(num_runs=1, max_waiting=1) as (server, client, runs):
        connection = server.open_request(path, body)
        waiting = server.open_request(path, body)
        wait_for(client, 1, "waiting_requests")
        wait_until(lambda: runs.num_begun == 2)
        waiting.close()  # before its turn came
        wait_for(client, 0, "waiting_requests")
        connection.close()
        wait_for(client, 0, "running_requests")
        runs.let_through()
        assert client.post(COMPLETIONS, json={**BODY, "max_tokens": 1}).status_code == 200
        assert runs.num_begun == 3, "the step that ran when the client left was its last"


@pytest.mark.parametrize(
    ("path", "ping"),
    [
        (COMPLETIONS, ": ping"),
        (RESPONSES, ": ping"),
        (MESSAGES, 'event: ping\ndata: {"type":"ping"}'),
    ],
)
def test_a_stream_has_headers_and_pings_while_its_prompt_is_read(
    path: str, ping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(streams, "PING_SECONDS", 0.01)
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: BODY,
        RESPONSES: {"input": "hello", "max_output_tokens": 30},
        MESSAGES: {"messages": HELLO, "max_tokens": 30},
    }
    body = {**bodies[path], "stream": True}
    with held() as (_, client, runs), client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        pings = ping.splitlines()
        for _ in range(2):
            assert [next(lines) for _ in (*pings, "")] == [*pings, ""]
        runs.let_through()
        rest = [line for line in lines if line and line not in pings]
    assert len(rest) > 4


def test_what_is_refused_late_has_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No header goes out before the request was found right, however long that takes."""
    monkeypatch.setattr(streams, "LOOK_SECONDS", 0.01)
    engine = toy_engine()
    encode = engine.encode

    def encode_later(prompt: Prompt, *arguments: Any, **options: Any) -> list[int]:
        time.sleep(0.1)
        return encode(prompt, *arguments, **options)

    monkeypatch.setattr(engine, "encode", encode_later)
    with served(engine, max_prompt=3) as server, server.client() as client:
        assert client.post(COMPLETIONS, json=STREAM).status_code == 400


def test_a_slow_reader_holds_up_nobody() -> None:
    with served(toy_engine(max_length=1200)) as server, server.client() as client:
        slow = server.open_request(COMPLETIONS, LONG)
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        found = metrics(client)
        assert (found["running_requests"], found["open_streams"]) == (0, 1)
        assert b"[DONE]" in read_all(slow), "nothing is lost for the slow reader"
        slow.close()
        wait_for(client, 0, "open_streams")
        lost = server.open_request(COMPLETIONS, LONG)
        wait_for(client, 1, "open_streams")
        lost.close()  # with most of its answer unread
        wait_for(client, 0, "open_streams")


def test_a_stop_finishes_running_and_waiting_answers() -> None:
    def is_refused() -> bool:
        try:
            connect(server.port).close()
        except ConnectionRefusedError:
            return True
        return False

    with held() as (server, client, runs), ThreadPoolExecutor(3) as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=BODY)
        runs.wait_for_run()
        stream = pool.submit(client.post, COMPLETIONS, json=STREAM)
        wait_for(client, 1, "waiting_requests")
        server.server.should_exit = True
        wait_until(is_refused)
        runs.let_through()
        assert whole.result().json()["usage"]["completion_tokens"] == 30
        assert events(stream.result().text)[-1] == "[DONE]"


@pytest.mark.parametrize("is_forced", [False, True], ids=["grace over", "second Ctrl-C"])
def test_answers_that_a_stop_cuts_off_end_with_an_error(
    is_forced: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toy_engine()
    runs = GatedRuns(engine)
    runs.let_through(2)
    encode = engine.encode
    may_encode = threading.Event()

    def encode_later(prompt: Prompt, *arguments: Any, **options: Any) -> list[int]:
        assert prompt != "later" or may_encode.wait(PATIENCE), "no test allowed this prompt"
        return encode(prompt, *arguments, **options)

    monkeypatch.setattr(engine, "encode", encode_later)
    monkeypatch.setattr(logging.getLogger("spec_runtime.access"), "propagate", True)
    caplog.set_level(logging.INFO, "spec_runtime.access")
    with (
        served(engine) as server,
        server.client() as client,
        ThreadPoolExecutor(4) as pool,
        connect(server.port) as connection,
    ):
        connection.sendall(HEAD.encode() + b"{")
        wait_until(lambda: server.server.server_state.tasks)
        replies = [pool.submit(client.post, COMPLETIONS, json=STREAM)]
        wait_until(lambda: runs.num_begun == 3)
        for body in (BODY, STREAM, {**BODY, "prompt": "later"}):
            replies.append(pool.submit(client.post, COMPLETIONS, json=body))
        wait_for(client, 3, "waiting_requests")
        server.server.config.timeout_graceful_shutdown = None if is_forced else 0
        server.server.force_exit = is_forced
        server.server.should_exit = True
        assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        stream, *others = [each.result() for each in replies]
        may_encode.set()
        runs.let_through()
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
    monkeypatch.setattr("spec_runtime.serve.guards.NOTICE_SECONDS", 0.01)
    with (
        served(toy_engine(max_length=1200)) as server,
        server.client() as client,
        server.open_request(COMPLETIONS, LONG),
    ):
        wait_for(client, 1, "open_streams")
        wait_for(client, 0, "running_requests")
        server.server.force_exit = server.server.should_exit = True
        wait_until(lambda: not server.thread.is_alive())


def test_broken_requests_are_refused_and_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_runtime.serve.guards.BODY_SECONDS", 0.05)
    hosts = ("localhost", "127.0.0.1")
    with served(hosts=hosts) as server, server.client() as client:
        for data, status in (
            (GET + b"Host: evil.example\r\n\r\n", b"403"),
            (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
            (b"GET\r\n\r\n\r\n\r\n", b"400"),
            (b"POST / HTTP/1.1\r\nA: \xff\x00\r\n\r\n\r\n\r\n", b"400"),
            (HEAD.encode() + b"{", b"408"),  # a body that never ends
        ):
            with connect(server.port) as connection:
                connection.sendall(data)
                assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)
        with connect(server.port) as connection:  # it leaves in the midst of its body
            connection.sendall(HEAD.encode() + b"{")
        assert client.post(COMPLETIONS, json=BODY).status_code == 200


LINES = [
    ("GET http://localhost/health", 200),
    ("GET HTTP://LOCALHOST.:80/health", 200),
    ("GET http://[::1]:8000/health", 200),
    ("GET http://evil.example/health", 403),
    ("GET https://evil.example:443/health?a=//localhost/", 403),
    ("GET http://localhost.evil.example/health", 403),
    ("GET http://evil.example@localhost/health", 403),
    ("GET http://localhost@evil.example/health", 403),
    ("GET http://[::2]/health", 403),
    ("GET http://evil.example", 400),
    ("GET //evil.example/health", 404),
    ("OPTIONS *", 404),
    ("CONNECT evil.example:443", 400),
    ("GET evil.example:443", 400),
]


def test_a_target_names_the_server_as_well() -> None:
    """Host has to be a known name too, and X-Forwarded-Host changes nothing."""
    with served(hosts=("localhost", "::1")) as server:
        for line, status in LINES:
            other = 400 if status == 400 else 403
            for host, forwarded, right in (
                ("localhost", "evil.example", status),
                ("evil.example", "localhost", other),
            ):
                more = f"Host: {host}\r\nX-Forwarded-Host: {forwarded}\r\n\r\n"
                with connect(server.port) as connection:
                    connection.sendall(f"{line} HTTP/1.1\r\n{more}".encode())
                    assert connection.recv(65536).split()[1] == b"%d" % right, line


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
DATA = json.dumps(BODY)
POST = (
    HEAD.replace("100", f"{len(DATA)}\r\nContent-Type: application/json").encode() + DATA.encode()
)
CHUNKED = HEAD.replace("Content-Length: 100", "Transfer-Encoding: chunked").encode()
LARGE_BODY = HEAD.replace("100", "1000000").encode()
NAME = "spec_runtime.serve.connections."


ENDLESS = {
    "header": (GET + b"A: ", b"x" * 1000),
    "headers": (GET, b"A: b\r\n" * 200),
    "path": (b"GET /", b"x" * 1000),
    "empty lines": (b"", b"\r\n" * 500),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\nA: ", b"x" * 1000),
    "size of a chunk": (CHUNKED + b"1;", b"x" * 1000),
    "pipelined": (POST, (GET + b"\r\n") * 20),
}
# Of connections whose client completes no request: one with a body that is refused at once, since
# it has no key.
SLOW = {
    "nothing": (b"", b""),
    "half a line": (b"GET", b""),
    "slow header": (GET + b"A: ", b"x"),
    "slow nothing": (GET + b"\r\n", b"\r\n"),
    "refused body": (LARGE_BODY, b"x"),
    "slow body": (LARGE_BODY.replace(b"Host", b"Authorization: Bearer k\r\nHost"), b"x"),
}


def test_an_endless_request_is_refused_and_others_are_answered() -> None:
    def send(connection: socket.socket, begin: bytes, more: bytes) -> None:
        with suppress(ConnectionError):
            connection.sendall(begin)
            for _ in range(2000):
                connection.sendall(more)

    with held() as (server, client, _), ThreadPoolExecutor(1) as pool:
        for begin, more in ENDLESS.values():
            with connect(server.port) as connection:
                sending = pool.submit(send, connection, begin, more)
                with suppress(ConnectionError):
                    while connection.recv(65536):
                        pass
                sending.result()
            assert client.get("/health").status_code == 200


def test_a_connection_whose_client_completes_no_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_closed(connection: socket.socket, more: bytes) -> bool:
        try:
            connection.sendall(more)
            return connection.recv(65536) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    monkeypatch.setattr(NAME + "HEAD_SECONDS", 0.1)
    monkeypatch.setattr("spec_runtime.serve.guards.BODY_SECONDS", 0.1)
    monkeypatch.setattr(NAME + "LATE_SECONDS", 0.1)
    with served(api_key="k") as server:
        for begin, more in SLOW.values():
            with connect(server.port) as connection:
                connection.settimeout(0.01)
                connection.sendall(begin)
                wait_until(functools.partial(is_closed, connection, more))


@pytest.mark.parametrize("last", [b"", GET, POST[:-1]], ids=["no", "half a header", "half a body"])
def test_a_connection_that_waits_for_answers_stays(
    last: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = "spec_runtime.serve.guards."
    with held() as (server, _, runs), connect(server.port) as connection:
        connection.sendall(POST)
        runs.wait_for_run()
        for name in (NAME + "HEAD_SECONDS", NAME + "LATE_SECONDS", guards + "BODY_SECONDS"):
            monkeypatch.setattr(name, 0.01)
        connection.sendall(GET + b"\r\n" + last)
        time.sleep(0.1)  # in which every timer would have ended the connection
        runs.let_through()
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.count(b"HTTP/1.1 200") == 2


def test_a_timer_that_is_late_closes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lag is negative here, so that every timer is late."""
    monkeypatch.setattr(NAME + "HEAD_SECONDS", 0.01)
    monkeypatch.setattr(NAME + "LAG_SECONDS", -1.0)
    data = b""
    with served() as server, connect(server.port) as connection:
        for sent in (POST[:20], POST[20:], POST):
            time.sleep(0.05)  # in which the timer ends several times
            connection.sendall(sent)
        while data.count(b"HTTP/1.1 200") < 2 and (part := connection.recv(65536)):
            data += part
    assert data.count(b"HTTP/1.1 200") == 2


def test_many_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NAME + "MAX_CONNECTIONS", 3)
    with held() as (server, client, runs), ExitStack() as idle:
        answered = idle.enter_context(connect(server.port))
        answered.sendall(POST)
        runs.wait_for_run()
        for _ in range(5):
            idle.enter_context(connect(server.port))
        assert client.get("/health").status_code == 200
        wait_until(lambda: len(server.server.server_state.connections) == 3)
        runs.let_through()
        assert answered.recv(65536).startswith(b"HTTP/1.1 200"), "though it is older"


# ---- admission and settings ----


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


@pytest.mark.parametrize(("num_answered", "seconds"), [(1, 50), (5, 10), (10, 5)])
def test_where_many_are_answered_at_once_a_full_queue_is_shorter(
    num_answered: int, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of ten requests of 10 s each are over after as long as they take by turns."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    admission = Admission(max_waiting=10 - num_answered, num_answered=num_answered)
    for _ in range(50):
        place = admission.enter()
        now += 10
        place.leave()
    for _ in range(10):
        admission.enter()
    with pytest.raises(QueueFull) as caught:
        admission.enter()
    assert caught.value.seconds == seconds


NO_ORIGINS = ("chat.example", "https://a.example/", "", "https://A.example", "https://*.example")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_waiting": -1}, "got max_waiting -1, expected 0 or more"),
        ({"max_streams": 0}, "got max_streams 0, expected 1 or more"),
        ({"max_body": 0}, "got max_body 0, expected 1 or more"),
        ({"max_prompt": 0}, "got max_prompt 0, expected 1 or more or None"),
        ({"timeout": 0.0}, "got timeout 0.0, expected more than 0"),
        ({"timeout": float("nan")}, "got timeout nan, expected a finite float"),
        ({"api_key": ""}, "got an empty API key"),
        ({"hosts": ("a", "http://a")}, "got host 'http://a', expected a name or an address"),
        *(({"cors_origins": ("*", each)}, "got origin") for each in NO_ORIGINS),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings("toy", **change)


def test_errors_are_json_that_every_client_can_read() -> None:
    for path in ("/v1/completions", "/v1/messages"):
        error = response(ApiError(400, "half a pair: \ud800, and é"), path)
        assert json.loads(bytes(error.body))["error"]["message"].endswith("é")


def test_a_lost_gpu_is_not_ready_and_ends_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    engine = toy_engine()
    with in_process(engine) as client:
        assert client.get("/ready").status_code == 200
        engine.target.lend()[0].run = raising(DeviceLostError("an illegal memory access"))  # type: ignore[method-assign]
        assert client.post(COMPLETIONS, json=BODY).status_code == 500
        assert client.get("/ready").status_code == 503
        assert not killed, "no other process would take its place"
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the supervisor")
        assert client.post(COMPLETIONS, json=BODY).status_code == 500
    assert killed == [(os.getpid(), signal.SIGTERM)]
