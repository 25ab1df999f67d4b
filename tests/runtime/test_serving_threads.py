"""Tests that nothing which grows with a request runs on the event loop, in all APIs alike."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from gates import in_loop
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MESSAGES,
    PATIENCE,
    RESPONSES,
    metrics,
    post,
    served,
    stream,
    toy_engine,
    wait_until,
)

from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve import app, errors, guards, models, service
from spec_runtime.serve.anthropic.requests import CountRequest, MessagesRequest
from spec_runtime.serve.errors import ApiError, parsed
from spec_runtime.serve.openai import replies
from spec_runtime.serve.openai.replies import TokenTexts
from spec_runtime.serve.openai.schemas import ChatRequest, CompletionRequest
from spec_runtime.serve.page import PageRequest
from spec_runtime.serve.responses.requests import ResponsesRequest
from spec_runtime.serve.responses.store import ResponseStore
from spec_runtime.serve.service import Service
from spec_runtime.serve.threads import SMALL, Threads
from spec_runtime.serve.tokens import DetokenizeRequest, TokenizeRequest

COUNT = f"{MESSAGES}/count_tokens"
TURN = {"role": "user", "content": ""}
# A request to each address, of a number of parts.
REQUESTS: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
    (CHAT, lambda num: {"messages": [TURN] * num}),
    (COMPLETIONS, lambda num: {"prompt": [1] * 8 * num}),
    (MESSAGES, lambda num: {"messages": [TURN] * num, "max_tokens": 1}),
    (COUNT, lambda num: {"messages": [TURN] * num}),
    (RESPONSES, lambda num: {"input": [TURN] * num}),
    ("/tokenize", lambda num: {"prompt": "word" * 8 * num, "return_token_strs": True}),
    ("/tokenize", lambda num: {"messages": [TURN] * num}),
    ("/detokenize", lambda num: {"tokens": [1] * 8 * num}),
    ("/page/answer", lambda num: {"messages": [TURN] * num}),
]


class Loop:
    """Watches the thread of a server's event loop: `num_calls` counts the functions that it called,
    and `longest` is the most JSON, in characters, that it read or wrote at a time."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.num_calls = self.longest = 0

    def profile(self, frame: Any, event: str, argument: Any) -> None:
        self.num_calls += threading.get_ident() == self.thread and event in ("call", "c_call")

    def note(self, text: str | bytes) -> None:
        if threading.get_ident() == self.thread:
            self.longest = max(self.longest, len(text))


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Any, Loop]]:
    """Serves a toy engine whose event loop is watched; gives a client too."""
    loop = Loop()

    def loads(text: bytes, **more: Any) -> Any:
        loop.note(text)
        return read(text, **more)

    def dumps(value: object, **more: Any) -> str:
        text = write(value, **more)
        loop.note(text)
        return text

    read, write = json.loads, json.dumps
    threading.setprofile(loop.profile)
    with pytest.MonkeyPatch.context() as patch, served() as server, server.client() as client:
        threading.setprofile(None)
        loop.thread = server.thread.ident
        patch.setattr(json, "loads", loads)
        patch.setattr(json, "dumps", dumps)
        patch.setattr(guards.access, "disabled", True)  # handlers are other tests'
        client.get("/health")
        yield client, loop


def named(each: tuple[str, Callable[[int], Any]]) -> str:
    return f"{each[0]} {next(iter(each[1](1)))}"


@pytest.mark.parametrize("asked", REQUESTS, ids=named)
def test_a_long_request_gives_the_loop_no_more_to_do(
    watched: tuple[Any, Loop], asked: tuple[str, Callable[[int], dict[str, Any]]]
) -> None:
    (client, loop), (path, make) = watched, asked
    costs = []
    for number in (4, 4, 2000):  # the first also opens what is opened once
        loop.longest, before = 0, loop.num_calls
        assert client.post(path, json=make(number)).status_code in (200, 400)
        costs.append(loop.num_calls - before)
        assert loop.longest <= SMALL
    assert len(json.dumps(make(2000))) > SMALL
    assert costs[2] < costs[1] + 1000, "each of 2000 parts would take several calls"


@contextmanager
def noted(
    patch: pytest.MonkeyPatch, *functions: tuple[type, str]
) -> Iterator[set[tuple[str, int]]]:
    """Gives the names of those of these functions that were called, and the threads."""
    found: set[tuple[str, int]] = set()

    def watch(kind: type, name: str) -> None:
        function = getattr(kind, name)

        def call(*arguments: Any, **options: Any) -> Any:
            found.add((name, threading.get_ident()))
            return function(*arguments, **options)

        patch.setattr(kind, name, call)

    for kind, name in functions:
        watch(kind, name)
    yield found


READS = [(MessagesRequest, "as_chat"), (ResponsesRequest, "as_chat"), (Service, "encode_messages")]
WRITES = [
    (TokenTexts, "text"),
    (AnswerForm, "read"),
    (AnswerForm, "num_thinking_tokens"),
    (ResponseStore, "keep"),
    (ResponseStore, "messages"),
    (ResponseStore, "item"),
]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
ANSWERED: dict[str, tuple[dict[str, Any], set[str]]] = {
    CHAT: (
        {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 3},
        {"encode_messages", "text", "num_thinking_tokens"},
    ),
    COMPLETIONS: (
        {"prompt": "hello", "max_tokens": 9, "logprobs": 3, "echo": True},
        {"text", "num_thinking_tokens"},
    ),
    MESSAGES: ({"messages": HELLO, "max_tokens": 9}, {"as_chat", "encode_messages"}),
    RESPONSES: (
        {"input": "hello", "max_output_tokens": 9, **LOGPROBS},
        {"as_chat", "encode_messages", "text", "num_thinking_tokens", "keep"},
    ),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ANSWERED)
def test_prompts_and_answers_are_read_and_written_apart_from_the_loop(
    monkeypatch: pytest.MonkeyPatch, path: str, is_stream: bool
) -> None:
    body, expected = ANSWERED[path]
    with (
        noted(monkeypatch, *READS, *WRITES) as found,
        served() as server,
        server.client() as client,
    ):
        if is_stream:
            more = {"stream_options": {"include_usage": True}} if path != MESSAGES else {}
            stream(client, path, **body, **more)
        else:
            answer = post(client, path, **body)
        if path == RESPONSES and not is_stream:
            reference = {"type": "item_reference", "id": answer["output"][0]["id"]}
            post(client, path, **body | {"input": [*HELLO, reference, *HELLO]})
            post(client, path, **body, previous_response_id=answer["id"])
            expected = expected | {"item", "messages"}
        loop = server.thread.ident
    assert {name for name, _ in found} >= expected
    assert loop not in {thread for _, thread in found}


# ---- threads with a bound ----


@in_loop
async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    begun, may_end = list[int](), threading.Event()
    threads = Threads(1, most=3)
    first = asyncio.create_task(threads.run(lambda: may_end.wait(PATIENCE)))
    waiting = [asyncio.create_task(threads.run(lambda: begun.append(1))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await threads.run(lambda: begun.append(2))
    assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    may_end.set()
    assert await first
    await waiting[1]
    assert await threads.run(lambda: len(begun)) == 1
    await threads.close()


def test_texts_that_take_long_keep_no_chat_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one is refused, and one whose client has left is never begun."""
    monkeypatch.setattr(service, "NUM_COUNTING", 1)
    monkeypatch.setattr(service, "MOST_COUNTING", 2)
    engine, may_end, begun = toy_engine(), threading.Event(), list[str]()
    encode = engine.tokenizer.encode

    def encode_late(text: str, *arguments: Any, **options: Any) -> list[int]:
        if text.startswith("late"):
            begun.append(text)
            assert may_end.wait(PATIENCE)
        return encode(text, *arguments, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", encode_late)
    with served(engine) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/tokenize", json={"prompt": "late 1"})
        wait_until(lambda: begun == ["late 1"])

        def is_full() -> bool:
            return client.post("/tokenize", json={"prompt": "x"}).status_code == 503

        with server.open_request("/tokenize", {"prompt": "late 2"}):
            wait_until(is_full)
            for path in ("/detokenize", COUNT):
                body = {"tokens": [1]} if path == "/detokenize" else {"messages": HELLO}
                reply = client.post(path, json=body)
                assert reply.status_code == 503
                assert reply.headers["retry-after"] == "1"
            assert client.get("/health").status_code == 200
            post(client, CHAT, messages=HELLO, max_tokens=2)
        left = 'requests_total{path="/tokenize",status="499"}'
        wait_until(lambda: left in metrics(client))
        may_end.set()
        assert first.result().status_code == 200
        assert post(client, "/tokenize", prompt="late 3")["count"] == 7
    assert begun == ["late 1", "late 3"]


def test_long_bodies_are_refused_where_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones are read all the same."""
    monkeypatch.setattr(models, "NUM_READING", 1)
    monkeypatch.setattr(models, "MOST_READING", 1)
    may_end, begun = threading.Event(), threading.Event()

    def parsed_late(kind: Any, body: bytes) -> Any:
        if len(body) > SMALL:
            begun.set()
            assert may_end.wait(PATIENCE)
        return parsed(kind, body)

    monkeypatch.setattr(app, "parsed", parsed_late)
    long = {"prompt": "x" * SMALL}
    with served() as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, COMPLETIONS, json=long)
        assert begun.wait(PATIENCE)
        assert client.post(COMPLETIONS, json=long).json()["error"]["code"] == "overloaded"
        post(client, COMPLETIONS, prompt="x", max_tokens=2)
        may_end.set()
        assert first.result().json()["error"]["code"] == "context_length_exceeded"


# ---- bodies with many mistakes ----

WRONG: list[tuple[type[Any], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [{}] * 5000}),
    (CompletionRequest, {"prompt": "x", "stop": [1] * 5000}),
    (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 5000}),
    (ChatRequest, {"messages": [1] * 5000}),
    (ChatRequest, {"messages": HELLO, "logit_bias": {f"x{k}": 1 for k in range(5000)}}),
    (ChatRequest, {"messages": HELLO, **{f"x{k}": 1 for k in range(5000)}}),
    (MessagesRequest, {"messages": [1] * 5000, "max_tokens": 1}),
    (CountRequest, {"messages": [{**TURN, **{f"x{k}": 1 for k in range(5000)}}]}),
    (CountRequest, {"messages": [TURN], "tools": [1] * 5000}),
    (ResponsesRequest, {"input": [1] * 5000}),
    (ResponsesRequest, {"input": "x", "include": [1] * 5000}),
    (PageRequest, {"messages": [1] * 5000}),
    (TokenizeRequest, {"messages": [1] * 5000}),
    (DetokenizeRequest, {"tokens": ["x"] * 5000}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG)
def test_many_mistakes_are_not_all_described(kind: type[Any], body: dict[str, Any]) -> None:
    """Each description takes a kilobyte, and ten microseconds in which no other thread runs."""
    with pytest.raises(ApiError):  # pydantic prepares what it needs
        parsed(kind, json.dumps(body).encode())
    data = json.dumps(body).encode()
    tracemalloc.start()
    with pytest.raises(ApiError) as caught:
        parsed(kind, data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.status_code == 400
    assert "got" in caught.value.detail
    assert peak < 2_000_000, "of 5000 mistakes, each described in a kilobyte"


def test_a_token_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of a hundred thousand tokens took half a minute."""
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(1)
        return "".join(map(chr, ids))

    codec = toy_engine().tokenizer
    monkeypatch.setattr(codec, "decode", decode)
    texts = replies.TokenTexts(codec, frozenset())
    assert [texts.text(token) for token in [97, 98] * 50] == ["a", "b"] * 50
    assert len(decoded) == 4
    assert errors.MOST_PROBLEMS < 5000
